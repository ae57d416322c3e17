"""Checkpoints that are whole or not there, and that hold plain values and tensors only."""

import os
from pathlib import Path

import torch

from common import flags

FORMAT = 1
# What decides the weights, the number of steps in an epoch, the learning rate at a step and the order of the data.
SAME = ("dataset", "model", "synthetic", "batch_size", "lr", "scale_lr", "warmup_epochs", "seed")


def save(path, checkpoint):
    """Write the dict `checkpoint` to `path` so that at any moment `path` is the old file or the new one.

    The bytes go to a temporary file in the same folder and reach the disk before the file takes the name.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            torch.save({"format": FORMAT, **checkpoint}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name, too, survives a power cut
    finally:
        os.close(folder)


def load(path, args, world_size):
    """Read a checkpoint to the CPU and check that it was saved by a run like that of `args` and `world_size`.

    Ends with status 2 and one line where it was not. `weights_only` refuses a pickle that would run code.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115 - what fails here is not the file's content
    except OSError as error:
        flags.fail(f"--resume {path}: {error.strerror}")
    try:
        with file:
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
        saved = {"format": checkpoint["format"], "world_size": checkpoint["world_size"],
                 **{name: checkpoint["arguments"][name] for name in SAME}}
    except Exception as error:  # torch.load raises anything on a file that it did not write
        flags.fail(f"--resume {path}: it is broken, or not a checkpoint of these recipes ({type(error).__name__})")
    here = {"format": FORMAT, "world_size": world_size, **{name: getattr(args, name) for name in SAME}}
    for name, value in here.items():
        if saved[name] != value:
            flags.fail(f"--resume {path}: it was saved with {name.replace('_', ' ')} {saved[name]}, and this run has "
                       f"{value}: a run goes on as it began")
    return checkpoint
