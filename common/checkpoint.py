"""Checkpoints that are whole or not there, are verified when they are read, and hold plain values and tensors only.

A file in a folder of checkpoints is in one of these states, and a crash between any two of them loses nothing:

    .*.partial                           being written; swept when a run starts here or saves
    epoch-0002-step-000040-<digest>.pt   committed: its bytes reached the disk before it got this name
    last.pt, best.pt                     links to the newest committed one, and to that of the best epoch
    (removed)                            neither among the newest, as many as --keep says, nor the best
    epoch-...pt.broken                   its bytes did not have the digest, and --resume auto passed it by

A name gives whole epochs and steps in the next one, and no clock says which is the newest. <digest> is the first 16
hexadecimal digits of the SHA-256 of the bytes, as torch.hub has them in its names. It finds the flipped bit that
torch.load does not see.
"""

import contextlib
import hashlib
import io
import os
import re
import sys
import warnings
from pathlib import Path

import torch

from common import failures

FORMAT = 3
# What decides the weights, the number of steps in an epoch, the learning rate at a step and the order of the data.
SAME = ("dataset", "synthetic", "scale_lr", "warmup_epochs", "momentum", "weight_decay", "seed",
        "image_size", "label_smoothing")
SAME_ON_AS_MANY_RANKS = ("batch_size", "accumulate", "lr")


class Broken(Exception):
    """What is wrong with a file that is not the checkpoint that somebody saved."""


def write(path, content):
    """Replace the file `path` by the bytes `content`, so that at any moment it is the old file or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name, too, survives a power cut
    finally:
        os.close(folder)


def save(folder, checkpoint, keep, best):
    """Commit the dict `checkpoint`, which has "epoch" and "step", and tidy the folder (see `tidy`)."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **checkpoint}, buffer)
    content = buffer.getbuffer()
    write(folder / f"epoch-{checkpoint['epoch']:04}-step-{checkpoint['step']:06}-{digest(content)}.pt", content)
    tidy(folder, keep, best)


def digest(content):
    return hashlib.sha256(content).hexdigest()[:16]


def committed(folder):
    """The checkpoints in `folder`, the newest first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := re.fullmatch(r"epoch-(\d+)-step-(\d+)-[0-9a-f]{16}\.pt", path.name):
            found.append((int(match[1]), int(match[2]), path.name, path))
    return [path for *_, path in sorted(found, reverse=True)]


def tidy(folder, keep, best):
    """Set the links and remove what is neither among the newest `keep` nor the best; `best` lists epochs, best first.

    It depends on the names in the folder alone, so that it can be done again after a crash.
    """
    files = committed(folder)
    of_epoch = {int(path.name.split("-")[1]): path for path in files if "-step-000000-" in path.name}
    links = {"last.pt": files[0] if files else None,
             "best.pt": next((of_epoch[epoch] for epoch in best if epoch in of_epoch), None)}
    for name, target in links.items():
        if target:
            partial = folder / f".{name}.partial"
            partial.unlink(missing_ok=True)
            partial.symlink_to(target.name)
            os.replace(partial, folder / name)
    for path in (*(path for path in files[keep:] if path != links["best.pt"]), *folder.glob(".*.partial")):
        path.unlink()


def read(path):
    """The bytes of the checkpoint `path`; raises OSError, or Broken where nobody saved these bytes under that name."""
    name = path.resolve().name
    content = path.read_bytes()
    match = re.search(r"-([0-9a-f]{16})\.pt$", name)
    if not match:
        raise Broken(f"the name of {name} does not end with a digest: keep that under which it was saved")
    if digest(content) != match[1]:
        raise Broken("it is broken: its bytes do not have the digest in its name")
    unpack(content)
    return content


def unpack(content):
    """The dict in the bytes of a checkpoint; raises Broken. `weights_only` refuses a pickle that would run code."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the line that says that it is refused is enough
            checkpoint = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        if not isinstance(checkpoint["format"], int):
            raise TypeError("no format")
    except Exception as error:  # torch.load raises anything on a file that it did not write
        raise Broken(f"it is not a checkpoint of these recipes ({type(error).__name__})") from error
    return checkpoint


def find(resume, folder):
    """What --resume means: (path, bytes, the broken ones that it passed by), or None for auto before the first one.

    `auto` takes the newest good one of `folder`, says what it passes by, and ends with status 2 where all are bad.
    """
    if resume != "auto":
        candidates = [Path(resume)]
    elif folder is None:
        failures.fail("--resume auto: say where with --log-dir or --checkpoint-dir")
    else:
        candidates = committed(folder)
    broken = []
    for path in candidates:
        try:
            return path, read(path), broken
        except (OSError, Broken) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            if resume != "auto":
                failures.fail(f"--resume {resume}: {reason}")
            print(f"skipped {path}: {reason}", file=sys.stderr, flush=True)
            if isinstance(error, Broken):
                broken.append(path)
    if candidates or (folder.is_dir() and any(folder.glob("*.pt*"))):
        failures.fail(f"--resume auto: no checkpoint in {folder} is good, and it does not start again by itself: "
                      "take another folder for that")
    return None


def check(checkpoint, resume, args, world_size):
    """End with status 2 where the run of `args` on `world_size` ranks cannot go on as the one that saved `checkpoint`.

    Another number of ranks (and with it another batch size and rate) is possible between two epochs: the data order is
    a function of seed and epoch, and the schedule is set to the same epoch of the new run.
    """
    if checkpoint["format"] != FORMAT:
        failures.fail(f"--resume {resume}: its format is {checkpoint['format']} and this code reads {FORMAT}"
                      f"{': take a newer common/' if checkpoint['format'] > FORMAT else ''}")
    try:
        saved, ranks, step = checkpoint["arguments"], checkpoint["world_size"], checkpoint["step"]
        if args.evaluate:
            return
        if ranks != world_size and step:
            failures.fail(f"--resume {resume}: it was saved on {ranks} processes within an epoch, and this run has "
                          f"{world_size}: resume it on {ranks}, or take one from between two epochs (step 0)")
        for name in (*SAME, *(SAME_ON_AS_MANY_RANKS if ranks == world_size else ())):
            if saved[name] != getattr(args, name):
                failures.fail(f"--resume {resume}: it was saved with {name.replace('_', ' ')} {saved[name]}, and this "
                              f"run has {getattr(args, name)}: a run goes on as it began")
    except (KeyError, TypeError) as error:
        failures.fail(f"--resume {resume}: it is not a checkpoint of these recipes ({type(error).__name__})")
