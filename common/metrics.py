"""Metrics as named sums: add up per batch, sum over all ranks, then divide once."""

import inspect
import itertools
import math
from collections.abc import Callable, Iterable

import torch

from common.errors import RunError


class Sums:
    """Named float64 sums on `device`, and the averages to compute from them.

    `averages` is a function that returns {name: average}. Its parameters name the sums:
    averages(loss, images) has two. A sum is a scalar, unless a keyword gives its shape, as in
    Sums(device, averages, confusion=(9, 9)). A checkpoint holds the sums over all ranks, to which
    a resumed run adds its own.
    """

    def __init__(self, device: torch.device, averages: Callable, **shapes: tuple[int, ...]):
        self.averages = averages
        names = inspect.signature(averages).parameters
        self.shapes = {**dict.fromkeys(names, ()), **shapes}
        self.sizes = [math.prod(shape) for shape in self.shapes.values()]
        # Apple's GPUs have no float64.
        wide = torch.float32 if device.type == "mps" else torch.float64
        # What this rank has added: tensors, summed on the device, and Python numbers.
        self.own = torch.zeros(sum(self.sizes), dtype=wide, device=device)
        self.own_parts = self._split(self.own)
        self.reset()

    def _split(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of `values`, by name."""
        parts = zip(self.shapes.items(), values.split(self.sizes), strict=True)
        return {name: part.view(shape) for (name, shape), part in parts}

    def reset(self) -> None:
        """Set the sums to 0."""
        self.own.zero_()
        self.own_numbers = dict.fromkeys(self.shapes, 0)
        # Sums over all ranks.
        self.from_checkpoint = torch.zeros(len(self.own), dtype=torch.float64)
        self.last_total = self.from_checkpoint

    def add(self, **amounts: torch.Tensor | float) -> None:
        """Add to the sums with these names. A tensor may stay on the device: no sync."""
        # A CUDA graph replays GPU work only, no Python: in a capture the GPU has to add.
        captured = self.own.is_cuda and torch.cuda.is_current_stream_capturing()
        for name, amount in amounts.items():
            if captured or isinstance(amount, torch.Tensor):
                self.own_parts[name].add_(amount)
            else:
                # A Python number needs no GPU work until total().
                self.own_numbers[name] += amount

    def result(self, all_reduce=None) -> dict:
        """The averages over all ranks since the last reset; see total()."""
        return self.averages(**self.total(all_reduce))

    def total(self, all_reduce=None) -> dict:
        """{name: sum over all ranks}, a float or a tensor on the CPU, since the last reset.

        `all_reduce` adds up a tensor over all ranks in place; all of them make this call.
        Raises RunError if a sum is not finite.
        """
        for name, number in self.own_numbers.items():
            if number:
                self.own_parts[name].add_(number)
                self.own_numbers[name] = 0
        values = self.own.clone()
        if all_reduce:
            all_reduce(values)
        # This waits for the GPU.
        values = values.cpu().double()
        self.last_total = self.from_checkpoint + values
        total = self._split(self.last_total)
        for name, part in total.items():
            if not part.isfinite().all():
                raise RunError(
                    f"the {name} is not finite: lower --lr, or check the data, and continue with "
                    "--resume auto; if that fails at once, too, resume from previous.pt or best.pt "
                    "in a new --log-dir"
                )
        return {name: part.clone() if part.dim() else part.item() for name, part in total.items()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The sums over all ranks as of the last call of total()."""
        return {name: part.clone() for name, part in self._split(self.last_total).items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.reset()
        for name, part in self._split(self.from_checkpoint).items():
            part.copy_(state[name])


def in_order(values: torch.Tensor, indices: Iterable[int], length: int, all_reduce) -> torch.Tensor:
    """Return [length, ...], the rows of all ranks in the order of the data set.

    For metrics that are not sums, such as a median. `values` [n, ...] are this rank's rows, for the
    first n of `indices`, such as val.sampler. The ranks may have unequal shares. `all_reduce` adds
    up a tensor over all ranks in place; all make this call, after their last batch. Rows that no
    rank has are 0.
    """
    whole = values.new_zeros(length, *values.shape[1:])
    own = list(itertools.islice(indices, len(values)))
    whole[own] = values
    all_reduce(whole)
    return whole


class Best:
    """The highest value of a run so far."""

    def __init__(self):
        self.value = -math.inf

    def update(self, value: float) -> bool:
        """Keep `value` if it is higher; return whether it is. NaN never is."""
        # A checkpoint takes Python numbers, not those of NumPy.
        value = float(value)
        better = value > self.value
        if better:
            self.value = value
        return better

    def state_dict(self) -> dict:
        return {"value": self.value}

    def load_state_dict(self, state: dict) -> None:
        self.value = float(state["value"])
