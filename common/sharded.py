"""What only fsdp.py needs: which modules to shard, and the state of a sharded model as the other recipes save it."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

FUSED, FOREACH = (
    {"fused": True, "foreach": None},
    {"fused": None, "foreach": True},
)  # of SGD; fused, it takes no shards


def blocks(module):
    """Yield the modules in each nn.Sequential: ResNet's blocks, ViT's encoder layers, the layers of a small model."""
    for child in module.children():
        if not isinstance(module, nn.Sequential) or isinstance(child, nn.Sequential):
            yield from blocks(child)
        elif list(child.parameters()) and not isinstance(
            child, nn.modules.batchnorm._BatchNorm
        ):  # it stays fp32
            yield child


def even_out(model, val, run):
    """Call `model` with one image of the DataObject `val` if this rank's share has a batch less than another's."""
    most = -(-len(val.dataset) // (val.batch_size * run.world_size))
    if len(val) < (min(most, run.accumulate) if run.args.dry_run else most):
        images, _ = next(iter(val.source.batches(torch.zeros(1, dtype=torch.int64), 1, 0)))
        model(images.to(val.device, torch.get_default_dtype()))


def leaves(tree, change, path=()):
    """`tree`, a dict of dicts, with change((key, ...), leaf) in place of each leaf."""
    if not isinstance(tree, dict):
        return change(path, tree)
    changed = type(tree)((key, leaves(value, change, (*path, key))) for key, value in tree.items())
    if hasattr(tree, "_metadata"):  # of a model's state_dict: the versions of its modules
        changed._metadata = tree._metadata
    return changed


def save(run):
    """Gather on rank 0 the state of an unsharded model and optimizer, and save it there; all ranks call this."""

    def whole(_, leaf):
        if not isinstance(leaf, DTensor):
            return leaf
        leaf = leaf.full_tensor()
        return leaf.cpu() if run.rank == 0 else None

    states = {} if run.args.dry_run else state_dicts(run, whole)
    if run.rank == 0:
        run.save(states)


def state_dicts(run, change):
    """The state_dicts of model and optimizer with change((key, ...), leaf) in place of each leaf."""
    states = leaves({name: part.state_dict() for name, part in run.state.items()}, change)
    for group in states["optimizer"]["param_groups"]:
        group.update(FUSED)  # as the other recipes have it
    return states


def set_up(model, optimizer, load=lambda saved, own: saved):
    """Let the SGD `optimizer` use foreach, and let both load the state of an unsharded one: each rank keeps its shares.

    `load` is called first, with that state and the sharded parameters: a dict by their names and their numbers.
    """
    for group in optimizer.param_groups:
        group.update(FOREACH)
    own = dict(model.named_parameters())
    own |= enumerate(parameter for group in optimizer.param_groups for parameter in group["params"])

    def share(path, leaf):
        like = own.get(path[0])
        if like is None or isinstance(leaf, DTensor) or getattr(leaf, "shape", None) != like.shape:
            return leaf
        return distribute_tensor(
            leaf, like.device_mesh, like.placements, src_data_rank=None
        )  # all ranks have read it

    def of_optimizer(_, saved):
        groups = [group | FOREACH for group in saved["param_groups"]]
        return {"state": leaves(load(saved["state"], own), share), "param_groups": groups}

    model.register_load_state_dict_pre_hook(
        lambda _, saved, *__: saved.update(leaves(load(saved, own), share))
    )
    optimizer.register_load_state_dict_pre_hook(of_optimizer)
