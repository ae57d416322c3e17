"""--init-from: the weights of another file, to begin with."""

from pathlib import Path

import torch

from common.errors import InputError, in_one_line


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
