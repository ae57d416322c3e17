"""Load the state of an optimizer from an untrusted checkpoint."""

import math

import torch

from common.errors import InputError, brief

# These options change how an optimizer computes, not its result. A run keeps its own.
OF_THE_RUN = ("foreach", "fused", "capturable", "differentiable")


def load(optimizer: torch.optim.Optimizer, saved: dict) -> None:
    """Load the state_dict `saved`; raises InputError if it does not fit the optimizer."""
    check(optimizer, saved)
    own_groups = optimizer.state_dict()["param_groups"]
    groups = []
    for own, group in zip(own_groups, saved["param_groups"], strict=True):
        options = {name: value for name, value in group.items() if name not in OF_THE_RUN}
        # The checkpoint may lack an option that a newer torch has added: keep this run's.
        groups.append(own | options)
    optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})
    match_memory_format(optimizer)


def check(optimizer: torch.optim.Optimizer, saved: dict) -> None:
    """Raise InputError unless the state_dict `saved` fits this optimizer.

    A fused kernel would access memory beyond the end of a tensor that is smaller than its weight.
    """
    own_groups = optimizer.state_dict()["param_groups"]
    for own, group in zip(own_groups, saved["param_groups"], strict=True):
        if group["params"] != own["params"]:
            raise InputError("its weights are in different parameter groups")
        for name, value in own.items():
            if name not in OF_THE_RUN and not is_like(group.get(name, value), value):
                raise InputError(f"its {name} is {brief(group[name])}")
    unknown = dict(saved["state"])
    for own, group in zip(own_groups, optimizer.param_groups, strict=True):
        weights = dict(zip(own["params"], group["params"], strict=True))
        # A weight that has had no gradient has no state.
        states = {number: unknown.pop(number) for number in weights if number in unknown}
        fused = bool(group.get("fused"))
        for number, kept in states.items():
            check_state(number, kept, weights[number].shape, fused)
        if fused and len({frozenset(kept) for kept in states.values()}) > 1:
            raise InputError("its weights have different kinds of state")
    if unknown:
        raise InputError(f"it has no weight {brief(next(iter(unknown)))}")


def check_state(number: int, kept: dict, shape: torch.Size, fused: bool) -> None:
    """Raise InputError unless `kept` can be the state of weight `number`, of shape `shape`."""
    for name, value in kept.items():
        # The step count is a scalar.
        expected = () if name == "step" else shape
        fits = isinstance(value, torch.Tensor) and value.shape == expected
        if not is_plain(value) or (fused and not fits):
            raise InputError(f"{name} of weight {number} does not have the shape of its weight")


def is_like(value, own) -> bool:
    """Whether an option has the same type as this run's `own`; if that is None, any will do."""
    if own is None:
        return True
    if isinstance(own, torch.Tensor):
        if isinstance(value, torch.Tensor):
            return is_plain(value) and value.shape == own.shape
        return isinstance(value, float)
    if isinstance(own, list | tuple):
        same_length = isinstance(value, list | tuple) and len(value) == len(own)
        return same_length and all(map(is_like, value, own))
    if isinstance(own, bool):
        return isinstance(value, bool)
    if isinstance(own, int | float):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # isfinite() raises OverflowError for an int that is too large for a float.
        return is_number and math.isfinite(value)
    return type(value) is type(own)


def is_plain(value) -> bool:
    """Whether `value` is not a tensor, or a dense one: not sparse, meta, quantized or nested."""
    if not isinstance(value, torch.Tensor):
        return True
    has_elements = value.layout is torch.strided and not value.is_meta
    return has_elements and not value.is_quantized and not value.is_nested


def match_memory_format(optimizer: torch.optim.Optimizer) -> None:
    """Give each state tensor the memory format of its weight, which fused optimizers rely on.

    All are copied, so that none keeps the checkpoint memory-mapped: the next save replaces it.
    """
    for weight, kept in optimizer.state.items():
        for name, value in kept.items():
            if not isinstance(value, torch.Tensor):
                continue
            if value.shape == weight.shape:
                kept[name] = torch.empty_like(weight, dtype=value.dtype).copy_(value)
            else:
                kept[name] = value.clone()
