"""Make one file of a checkpoint that imagenet/fsdp.py --sharded-checkpoint has saved.

    python scripts/unshard.py runs/mine/last.pt whole.pt

Any recipe can resume from it.
"""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

sys.path.append(str(Path(__file__).resolve().parents[1]))
from common import checkpoint, flags
from common.errors import InputError, in_one_line
from common.files import replace, write_beside
from common.process import launch
from imagenet import shards


def main():
    parser = flags.Parser(__doc__)
    parser.add_argument("checkpoint", type=Path, help="the file to read")
    parser.add_argument("whole", type=Path, help="the file to write")
    args = parser.parse_args()
    try:
        saved, _ = shards.read(args.checkpoint)
    except (OSError, checkpoint.CorruptCheckpoint) as error:
        raise InputError(f"{args.checkpoint}: {checkpoint.reason_of(error)}") from error
    folders = {value.folder for value in saved["model"].values() if isinstance(value, shards.Shard)}
    if not folders:
        raise InputError(f"{args.checkpoint} is one file already")
    if reason := shards.damage(saved):
        raise InputError(f"{args.checkpoint}: {reason}")
    del saved["shard_files"]
    if args.whole.exists():
        raise InputError(f"{args.whole} already exists")
    folder = folders.pop()
    try:
        tensors = read_whole(folder)
    # CheckpointException is not an Exception.
    except (Exception, dcp.api.CheckpointException) as error:
        raise InputError(f"{folder} is damaged ({in_one_line(error)})") from error

    def whole(values):
        return {
            name: tensors[value.name] if isinstance(value, shards.Shard) else value
            for name, value in values.items()
        }

    saved["model"] = whole(saved["model"])
    state = saved["optimizer"]["state"]
    saved["optimizer"]["state"] = {number: whole(kept) for number, kept in state.items()}
    try:
        partial = write_beside(args.whole, lambda file: checkpoint.write_tensors(saved, file))
        replace(partial, args.whole)
    except OSError as error:
        raise InputError(f"{args.whole}: {error.strerror}") from error


def read_whole(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors in a folder of shards. Of a stranger's, it can raise anything."""
    about = shards.Reader(folder).read_metadata().state_dict_metadata
    needed = sum(one.size.numel() * one.properties.dtype.itemsize for one in about.values())
    if needed > sum(file.stat().st_size for file in folder.iterdir()):
        raise ValueError(f"{needed:,} bytes of tensors in smaller files")
    tensors = {
        name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in about.items()
    }
    # torch warns that there is only one process.
    warnings.simplefilter("ignore")
    dcp.load(tensors, storage_reader=shards.Reader(folder), no_dist=True)
    return tensors


if __name__ == "__main__":
    with launch.plain_exits():
        main()
