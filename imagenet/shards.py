"""--sharded-checkpoint: each rank saves its shares of weights and momentum, for models whose whole state fits no host.

They lie in a folder beside the checkpoint, which names the folder and the CRC-32 of each file in it.
"""

import contextlib
import shutil
import time
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common.processes import fail
from torch.distributed.tensor import DTensor

from common import checkpoint, sharded


class Shard(NamedTuple):
    """A tensor in shards: its name in the Path `folder`."""

    folder: Path
    name: str


def save(run):
    """sharded.save; with --sharded-checkpoint each rank writes its shards, and then rank 0 the checkpoint."""
    if run.args.dry_run or not run.args.sharded_checkpoint:
        return sharded.save(run)
    folder = [None]
    if run.rank == 0:
        remove_unused(run.output.checkpoint_dir)
        folder = [run.output.checkpoint_dir / f"shards-{run.epoch}-{run.samples}-{time.time_ns()}"]
    dist.broadcast_object_list(folder)
    shards, folder = {}, folder[0]

    def take(path, leaf):
        if not isinstance(leaf, DTensor):
            return leaf
        shards[name := ".".join(map(str, path))] = leaf
        return name

    states = sharded.state_dicts(run, take)
    try:
        dcp.save(shards, checkpoint_id=folder)
    except dcp.api.CheckpointException as error:
        shutil.rmtree(folder, ignore_errors=True)  # frees its space on a full disk
        fail(
            f"cannot write {folder} ({' '.join(str(error).split())[-120:]}); last.pt is the newest checkpoint",
            1,
        )
    files = [None] * run.world_size
    dist.all_gather_object(
        files, {path.name: _crc32(path) for path in folder.glob(f"__{run.rank}_*")}
    )
    if run.rank == 0:
        files = {name: crc for each in files for name, crc in each.items()}
        files[".metadata"] = _crc32(folder / ".metadata")
        run.save(states | {"shards": {"folder": folder.name, "files": files}})


def remove_unused(there):
    """Remove the folders of shards in the Path `there` that no checkpoint names."""
    used = set()
    with contextlib.suppress(OSError):  # then nothing is removed
        for path in there.glob("*.pt"):
            with contextlib.suppress(checkpoint.CorruptCheckpoint):
                used.add(checkpoint.read(path)[0].get("shards", {}).get("folder"))
        for old in there.glob("shards-*-*-*"):
            if old.name not in used:
                shutil.rmtree(old, ignore_errors=True)


def read(path):
    """checkpoint.read, and of a checkpoint in shards also the CRC-32 of each file; a tensor in it is a Shard."""
    saved, fingerprint = checkpoint.read(path)
    if "shards" in saved:
        folder = path.parent / saved["shards"]["folder"]
        for name, crc in saved["shards"]["files"].items():
            if not (folder / name).exists() or _crc32(folder / name) != crc:
                raise checkpoint.CorruptCheckpoint(f"{folder / name} is damaged, or missing")
        for name in ("model", "optimizer"):
            saved[name] = sharded.leaves(
                saved[name], lambda _, leaf: Shard(folder, leaf) if isinstance(leaf, str) else leaf
            )
    return saved, fingerprint


def load(saved, own):
    """`saved`, the state of a model or an optimizer, with this rank's share, like that in `own`, for each Shard."""
    shards, folders = {}, set()

    def empty(path, leaf):
        if not isinstance(leaf, Shard):
            return leaf
        folders.add(leaf.folder)
        return shards.setdefault(leaf.name, torch.zeros_like(own[path[0]]))

    state = sharded.leaves(saved, empty)
    try:
        for folder in folders:
            dcp.load(shards, checkpoint_id=folder)
    except dcp.api.CheckpointException as error:  # which is not an Exception
        raise ValueError(error) from error
    return state


def _crc32(path):
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(2**24):
            crc = zlib.crc32(block, crc)
    return crc
