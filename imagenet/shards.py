"""--sharded-checkpoint: each rank saves its shares, for models whose whole state fits no host.

They lie in a folder beside the checkpoint, which names the folder and the CRC-32 of each file in
it. All ranks call `save` and `damage`, and load what `read` returns.
"""

import contextlib
import pickle
import shutil
import time
import zlib
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from common import checkpoint, fsdp
from common.errors import RunError, in_one_line
from common.position import Position

DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class Shard(NamedTuple):
    """A tensor in shards: its name in the Path `folder`."""

    folder: Path
    name: str


class PlainUnpickler(pickle.Unpickler):
    """Unpickles the .metadata of a folder of shards, and calls nothing that it does not need."""

    NEEDED = frozenset(
        {
            # Not BytesStorageMetadata: what it announces would be unpickled, too.
            "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
            "torch.distributed.checkpoint.metadata.Metadata",
            "torch.distributed.checkpoint.metadata.MetadataIndex",
            "torch.distributed.checkpoint.metadata.StorageMeta",
            "torch.distributed.checkpoint.metadata.TensorProperties",
            "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
            "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
            "torch.distributed.checkpoint.filesystem._StorageInfo",
            "torch.serialization._get_layout",
            "torch.Size",
        }
    )

    def find_class(self, module, name):
        if module.startswith("pathlib") and name == "PosixPath":
            return PurePosixPath
        is_dtype = module == "torch" and name in DTYPES
        if is_dtype or f"{module}.{name}" in self.NEEDED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it calls {module}.{name}, which no checkpoint needs")


class Reader(dcp.FileSystemReader):
    """Reads a folder of shards that a stranger may have made."""

    def read_metadata(self, *args, **kwargs) -> dcp.Metadata:
        """Raises pickle.UnpicklingError for what a checkpoint does not need, or anything."""
        with open(Path(self.path, ".metadata"), "rb") as file:
            metadata = PlainUnpickler(file).load()
        for place in metadata.storage_data.values():
            if not is_name(place.relative_path):
                raise pickle.UnpicklingError(f"it names the file {place.relative_path!r}")
        return metadata


def is_name(text) -> bool:
    """Whether it is the name of a file or folder, and no path to another one."""
    return isinstance(text, str) and text == Path(text).name


class Model(fsdp.WholeModel):
    """The state of a sharded model, which can also load shards."""

    def load_state_dict(self, state: dict) -> None:
        weights = dict(self.model.named_parameters())
        if any(isinstance(value, Shard) for value in state.values()):
            self.model.load_state_dict(filled(state, weights))
        else:
            super().load_state_dict(state)


class Optimizer(fsdp.WholeOptimizer):
    """The state of the optimizer of a sharded model, which can also load shards."""

    def load_state_dict(self, state: dict) -> None:
        weights = dict(enumerate(self.weights()))
        kept = {
            number: filled(values, dict.fromkeys(values, weights[number]))
            for number, values in state["state"].items()
        }
        super().load_state_dict({"state": kept, "param_groups": state["param_groups"]})


def filled(values: dict, weights: dict) -> dict:
    """`values` with this rank's share, like that of the weight of that name, for each Shard."""
    shares = {}
    for name, value in values.items():
        if isinstance(value, Shard):
            shares[value.name] = torch.zeros_like(weights[name])
            folder = value.folder
    if not shares:
        return values
    try:
        dcp.load(shares, storage_reader=Reader(folder))
    # It is not an Exception.
    except dcp.api.CheckpointException as error:
        # Each rank's, with its stack.
        reason, _ = next(iter(error.failures.values()))
        raise ValueError(reason) from error
    return {
        name: shares[value.name] if isinstance(value, Shard) else value
        for name, value in values.items()
    }


def save(model, optimizer, position: Position, folder: Path) -> dict:
    """Write the shares of all ranks to a new folder in rank 0's `folder`.

    Returns what the checkpoint holds instead of model and optimizer. Raises RunError.
    """
    names = [None]
    if dist.get_rank() == 0:
        remove_unused(folder)
        names = [str(folder / f"shards-{position.epoch}-{position.samples}-{time.time_ns()}")]
    dist.broadcast_object_list(names)
    to = Path(names[0])
    shares = {}

    def name_of(value, name):
        """The name of a share, which is taken; any other value as it is."""
        if not isinstance(value, DTensor):
            return value
        shares[name] = value
        return name

    weights = {name: name_of(w, f"model.{name}") for name, w in model.state_dict().items()}
    state = optimizer.state_dict()
    kept = {
        number: {name: name_of(v, f"optimizer.{number}.{name}") for name, v in values.items()}
        for number, values in state["state"].items()
    }
    try:
        dcp.save(shares, checkpoint_id=to)
    except dcp.api.CheckpointException as error:
        # Frees its space on a full disk.
        shutil.rmtree(to, ignore_errors=True)
        reason = " ".join(str(error).split())[-120:]
        raise RunError(f"cannot write {to} ({reason}); last.pt is the newest checkpoint") from error
    own_files = {path.name: crc32(path) for path in to.glob(f"__{dist.get_rank()}_*")}
    files_of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(files_of_ranks, own_files)
    files = {".metadata": crc32(to / ".metadata")}
    for each in files_of_ranks:
        files |= each
    return {
        "model": weights,
        "optimizer": {"state": kept, "param_groups": fsdp.as_whole(state["param_groups"])},
        "shards": {"folder": to.name, "files": files},
    }


def remove_unused(folder: Path) -> None:
    """Remove the folders of shards in `folder` that no checkpoint names."""
    used = set()
    # After an OSError nothing is removed.
    with contextlib.suppress(OSError):
        for path in folder.glob("*.pt"):
            with contextlib.suppress(checkpoint.CorruptCheckpoint):
                saved, _ = checkpoint.read(path)
                if "shards" in saved:
                    used.add(saved["shards"]["folder"])
        for old in folder.glob("shards-*-*-*"):
            if old.name not in used:
                shutil.rmtree(old, ignore_errors=True)


def read(path: Path) -> tuple[dict, int]:
    """checkpoint.read; of a checkpoint in shards, a tensor in it is a Shard.

    Raises CorruptCheckpoint also if a file of shards is missing.
    """
    saved, fingerprint = checkpoint.read(path)
    if "shards" in saved:
        try:
            put_shards(saved, path.parent)
        except (OSError, checkpoint.CorruptCheckpoint):
            raise
        # The file may hold anything.
        except Exception as error:
            raise checkpoint.CorruptCheckpoint(f"it is damaged ({in_one_line(error)})") from error
    return saved, fingerprint


def put_shards(saved, parent):
    """Put Shards in the place of their names into `saved`, which was read from the folder `parent`.

    Raises OSError, CorruptCheckpoint, or anything for a file that save() did not write.
    """
    shards = saved.pop("shards")
    if not all(map(is_name, [shards["folder"], *shards["files"]])):
        raise checkpoint.CorruptCheckpoint("it names shards in another folder")
    folder = parent / shards["folder"]
    for name in shards["files"]:
        if not (folder / name).is_file():
            raise checkpoint.CorruptCheckpoint(f"{folder / name} is missing")
    # For damage().
    saved["shard_files"] = {folder / name: crc for name, crc in shards["files"].items()}

    def with_shards(values):
        return {
            name: Shard(folder, value) if isinstance(value, str) else value
            for name, value in values.items()
        }

    state = saved["optimizer"]["state"]
    saved["model"] = with_shards(saved["model"])
    saved["optimizer"]["state"] = {number: with_shards(kept) for number, kept in state.items()}


def damage(saved: dict) -> str | None:
    """Which file of the shards of a checkpoint is damaged: None if none is, or it has none.

    Each rank reads its part of the files, and all get the same answer.
    """
    rank, world_size = 0, 1
    if dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    files = sorted(saved.get("shard_files", {}).items())
    reason = None
    for path, crc in files[rank::world_size]:
        try:
            if crc32(path) != crc:
                reason = f"{path} is damaged"
        except OSError as error:
            reason = f"{path}: {error.strerror}"
    reasons = [reason]
    if world_size > 1:
        reasons = world_size * [None]
        dist.all_gather_object(reasons, reason)
    return next(filter(None, reasons), None)


def crc32(path: Path) -> int:
    """The CRC-32 of a file of any size."""
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(2**24):
            crc = zlib.crc32(block, crc)
    return crc
