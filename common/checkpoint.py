"""Checkpoints that are whole or not there, and that hold plain values and tensors only."""

import os
import tempfile
from pathlib import Path

import torch

from common import flags

FORMAT = 1


def save(path, checkpoint):
    """Write the dict `checkpoint` to `path` so that at any moment `path` is the old file or the new one.

    The bytes go to a temporary file in the same folder and reach the disk before the file takes the name.
    """
    path = Path(path)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        try:
            torch.save({"format": FORMAT, **checkpoint}, file)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name, too, survives a power cut
    finally:
        os.close(folder)


def load(path, args):
    """Read a checkpoint to the CPU and check that it belongs to the data set and the model of `args`.

    Ends with status 2 and one line where it does not. `weights_only` refuses a pickle that would run code.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115 - what fails here is not the file's content
    except OSError as error:
        flags.fail(f"--resume {path}: {error.strerror}")
    try:
        with file:
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
        saved = checkpoint["arguments"]
    except Exception as error:  # torch.load raises anything on a file that it did not write
        flags.fail(f"--resume {path}: it is broken, or not a checkpoint of these recipes ({type(error).__name__})")
    if checkpoint["format"] != FORMAT:
        flags.fail(f"--resume {path}: it has format {checkpoint['format']}, and this version reads {FORMAT}")
    for name in ("dataset", "model"):
        if saved[name] != getattr(args, name):
            flags.fail(f"--resume {path}: it was saved by a run of {saved['dataset']} with --model {saved['model']}, "
                       f"and this is {args.dataset} with --model {args.model}")
    return checkpoint
