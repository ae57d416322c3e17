"""Checkpoints: last.pt, previous.pt and best.pt. A crash at any moment leaves a good one."""

import io
import json
import os
import shutil
import time
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import torch

from common.errors import InputError, RunError
from common.files import write_atomically
from common.ranks import all_same

FORMAT = 5
# Seconds for which ranks that see other checkpoints look again.
LOOK_AGAIN = 60
NAMES = ("last.pt", "previous.pt", "best.pt")
# The flags in which a resumed run may differ from the one that saved. A recipe adds its own.
MAY_DIFFER = frozenset(
    {
        "accumulate",
        "batch_size",
        "channels_last",
        "checkpoint_dir",
        "checkpoint_every",
        "compile",
        "data_dir",
        "device",
        "dry_run",
        "epochs",
        "eval_every",
        "evaluate",
        "global_batch_size",
        "init_from",
        "init_partial",
        "loader",
        "log_dir",
        "log_interval",
        "log_seconds",
        "lr",
        "max_steps",
        "profile",
        "resume",
        "saved_by",
        "test_batch_size",
        "timeout",
        "workers",
    }
)


class CorruptCheckpoint(Exception):
    """The file is damaged, or is not a checkpoint."""


@dataclass
class Found:
    """The checkpoint to go on from, if `path` is not None, and the damaged ones before it."""

    path: Path | None = None
    saved: dict = field(default_factory=dict)
    fingerprint: int = -1
    damaged: list[tuple[Path, str]] = field(default_factory=list)
    empty: Path | None = None  # the folder in which --resume auto found no checkpoint

    def lines(self, position) -> list[str]:
        """What to say of it: what was skipped, and where the run goes on."""
        lines = [f"skipped {path}: {reason}" for path, reason in self.damaged]
        if self.path:
            saved_by = self.saved["config"].get("saved_by")
            lines.append(
                f"resumed from {self.path} at epoch {position.epoch + 1}, "
                f"sample {position.samples} (saved by {saved_by})"
            )
        if self.empty:
            lines.append(f"no checkpoint in {self.empty} yet: starting from the beginning")
        return lines


def keep_previous(folder: Path) -> None:
    """Let previous.pt be the present last.pt, which stays where it is; raises OSError."""
    partial = folder / ".previous.pt.partial"
    partial.unlink(missing_ok=True)
    try:
        os.link(folder / "last.pt", partial)
    except OSError:
        # The file system has no hard links.
        shutil.copyfile(folder / "last.pt", partial)
    os.replace(partial, folder / "previous.pt")
    # If both names already meant one file, os.replace has done nothing.
    partial.unlink(missing_ok=True)


def save(folder: Path, state: dict, config: dict, is_best: bool = False) -> None:
    """Save `state`, a dict of objects with state_dict or of such dicts, as last.pt in `folder`.

    `config` are the flags of the run. The best one is also saved as best.pt.
    Raises RunError if the file system refuses it, and TypeError for what could not be read again.
    """
    content = {"format": FORMAT, "config": as_json(config)}
    for name, part in state.items():
        content[name] = part.state_dict() if hasattr(part, "state_dict") else part
    buffer = io.BytesIO()
    torch.save(content, buffer)
    buffer.seek(0)
    if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(buffer):
        raise TypeError(
            f"--resume could not read {', '.join(unsafe)}: "
            "a state_dict may hold only numbers, strings, lists, dicts and tensors"
        )
    try:
        if is_best:
            write_atomically(folder / "best.pt", buffer.getbuffer())
        if (folder / "last.pt").exists():
            keep_previous(folder)
        write_atomically(folder / "last.pt", buffer.getbuffer())
    except OSError as error:
        raise RunError(
            f"cannot save in {folder} ({error.strerror}); "
            "--resume auto uses the previous checkpoint"
        ) from error


def as_json(config: dict) -> dict:
    """`config` with values that JSON has: a flag's type can be anything."""
    return json.loads(json.dumps(config, default=str))


def read(path: Path) -> tuple[dict, int]:
    """Return (the dict in the file `path`, a fingerprint of the file).

    Raises OSError or CorruptCheckpoint.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            # torch.load ignores CRC-32s, and reads an entry that is a folder (16) as zeros.
            if archive.testzip() or any(entry.external_attr & 16 for entry in entries):
                raise CorruptCheckpoint("it is damaged (a CRC-32 is wrong)")
        checksums = [entry.CRC for entry in entries]
        # weights_only: a pickle could run code.
        saved = torch.load(path, map_location="cpu", weights_only=True)
        saved["format"] = int(saved["format"])
    except (OSError, MemoryError, CorruptCheckpoint):
        raise
    # A file that torch.save did not write can raise anything.
    except Exception as error:
        raise CorruptCheckpoint(
            f"it is damaged, or not a checkpoint ({type(error).__name__})"
        ) from error
    return saved, zlib.crc32(repr(checksums).encode())


def find(resume: str, folder: Path | None, read=read) -> Found:
    """Read the checkpoint that --resume means: a file, or the newest good one.

    "auto" means the newest in `folder`. A folder without one is right: the path is None.
    Raises InputError.
    """
    if resume != "auto":
        path = Path(resume)
        try:
            return Found(path, *read(path))
        except (OSError, CorruptCheckpoint) as error:
            raise InputError(f"--resume {path}: {reason_of(error)}") from error
    if folder is None:
        raise InputError("--resume auto: name the folder with --log-dir or --checkpoint-dir")
    damaged = []
    for path in (Path(folder, name) for name in NAMES):
        try:
            return Found(path, *read(path), damaged)
        except FileNotFoundError:
            continue
        except PermissionError as error:
            # It may be good.
            raise InputError(f"--resume auto: {path}: {reason_of(error)}") from error
        except (OSError, CorruptCheckpoint) as error:
            damaged.append((path, reason_of(error)))
    for path in (Path(folder, f"{name}.damaged") for name in NAMES):
        if path.exists():
            damaged.append((path, "it was set aside by an earlier run"))
    if damaged:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in damaged)
        raise InputError(f"--resume auto: {reasons}; choose another folder to start again")
    return Found(empty=folder)


def find_the_same(resume: str, folder: Path | None, read, all_reduce, device) -> Found:
    """find(), on all ranks the same file; raises InputError.

    The ranks look again for a minute, as long as NFS may hide a new file from a machine.
    """
    for attempt in range(1 + LOOK_AGAIN // 5):
        if attempt > 0:
            time.sleep(5)
        error = None
        found = Found()
        try:
            found = find(resume, folder, read)
        except InputError as raised:
            error = raised
        failed = error is not None
        if all_same([found.fingerprint, failed], all_reduce, device):
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
    may_differ: frozenset | set = MAY_DIFFER,
    optional: tuple = (),
    all_reduce=None,
    read=read,
) -> Found:
    """Load the checkpoint that --resume means, if any, into the objects of `state`.

    It was saved with the same `config`, but for the flags in `may_differ`. The parts of `state`
    that are `optional` may be missing in it. `all_reduce` sums a tensor over all ranks in place;
    with it, all ranks have to see the same file. Raises InputError.
    """
    if resume is None:
        return Found()
    if all_reduce:
        device = next(state["model"].parameters()).device
        found = find_the_same(resume, folder, read, all_reduce, device)
    else:
        found = find(resume, folder, read)
    if found.path:
        try:
            check_format(found.saved)
            check_config(found.saved["config"], config, may_differ)
            load(found.saved, state, optional)
        except InputError as error:
            raise InputError(f"--resume {found.path} does not fit this run: {error}") from error
    return found


def check_format(saved: dict) -> None:
    """Raise InputError for a checkpoint of another version of this file."""
    if saved["format"] != FORMAT:
        raise InputError(f"it has format {saved['format']!r}, and this version reads {FORMAT}")
    if "shards" in saved:
        raise InputError("its tensors are in shards: use imagenet/fsdp.py or scripts/unshard.py")
    if not isinstance(saved.get("config"), dict):
        raise InputError("it has no config")


def check_config(saved: dict, config: dict, may_differ: frozenset | set) -> None:
    """Raise InputError if flags that both have differ, and are not of those that may."""
    differences = [
        f"{flag} {saved[flag]} (and this run {value})"
        for flag, value in as_json(config).items()
        if flag in saved and saved[flag] != value and flag not in may_differ
    ]
    if differences:
        raise InputError(f"it was saved with {', '.join(differences)}")


def load(saved: dict, state: dict, optional: tuple = ()) -> None:
    """Load the dict `saved` into the objects of `state`; raises InputError if it does not fit."""
    for name, part in state.items():
        if name in optional and not saved.get(name):
            continue
        try:
            part.load_state_dict(saved[name])
        except Exception as error:  # any kind: the file may hold anything
            raise InputError(f"{name}: {in_one_line(error)}") from error
        if isinstance(part, torch.optim.Optimizer):
            match_memory_format(part)


def match_memory_format(optimizer: torch.optim.Optimizer) -> None:
    """Give each state tensor the memory format of its weight, which fused optimizers rely on."""
    for weight, kept in optimizer.state.items():
        for name, value in kept.items():
            if isinstance(value, torch.Tensor) and value.shape == weight.shape:
                kept[name] = torch.empty_like(weight, dtype=value.dtype).copy_(value)


def in_one_line(error: Exception) -> str:
    """The type and the beginning of the message of an error."""
    message = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {message}"


def claim(folder: Path, log_dir: Path, found: Found) -> None:
    """Create `folder` for a run that goes on from `found`; damaged checkpoints are renamed.

    Raises InputError if it, or results.jsonl in `log_dir`, is of another run, or newer.
    """
    damaged = [path for path, _ in found.damaged]
    there = [folder / name for name in NAMES]
    newest = next((path for path in there if path.exists() and path not in damaged), None)
    of_another = newest and not (found.path and newest.samefile(found.path))
    results = log_dir / "results.jsonl"
    if found.path is None and results.exists() and b'"evaluation"' in results.read_bytes():
        of_another = True
        newest = results
    if of_another:
        raise InputError(
            f"{newest} is from another run, or newer than --resume, and would be overwritten: "
            "choose another --log-dir (and --checkpoint-dir), or --resume auto"
        )
    try:
        for path in damaged:
            # Else the next save would overwrite the good previous.pt with it.
            path.rename(f"{path}.damaged")
        folder.mkdir(parents=True, exist_ok=True)
        # A new file, and one that replaces it.
        write_atomically(folder / ".writable", b"")
        write_atomically(folder / ".writable", b"")
        (folder / ".writable").unlink()
    except OSError as error:
        raise InputError(
            f"cannot write to {folder} ({error.strerror}): "
            "choose another --log-dir or --checkpoint-dir"
        ) from error


def read_weights(path: str) -> dict[str, torch.Tensor]:
    """The weights by name in a file: a state_dict, safetensors, or a checkpoint of a recipe.

    Raises InputError.
    """
    try:
        if Path(path).suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise InputError(f"--init-from {path}: {in_one_line(error)}") from error
    if isinstance(saved, dict) and "format" in saved and "model" in saved:
        saved = saved["model"]
    if not is_state_dict(saved):
        raise InputError(f"--init-from {path}: it is not a state_dict, a dict of tensors")
    # DataParallel and DistributedDataParallel, and torch.compile, put them before each name.
    for prefix in ("module.", "_orig_mod."):
        torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(saved, prefix)
    return saved


def is_state_dict(saved) -> bool:
    """Whether it is a dict of tensors by name."""
    return isinstance(saved, dict) and all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in saved.items()
    )


def init_from(path: str | None, model: torch.nn.Module, partial: bool = False) -> list[str]:
    """Load the weights in the file `path`, if any, into `model`; return lines that say what it did.

    With `partial`, weights that one of both lacks, or that have another shape, are left out, and
    the line names them. Otherwise they raise InputError.
    """
    if path is None:
        return []
    weights = read_weights(path)
    own = model.state_dict()
    fitting = {}
    left_out = []
    for name in sorted(own.keys() | weights.keys()):
        if name not in weights:
            left_out.append(f"{name} (not in the file)")
        elif name not in own:
            left_out.append(f"{name} (not in the model)")
        elif own[name].shape != weights[name].shape:
            left_out.append(f"{name} ({list(weights[name].shape)} in the file)")
        else:
            fitting[name] = weights[name]
    if not fitting:
        raise InputError(f"--init-from {path}: no weight in it fits the model")
    if left_out and not partial:
        raise InputError(
            f"--init-from {path} does not fit the model: {', '.join(left_out)}; "
            "--init-partial leaves them out"
        )
    model.load_state_dict(fitting, strict=False)
    line = f"weights from {path}: {len(fitting)} of {len(own)} loaded"
    return [f"{line}; left out: {', '.join(left_out)}" if left_out else line]
