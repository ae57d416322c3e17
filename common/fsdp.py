"""For fsdp.py only: which modules to shard, and unsharded state as the other recipes save it.

All ranks call the functions of this file that gather or scatter tensors.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from common import optimizers


def blocks(module: nn.Module):
    """Yield each module in a list of modules: the blocks of a ResNet, the layers of a ViT."""
    lists = (nn.Sequential, nn.ModuleList)
    for child in module.children():
        if not isinstance(module, lists) or isinstance(child, lists):
            yield from blocks(child)
        # BatchNorm stays in fp32.
        elif list(child.parameters()) and not isinstance(child, nn.modules.batchnorm._BatchNorm):
            yield child


def share_out(whole: nn.Module | None, model: nn.Module, device: torch.device) -> None:
    """Allocate `model`, sharded and on the meta device, and load rank 0's `whole` model into it.

    Rank 0 sends each rank its shards, one weight after the other; other ranks have no `whole`.
    """
    model.to_empty(device=device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole.state_dict() if whole else {}, options=options)
    # A state_dict lacks buffers that are not persistent.
    values = dict(whole.named_buffers()) if whole else {}
    for name, buffer in model.named_buffers():
        if whole:
            buffer.copy_(values[name])
        dist.broadcast(buffer, src=0)


class WholeModel:
    """The unsharded state_dict of a sharded model, on the CPU of rank 0; other ranks get none."""

    def __init__(self, model: nn.Module):
        self.model = model

    def state_dict(self) -> dict:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(self.model, options=options)

    def load_state_dict(self, state: dict) -> None:
        """Load an unsharded state, which every rank has read; each keeps its shard."""
        set_model_state_dict(self.model, state, options=StateDictOptions(full_state_dict=True))

    def parameters(self):
        return self.model.parameters()


class WholeOptimizer:
    """The unsharded state_dict of a sharded model's optimizer, on the CPU of rank 0.

    Loading keeps the options of this run, such as the rate and `foreach`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer

    def state_dict(self) -> dict:
        state = self.optimizer.state_dict()
        whole = {
            number: {name: gather(value) for name, value in kept.items()}
            for number, kept in state["state"].items()
        }
        return {"state": whole, "param_groups": as_whole(state["param_groups"])}

    def weights(self) -> list:
        """The parameters, in the order of their numbers in a state_dict."""
        return [weight for group in self.optimizer.param_groups for weight in group["params"]]

    def load_state_dict(self, state: dict) -> None:
        """Load an unsharded state, which every rank has read; each keeps its shard."""
        optimizers.check(self.optimizer, state)
        own = self.optimizer.state_dict()
        weights = self.weights()
        shares = {
            number: {name: share_of(value, weights[number]) for name, value in kept.items()}
            for number, kept in state["state"].items()
        }
        self.optimizer.load_state_dict({"state": shares, "param_groups": own["param_groups"]})


def as_whole(groups: list[dict]) -> list[dict]:
    """The options of parameter groups, as the other recipes save them."""
    return [group | {"fused": True, "foreach": None} for group in groups]


def gather(value):
    """A DTensor as a full tensor on the CPU of rank 0 (None elsewhere); anything else as it is."""
    if not isinstance(value, DTensor):
        return value
    whole = value.full_tensor()
    # Rank 0 only: else a machine holds a copy for each of its ranks.
    return whole.cpu() if dist.get_rank() == 0 else None


def share_of(value, weight: DTensor):
    """This rank's shard of a tensor that has the shape of `weight`; anything else as it is."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != weight.shape:
        return value
    # src_data_rank=None: send nothing, as all ranks have read the tensor.
    share = distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None)
    # A view would keep the full tensor in memory.
    return share.clone()
