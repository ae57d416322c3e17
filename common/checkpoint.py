"""Checkpoints: last.pt, previous.pt and best.pt. A crash at any moment leaves a good one."""

import io
import os
import zipfile
import zlib
from pathlib import Path

import torch

from common.processes import fail

FORMAT = 4
# Arguments that a resumed run must keep. Batch size and --lr may change with the number of processes.
MUST_MATCH = ("format", "dataset", "synthetic", "model", "seed", "momentum", "weight_decay", "scale_lr",
              "warmup_epochs", "image_size", "label_smoothing")


class CorruptCheckpoint(Exception):
    """The file is damaged, or is not a checkpoint."""


def write(path: Path, content: bytes | memoryview) -> None:
    """Replace `path` by the bytes `content` atomically; last.pt first becomes previous.pt, and is gone for a moment."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if path.name == "last.pt" and path.exists():
            os.replace(path, path.with_name("previous.pt"))
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)  # frees its space on a full disk
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # so that the new name survives a power cut
    os.close(folder)


def save(folder: Path, checkpoint: dict, best: bool) -> None:
    """Save the dict `checkpoint` as last.pt in the Path `folder`, and also as best.pt if it is the `best`."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **checkpoint}, buffer)
    buffer.seek(0)
    if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(buffer):
        raise TypeError(f"--resume could not read {', '.join(unsafe)}: save only numbers, strings, lists and tensors")
    for name in ("best.pt", "last.pt") if best else ("last.pt",):
        write(folder / name, buffer.getbuffer())


def read(path: Path) -> tuple[dict, int]:
    """Return (the dict in the file `path`, a fingerprint of the file); raises OSError or CorruptCheckpoint."""
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load ignores CRC-32s, and reads folders (attribute 16) as zeros
            if archive.testzip() or any(entry.external_attr & 16 for entry in archive.infolist()):
                raise CorruptCheckpoint("it is damaged (a CRC-32 is wrong)")
            fingerprint = zlib.crc32(repr([entry.CRC for entry in archive.infolist()]).encode())
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)  # a pickle could run code
        return checkpoint | {"format": int(checkpoint["format"])}, fingerprint
    except (OSError, CorruptCheckpoint):
        raise
    except Exception as error:  # a file that torch.save did not write can raise anything
        raise CorruptCheckpoint(f"it is damaged, or not a checkpoint ({type(error).__name__})") from error


def find(resume: str, folder: str | None, read=read) -> tuple[Path | None, dict, int, list]:
    """Find the checkpoint that --resume means: (path or None, dict, fingerprint, [(damaged file, reason)])."""
    damaged, auto = [], resume == "auto"
    if auto and folder is None:
        fail("--resume auto: name the folder with --log-dir or --checkpoint-dir")
    for path in [Path(folder, f"{name}.pt") for name in ("last", "previous", "best")] if auto else [Path(resume)]:
        try:
            return path, *read(path), damaged
        except (OSError, CorruptCheckpoint) as error:
            if not auto or path.exists():
                damaged.append((path, getattr(error, "strerror", None) or error))
    if damaged or any(Path(folder).glob("[!.]*.pt*")):
        reasons = "; ".join(f"{path}: {reason}" for path, reason in damaged) or f"no last.pt in {folder}"
        fail(f"--resume {resume}: {reasons}" + "; choose another folder to start again" * auto)
    return None, {}, -1, []


def load(saved: dict, state: dict, args, rate: dict) -> tuple[int, int, list | None, list]:
    """Load `saved` into the objects of `state`; return its position and history; fails if it is from another run."""
    own, name, only_model = vars(args) | {"format": FORMAT}, "arguments", getattr(args, "evaluate", False)
    try:
        there = saved["arguments"] | {"format": saved["format"]}
        for flag in MUST_MATCH[:1] if only_model else MUST_MATCH:
            if there.get(flag) != own.get(flag):
                raise ValueError(f"it was saved with {flag} {there.get(flag)}, and this run has {own.get(flag)}")
        if "shards" in saved and "sharded_checkpoint" not in own:
            raise ValueError("its tensors are in shards: use imagenet/fsdp.py, or scripts/unshard.py")
        for name, part in [("model", state["model"])] if only_model else state.items():
            if isinstance(part, torch.optim.lr_scheduler.LRScheduler) and saved["rate"] != rate:
                raise ValueError(f"it needs {saved['rate']}, and this run has {rate}")  # it counts steps
            if saved.get(name) or name not in ("scaler", "amp"):  # saved by a recipe without one
                part.load_state_dict(saved[name])
        for group in () if only_model else state["optimizer"].param_groups:
            group["lr"] *= rate["lr"] / saved["rate"]["lr"]  # else, without a schedule, it keeps the old rate
        for w, kept in () if only_model else state["optimizer"].state.items():  # in w's memory format, for fused SGD
            kept |= {k: torch.empty_like(w).copy_(v) for k, v in kept.items() if getattr(v, "shape", 0) == w.shape}
        name = "position"
        return int(saved["epoch"]), int(saved["samples"]), saved["sums"], list(saved["history"])
    except (KeyError, TypeError, AttributeError, RuntimeError, ValueError, OverflowError) as error:
        return fail(f"--resume {args.resume} does not fit this run ({name}: {' '.join(str(error).split())[:200]})")
