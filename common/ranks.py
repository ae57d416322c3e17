"""This process among those that train together, and checks that all ranks agree."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset, TensorDataset

from common.errors import InputError, show
from common.process import launch


@dataclass(frozen=True)
class World:
    """This process: `rank` of the `size` that train together, with a `device` of its own.

    `all_reduce` adds up a tensor over all ranks in place; a single process has none. `strategy` is
    its description for the log. Raises InputError if a launcher started more than `size`.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    all_reduce: Callable | None = None
    strategy: str = "one device"

    def __post_init__(self):
        launch.check_world_size(self.size)

    def say(self, *lines: str) -> None:
        """Print the lines, on rank 0 only."""
        if self.rank == 0:
            for line in lines:
                show(line)


def all_same(numbers: list[int], world: World) -> bool:
    """Whether `numbers`, below 2**32, are the same on all ranks; all ranks make this call."""
    own = torch.tensor([1, *numbers], device=world.device)
    total = own.clone()
    world.all_reduce(total)
    differs = (own * world.size != total).any().long()
    # A rank whose number happens to be the mean sees no difference: ask the others.
    world.all_reduce(differs)
    return not differs


def require_same(world: World, *datasets: Dataset) -> None:
    """Raise InputError unless all ranks have the same `datasets`."""
    if not all_same([fingerprint(dataset) for dataset in datasets], world):
        raise InputError(
            "the data set is not the same on all ranks: bring the same files to all machines, "
            "where every rank may read them"
        )


def fingerprint(dataset: Dataset) -> int:
    """What dataset.fingerprint() gives, or a checksum of a TensorDataset, or the length, or 0."""
    if hasattr(dataset, "fingerprint"):
        return dataset.fingerprint()
    if not isinstance(dataset, TensorDataset):
        return len(dataset) if hasattr(dataset, "__len__") else 0
    value = 0
    for tensor in dataset.tensors:
        # As bytes on the CPU: NumPy lacks some of torch's types and its devices.
        content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        value = zlib.crc32(content.numpy(), value)
    return value
