"""Whether all ranks have the same: what they read separately can differ between machines."""

import zlib

import torch
from torch.utils.data import Dataset, TensorDataset

from common.errors import InputError


def all_same(numbers: list[int], all_reduce, device: torch.device) -> bool:
    """Whether `numbers`, below 2**32, are those of each other rank; all ranks make this call.

    `all_reduce` adds up a tensor over all ranks in place.
    """
    own = torch.tensor([1, *numbers], device=device)
    total = own.clone()
    all_reduce(total)
    world_size = total[0]
    differs = (own * world_size != total).any().long()
    # A rank whose number happens to be the mean sees no difference.
    all_reduce(differs)
    return not differs


def require_same(datasets: tuple[Dataset, ...], all_reduce, device: torch.device) -> None:
    """Raise InputError unless all ranks have the same `datasets`."""
    if not all_same([fingerprint(dataset) for dataset in datasets], all_reduce, device):
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
        value = zlib.crc32(tensor.contiguous().numpy(), value)
    return value
