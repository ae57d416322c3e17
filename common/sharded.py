"""What only fsdp.py needs: the modules to shard, and how sharded weights and momentum are saved and loaded."""

import contextlib
import shutil
import time
import zlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.batchnorm import _BatchNorm

from common import checkpoint
from common.processes import fail


def blocks(module):
    """Yield the modules in each nn.Sequential: ResNet's blocks, ViT's encoder layers, the layers of a small model."""
    for child in module.children():
        if not isinstance(module, nn.Sequential) or isinstance(child, nn.Sequential):
            yield from blocks(child)
        elif any(True for _ in child.parameters()) and not isinstance(child, _BatchNorm):  # see batch_norms
            yield child


def batch_norms(model):
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def lacks_a_batch(val, run):
    """Whether this rank's share of the DataObject `val` has a batch less than another's (an image less, at most)."""
    if len(val.dataset) < run.world_size:
        fail(f"{len(val.dataset)} images to evaluate on {run.world_size} processes: FSDP needs one for each")
    most = -(-len(val.dataset) // (val.batch_size * run.world_size))
    return len(val) < (min(most, run.accumulate) if run.args.dry_run else most)


class Sharded:
    """The model that fully_shard has sharded, or its optimizer, which then uses foreach: fused SGD takes no shards.

    It saves and loads what an unsharded model or optimizer would.
    """

    def __init__(self, part):
        self.part = part
        self._use_foreach()
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        self.parameters = {("state", number): parameter for number, parameter in enumerate(own)} or {
            (name,): parameter for name, parameter in part.named_parameters()}

    @property
    def param_groups(self):
        return getattr(self.part, "param_groups", [])

    def _use_foreach(self):
        for group in self.param_groups:
            group.update(fused=None, foreach=True)

    def state_dict(self):
        """What `gather` has gathered, on rank 0; once, so that its memory is freed."""
        return self.__dict__.pop("gathered")

    def load_state_dict(self, saved):
        """Load what state_dict gave, or that of an unsharded model or optimizer; this rank keeps its shards."""
        shards = {}

        def shard(path, leaf):
            like = self.parameters.get(path[:2])
            if isinstance(leaf, str):  # the name of a tensor in shards
                return shards.setdefault(leaf, torch.zeros_like(like))
            if like is None or getattr(leaf, "shape", None) != like.shape:
                return leaf
            return distribute_tensor(leaf, like.device_mesh, like.placements, src_data_rank=None)  # all have read it

        state = leaves(saved.get("tree", saved), shard)
        try:
            if shards:
                dcp.load(shards, checkpoint_id=saved["folder"])
        except dcp.api.CheckpointException as error:  # which is not an Exception
            raise ValueError(error) from error
        self.part.load_state_dict(state)
        self._use_foreach()


def leaves(tree, change, path=()):
    """`tree`, a dict of dicts, with change((key, ...), leaf) in place of each leaf."""
    if not isinstance(tree, dict):
        return change(path, tree)
    changed = type(tree)((key, leaves(value, change, (*path, key))) for key, value in tree.items())
    if hasattr(tree, "_metadata"):  # of a model's state_dict: the versions of its modules
        changed._metadata = tree._metadata
    return changed


def gather(run):
    """Gather on rank 0 what run.save() saves; all ranks call it.

    With --sharded-checkpoint no tensor is gathered: each rank writes its shards to a new folder beside the checkpoint,
    which names it and the CRC-32 of each file.
    """
    if run.args.dry_run:
        return
    shards, folder = {}, _new_folder(run) if run.args.sharded_checkpoint else None

    def take(path, leaf):
        if not isinstance(leaf, DTensor):
            return leaf
        if folder:
            shards[name := ".".join(map(str, path))] = leaf
            return name
        whole = leaf.full_tensor()
        return whole.cpu() if run.rank == 0 else None

    trees = leaves({name: part.part.state_dict() for name, part in run.state.items()}, take)
    for group in trees["optimizer"]["param_groups"]:
        group.update(fused=True, foreach=None)  # as the other recipes have it
    if folder:
        try:
            dcp.save(shards, checkpoint_id=folder)
        except dcp.api.CheckpointException as error:
            shutil.rmtree(folder, ignore_errors=True)  # frees its space on a full disk
            fail(f"cannot write {folder} ({' '.join(str(error).split())[-120:]}); last.pt is the newest checkpoint", 1)
        files = [None] * run.world_size
        dist.all_gather_object(files, {path.name: _crc32(path) for path in folder.glob(f"__{run.rank}_*")})
        files = {name: crc for each in files for name, crc in each.items()}
        files[".metadata"] = _crc32(folder / ".metadata")
        trees = {name: {"tree": tree, "folder": folder.name} for name, tree in trees.items()}
        trees["model"]["files"] = files
    for name, part in run.state.items():
        part.gathered = trees[name]


def _new_folder(run):
    """The name of a new folder for the shards of this position; rank 0 removes the folders that no checkpoint names."""
    folder = [None]
    if run.rank == 0:
        there, used = run.output.checkpoint_dir, set()
        with contextlib.suppress(OSError):  # then nothing is removed
            for path in there.glob("*.pt"):
                with contextlib.suppress(checkpoint.CorruptCheckpoint):
                    used.add(checkpoint.read(path)[0]["model"].get("folder"))
            for old in there.glob("shards-*-*-*"):
                if old.name not in used:
                    shutil.rmtree(old, ignore_errors=True)
        folder = [there / f"shards-{run.epoch}-{run.samples}-{time.time_ns()}"]
    dist.broadcast_object_list(folder)
    return folder[0]


def read(path):
    """checkpoint.read, with --sharded-checkpoint also of the files that the checkpoint names."""
    saved, fingerprint = checkpoint.read(path)
    for part in [saved[name] for name in ("model", "optimizer") if "folder" in saved.get(name, {})]:
        part["folder"] = path.parent / part["folder"]
        for name, crc in part.get("files", {}).items():
            if not (part["folder"] / name).exists() or _crc32(part["folder"] / name) != crc:
                raise checkpoint.CorruptCheckpoint(f"{part['folder'] / name} is damaged, or missing")
    return saved, fingerprint


def _crc32(path):
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(2**24):
            crc = zlib.crc32(block, crc)
    return crc
