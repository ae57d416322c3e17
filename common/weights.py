"""--init-from: start from the weights in a file."""

import json
from contextlib import suppress
from pathlib import Path

import torch

from common import checkpoint, untrusted
from common.errors import InputError
from common.files import read_regular, read_with_retries
from common.metadata import Metadata
from common.optimizers import is_plain
from common.ranks import World

# What DataParallel and DistributedDataParallel, and torch.compile, put before each name.
PREFIXES = ("module.", "_orig_mod.")
# What a failed download leaves in place of the weights, by its first bytes.
NO_WEIGHTS = {
    b"<": "it is a web page: download the file itself",
    b"version https://git-lfs": "it is a pointer of Git LFS: run git lfs pull",
}


def read_weights(path: str, flag: str = "--init-from") -> tuple[dict[str, torch.Tensor], dict, str]:
    """Read a file; return (its weights by name, its metadata, the part that the weights are from).

    The file is a state_dict, safetensors, or a recipe's checkpoint; the part is "" unless it is a
    checkpoint. Raises InputError.
    """
    metadata = {}
    part = ""
    try:
        if Path(path).suffix == ".safetensors":
            weights, metadata = read_with_retries(path, read_safetensors)
        else:
            weights = read_with_retries(path, untrusted.load)
        if isinstance(weights, dict) and "format" in weights and "model" in weights:
            metadata = dict(weights.get("metadata", {}))
            part, weights = weights_in(weights)
        if not is_state_dict(weights):
            raise InputError("it is not a state_dict, a dict of tensors")
    except ImportError as error:
        raise InputError(f"{flag} {path}: pip install safetensors ({error})") from error
    except (OSError, InputError) as error:
        raise InputError(f"{flag} {path}: {checkpoint.reason_of(error)}") from error
    # An untrusted file can raise any exception.
    except Exception as error:
        raise InputError(f"{flag} {path}: {why_not(path, error)}") from error
    return weights, metadata, part


def weights_in(saved: dict) -> tuple[str, dict[str, torch.Tensor]]:
    """Return (name of a part of the checkpoint `saved`, its weights by the names of "model").

    The part is an average of the model (an EMA in torch's AveragedModel), if there is one, else
    "model".
    """
    for part, value in saved.items():
        average = average_of(saved["model"], value)
        if average is not None:
            return part, average
    return "model", saved["model"]


def average_of(model, value) -> dict[str, torch.Tensor] | None:
    """The weights in `value`, if it is the state_dict of an AveragedModel of `model`, or None.

    Shapes are compared, too: the two models of a GAN can have the same names.
    """
    if not is_state_dict(model) or not is_state_dict(value) or "n_averaged" not in value:
        return None
    weights = {
        name.removeprefix("module."): weight
        for name, weight in value.items()
        if name != "n_averaged"
    }
    return weights if shapes(weights) == shapes(model) else None


def shapes(weights: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in weights.items()}


def why_not(path: str, error: Exception) -> str:
    """Why reading weights from the file `path` raised `error`, for a message."""
    begin = read_regular(path)[:100].lstrip()
    for magic, reason in NO_WEIGHTS.items():
        if begin.startswith(magic):
            return reason
    kind = type(error).__name__
    return f"it is damaged, or holds more than tensors ({kind}): save a state_dict"


def read_safetensors(path: str, mapped: bool) -> tuple[dict[str, torch.Tensor], dict]:
    """Return (the weights, the metadata, which scripts/export.py writes as JSON)."""
    from safetensors import torch as safetensors

    weights = safetensors.load_file(path) if mapped else safetensors.load(read_regular(path))
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        texts = json.loads(file.read(length)).get("__metadata__") or {}
    metadata = {}
    for name, text in texts.items():
        # Other programs write text that is not JSON.
        with suppress(ValueError):
            metadata[name] = json.loads(text)
    return weights, metadata


def is_state_dict(saved) -> bool:
    """Whether `saved` is a dict of plain tensors by name."""
    return isinstance(saved, dict) and all(
        isinstance(name, str) and isinstance(value, torch.Tensor) and is_plain(value)
        for name, value in saved.items()
    )


def init_from(args, model: torch.nn.Module, metadata: Metadata, world: World) -> None:
    """Load the weights of --init-from, if any, into `model`, and print a line.

    With --init-partial, weights that the file or the model lacks, or whose shapes differ, are left
    out and listed; else they raise InputError. A resumed run takes its weights from the checkpoint
    and does not read the file, which may be gone. --evaluate --resume loads the weights from the
    checkpoint. `metadata` is that of the run.
    """
    path = args.init_from
    flag = "--init-from"
    if args.evaluate and args.resume:
        path = checkpoint.find(args.resume, args.log_dir).path
        flag = "--resume"
        if path is None:
            raise InputError(f"--evaluate: there is no checkpoint in {args.log_dir}")
    elif path is None or checkpoint.exists(args.resume, args.log_dir):
        return
    weights, metadata_of_file, part = read_weights(path, flag)
    own = model.state_dict()
    weights = {
        name if name in own else without_prefixes(name): weight for name, weight in weights.items()
    }
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
        raise InputError(f"{flag} {path}: no weight in it fits the model")
    if left_out and not args.init_partial:
        raise InputError(
            f"{flag} {path} does not fit the model: {', '.join(left_out)}; "
            "--init-partial leaves them out"
        )
    model.load_state_dict(fitting, strict=False)
    of_average = f", of its {part}" if part not in ("", "model") else ""
    line = f"weights from {path}{of_average}: {len(fitting)} of {len(own)} loaded"
    if left_out:
        line += f"; left out: {', '.join(left_out)}"
    differences = metadata.differences(metadata_of_file)
    if differences and args.evaluate:
        raise InputError(f"{flag} {path} does not fit the data: {'; '.join(differences)}")
    world.say(line, *(f"weights from {path}: {difference}" for difference in differences))


def without_prefixes(name: str) -> str:
    """The name of a weight before its model was wrapped, perhaps more than once."""
    while name.startswith(PREFIXES):
        name = name.partition(".")[2]
    return name
