"""Checkpoints: last.pt, previous.pt and best.pt. A crash at any moment leaves a good one."""

import errno
import json
import time
import zipfile
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch

from common import optimizers, untrusted
from common.errors import InputError, RunError, brief, in_one_line
from common.files import (
    link_or_copy,
    read_regular,
    read_with_retries,
    replace,
    retry,
    write_atomically,
    write_beside,
)
from common.ranks import World, all_same

FORMAT = 6
# How long ranks that see different checkpoints retry, in seconds.
LOOK_AGAIN = 60
NAMES = ("last.pt", "previous.pt", "best.pt")


class CorruptCheckpoint(Exception):
    """The file is damaged, or is not a checkpoint."""


@dataclass
class Found:
    """The checkpoint to resume from (`path` None: none), and the damaged ones that were skipped."""

    path: Path | None = None
    saved: dict = field(default_factory=dict)
    fingerprint: int = -1
    damaged: list[tuple[Path, str]] = field(default_factory=list)
    empty: Path | None = None  # the folder in which --resume auto found no checkpoint

    def lines(self, position) -> list[str]:
        """Lines for the log: what was skipped, and where the run resumes, if it does."""
        lines = [f"skipped {path}: {reason}" for path, reason in self.damaged]
        if self.path:
            lines.append(
                f"resumed from {self.path} at epoch {position.epoch + 1}, "
                f"sample {position.samples} (saved by {self.saved['config'].get('saved_by')})"
            )
        if self.empty:
            lines.append(f"no checkpoint in {self.empty} yet: starting from the beginning")
        return lines


def save(folder: Path, state: dict, config: dict, is_best: bool = False) -> None:
    """Save the dict `state` as last.pt in `folder`, and the one before it as previous.pt.

    `config` are the flags of the run. With `is_best` it is also saved as best.pt.
    Raises RunError if it cannot be written, and TypeError or ValueError for values that --resume
    could not read.
    """
    untrusted.refuse_absurd_values(state)
    content = {"format": FORMAT, "config": as_json(config), **state}
    last = folder / "last.pt"

    def write():
        partial = write_beside(last, lambda file: write_tensors(content, file))
        # First best.pt: a run that resumes from the new last.pt relies on it.
        if is_best:
            link_or_copy(partial, folder / "best.pt")
        if last.exists():
            link_or_copy(last, folder / "previous.pt")
        replace(partial, last)

    try:
        retry(write)
    except OSError as error:
        for name in NAMES:
            # Free their space on a full disk.
            with suppress(OSError):
                (folder / f".{name}.partial").unlink()
        raise RunError(
            f"cannot save in {folder} ({error.strerror}); "
            "--resume auto uses the previous checkpoint"
        ) from error


def write_tensors(content: dict, file: BinaryIO) -> None:
    """torch.save to an open file, without a copy in memory; raises OSError and TypeError."""
    try:
        torch.save(content, file)
    except RuntimeError as error:
        # After an OSError, or Ctrl-C in a notebook, torch still closes its archive. That fails with
        # an error about positions in the file, which hides the first one.
        if isinstance(error.__context__, (OSError, KeyboardInterrupt)):
            raise error.__context__ from error
        raise
    file.flush()
    if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(file.name):
        raise TypeError(
            f"--resume could not read {', '.join(unsafe)}: "
            "a state_dict may hold only numbers, strings, lists, dicts and tensors"
        )


def as_json(config: dict) -> dict:
    """`config` as JSON values: a flag can have any type."""
    return json.loads(json.dumps(config, default=str))


def read(path: Path) -> tuple[dict, int]:
    """Return (the dict in the file `path`, a fingerprint of the file).

    Raises CorruptCheckpoint if the content is wrong, and OSError if the file cannot be read.
    """
    try:
        return read_with_retries(path, parse)
    except (MemoryError, CorruptCheckpoint):
        raise
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.EINVAL):
            raise CorruptCheckpoint("it is not a regular file") from error
        raise
    # A file that torch.save did not write can raise anything.
    except Exception as error:
        if "allocate memory" in str(error):
            raise
        raise CorruptCheckpoint(
            f"it is damaged, or not a checkpoint ({type(error).__name__})"
        ) from error


def parse(path: Path, mapped: bool) -> tuple[dict, int]:
    """What read() returns, tried once. May raise any exception."""
    with zipfile.ZipFile(path) as archive:
        untrusted.refuse_compressed(archive)
        entries = archive.infolist()
        # torch.load ignores CRC-32s, and reads an entry marked as a folder (16) as zeros.
        if archive.testzip() or any(entry.external_attr & 16 for entry in entries):
            raise CorruptCheckpoint("it is damaged (a CRC-32 is wrong)")
    checksums = [entry.CRC for entry in entries]
    saved = untrusted.load(path, mapped)
    saved["format"] = int(saved["format"])
    return saved, zlib.crc32(repr(checksums).encode())


def exists(resume: str | None, folder: Path | None) -> bool:
    """Whether --resume may find a checkpoint, without reading one."""
    if resume == "auto":
        return folder is not None and any(Path(folder, name).exists() for name in NAMES)
    return resume is not None


def find(resume: str, folder: Path | None) -> Found:
    """Read the checkpoint for --resume: a file, or with "auto" the newest good one in `folder`.

    If `folder` has none yet, the path is None. Raises InputError.
    """
    if resume != "auto":
        path = Path(resume)
        try:
            return Found(path, *read(path))
        except (OSError, CorruptCheckpoint) as error:
            raise InputError(f"--resume {path}: {reason_of(error)}") from error
    if folder is None:
        raise InputError("--resume auto: name the folder with --log-dir")
    damaged = []
    for path in (Path(folder, name) for name in NAMES):
        try:
            return Found(path, *read(path), damaged)
        except FileNotFoundError:
            continue
        except OSError as error:
            # An older one would do, but this one may be good.
            raise InputError(f"--resume auto: {path}: {reason_of(error)}") from error
        except CorruptCheckpoint as error:
            damaged.append((path, reason_of(error)))
    for path in (Path(folder, f"{name}.damaged") for name in NAMES):
        if path.exists():
            damaged.append((path, "it was set aside by an earlier run"))
    if damaged:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in damaged)
        raise InputError(f"--resume auto: {reasons}; choose another folder to start again")
    return Found(empty=folder)


def find_the_same(resume: str, folder: Path | None, world: World) -> Found:
    """find() on all ranks, which have to find the same file; raises InputError.

    The ranks retry for a minute: a new file on NFS can take that long to appear on each machine.
    """
    for attempt in range(1 + LOOK_AGAIN // 5):
        if attempt > 0:
            time.sleep(5)
        error = None
        found = Found()
        try:
            found = find(resume, folder)
        except InputError as raised:
            error = raised
        failed = error is not None
        if all_same([found.fingerprint, failed], world):
            if failed:
                raise error
            return found
    raise InputError(
        f"--resume {resume}: the ranks do not see the same file: all machines must share the folder"
    ) from error


def reason_of(error: Exception) -> str:
    """What went wrong, in a few words."""
    return getattr(error, "strerror", None) or str(error)


def resume(
    resume: str | None,
    folder: Path | None,
    state: dict,
    config: dict,
    may_change: Iterable[str] = (),
    optional: Iterable[str] = (),
    world: World | None = None,
) -> Found:
    """Load the checkpoint for --resume, if any, into the objects of `state`.

    It must have been saved with the same `config`, except for the flags in `may_change`. It may
    lack the `optional` parts of `state`. All ranks of `world` must see the same file.
    Raises InputError.
    """
    if resume is None:
        return Found()
    together = world is not None and world.all_reduce is not None
    found = find_the_same(resume, folder, world) if together else find(resume, folder)
    if found.path:
        try:
            check_format(found.saved)
            check_config(found.saved["config"], config, may_change)
            load(found.saved, state, optional)
        # The file may hold anything.
        except Exception as error:
            reason = str(error) if isinstance(error, InputError) else in_one_line(error)
            raise InputError(f"--resume {found.path} does not fit this run: {reason}") from error
    return found


def check_format(saved: dict) -> None:
    """Raise InputError for a checkpoint of another version of this file."""
    if saved["format"] != FORMAT:
        raise InputError(f"it has format {saved['format']!r}, and this version reads {FORMAT}")
    config = saved.get("config")
    if not isinstance(config, dict) or not isinstance(config.get("saved_by", ""), str):
        raise InputError("it has no config")


def check_config(saved: dict, config: dict, may_change: Iterable[str]) -> None:
    """Raise InputError if a flag that both have differs and is not in `may_change`."""
    differences = [
        f"{flag} {brief(saved[flag])} (and this run {value})"
        for flag, value in as_json(config).items()
        if flag in saved and saved[flag] != value and flag not in may_change
    ]
    if differences:
        raise InputError(f"it was saved with {', '.join(differences)}")


def load(saved: dict, state: dict, optional: Iterable[str]) -> None:
    """Load the dict `saved` into the objects of `state`; raises InputError if it does not fit."""
    for name, part in state.items():
        if name in optional and not saved.get(name):
            continue
        try:
            if isinstance(part, torch.optim.Optimizer):
                optimizers.load(part, saved[name])
            else:
                part.load_state_dict(saved[name])
        except InputError:
            raise
        # The file may hold anything.
        except Exception as error:
            raise InputError(f"{name}: {in_one_line(error)}") from error


def claim(folder: Path, found: Found) -> None:
    """Make sure that a run resumed from `found` can use `folder`; rename damaged checkpoints.

    Raises InputError if it holds another run, or a newer checkpoint.
    """
    damaged = [path for path, _ in found.damaged]
    there = [folder / name for name in NAMES]
    results = folder / "results.jsonl"
    try:
        in_the_way = next((path for path in there if path.exists() and path not in damaged), None)
        if in_the_way and found.path and in_the_way.samefile(found.path):
            in_the_way = None
        if found.path is None and results.exists() and b'"evaluation"' in read_regular(results):
            in_the_way = results
        if in_the_way:
            raise InputError(
                f"{in_the_way} is from another run, or newer than --resume, and would be "
                "overwritten: choose another --log-dir, or --resume auto"
            )
        for path in damaged:
            # Else the next save would overwrite the good previous.pt with it.
            path.rename(f"{path}.damaged")
        # Try both that a save needs: to create a file, and to replace it.
        write_atomically(folder / ".writable", b"")
        write_atomically(folder / ".writable", b"")
        (folder / ".writable").unlink()
    except OSError as error:
        raise InputError(
            f"cannot write to {folder} ({error.strerror}): choose another --log-dir"
        ) from error
