"""The data of a run: a dataset, the sampler that picks this rank's share of it, and its batches."""

import hashlib
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler, TensorDataset

from common.errors import InputError
from common.files import read_with_retries

# How many batches TensorLoader gathers at once.
AT_ONCE = 32


@dataclass
class DataObject:
    """A dataset, its sampler, and its loader, which has __iter__ and __len__ and yields batches."""

    dataset: Dataset
    sampler: Iterable
    loader: Iterable


class EpochSampler(Sampler[int]):
    """This rank's share of a permutation of `length` samples, a function of seed and epoch.

    The k-th batches of all ranks together have the samples of the k-th batch of one process with
    batch size `global_batch`. Samples that do not fill a global batch are dropped for this epoch.
    Raises InputError if there are too few for one.
    """

    def __init__(self, length, batch_size, rank=0, world_size=1, *, seed=0, shuffle=True):
        self.length = length
        self.batch_size = batch_size
        self.global_batch = batch_size * world_size
        self.steps_per_epoch = length // self.global_batch
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle
        if length < self.global_batch:
            raise InputError(
                f"{length} training samples do not fill one batch of {batch_size} "
                f"on each of {world_size} processes"
            )
        # (epoch, start, steps), in shared memory: loader workers outlive an epoch.
        self._place = torch.zeros(3, dtype=torch.int64).share_memory_()
        self.set_epoch(0)

    @property
    def epoch(self) -> int:
        return self._place[0].item()

    @property
    def start(self) -> int:
        return self._place[1].item()

    @property
    def steps(self) -> int:
        return self._place[2].item()

    def set_epoch(self, epoch: int, start: int = 0, steps: int | None = None) -> None:
        """Begin epoch `epoch` (from 0), of which all ranks have used `start` samples already.

        `steps` is the number of steps still to take in it; None: as many as it has.
        """
        if steps is None:
            steps = max(0, self.length - start) // self.global_batch
        self._place.copy_(torch.tensor([epoch, start, steps]))

    def __len__(self) -> int:
        """The number of samples that this rank has yet to read."""
        return self.steps * self.batch_size

    def __iter__(self) -> Iterator[int]:
        # Each rank holds the indices of all samples: int32 takes half the memory.
        dtype = torch.int32 if self.length < 2**31 else torch.int64
        if self.shuffle:
            # The same on each rank.
            generator = torch.Generator().manual_seed(seed_of(self.seed, self.epoch))
            order = torch.randperm(self.length, generator=generator, dtype=dtype)
        else:
            order = torch.arange(self.length, dtype=dtype)
        end = self.start + self.steps * self.global_batch
        of_all_ranks = order[self.start : end]
        return iter(of_all_ranks[self.rank :: self.world_size].tolist())


class TensorLoader:
    """Batches of a dataset in memory: its tensors stay on `device` and are sliced there.

    `dataset` is a TensorDataset, or a Subset of one; a batch is a list of tensors, in its order.
    It gathers AT_ONCE batches in one operation.
    """

    def __init__(self, dataset: Dataset, sampler: Iterable, batch_size: int, device: torch.device):
        if isinstance(dataset, TensorDataset):
            # Without a copy.
            all_samples = dataset.tensors
        else:
            all_samples = dataset[list(range(len(dataset)))]
        self.tensors = [tensor.to(device) for tensor in all_samples]
        self.sampler = sampler
        self.batch_size = batch_size

    def __len__(self) -> int:
        return math.ceil(len(self.sampler) / self.batch_size)

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        indices = torch.tensor(list(self.sampler), dtype=torch.int64)
        if len(indices) == 0:
            return
        # Many batches in one operation, so that each step only takes a view.
        for many in indices.to(self.tensors[0].device).split(AT_ONCE * self.batch_size):
            parts = [picked.split(self.batch_size) for picked in self.pick(many)]
            yield from map(list, zip(*parts, strict=True))

    def pick(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """The samples with these indices, as one tensor for each of `self.tensors`."""
        return [tensor.index_select(0, indices) for tensor in self.tensors]


class Seeded(Dataset):
    """`dataset`, whose random augmentation depends only on (seed, epoch, index).

    So it is the same on any number of processes and loader workers, and after a resume. It may
    draw from torch, numpy and random. `sampler` is the EpochSampler of the dataset; without one a
    sample is the same in each epoch, as a validation set needs it.
    """

    def __init__(self, dataset: Dataset, sampler: EpochSampler | None = None):
        self.dataset = dataset
        self.sampler = EpochSampler(len(dataset), 1) if sampler is None else sampler
        if not isinstance(self.sampler, EpochSampler):
            raise TypeError(f"an EpochSampler, or none for validation, not {sampler}")

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int):
        with random_state(seed_of(self.sampler.seed, self.sampler.epoch, index)):
            return self.dataset[index]

    def __getitems__(self, indices: list[int]) -> list:
        """The samples of a batch. Calls dataset.prefetch(indices) first, if there is one."""
        if hasattr(self.dataset, "prefetch"):
            self.dataset.prefetch(indices)
        return [self[index] for index in indices]


@contextmanager
def random_state(seed: int):
    """Seed the CPU generators of torch, numpy and random; restore their states at the end."""
    numpy_state = np.random.get_state()
    python_state = random.getstate()
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)


def read_array(path: str) -> np.ndarray:
    """The array in a .npy file, memory-mapped if possible, never a pickle. May raise anything."""

    def read(path, mapped):
        if mapped:
            return np.lib.format.open_memmap(path, mode="r")
        with open(path, "rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)

    return read_with_retries(path, read)


def seed_of(*numbers: int) -> int:
    """A 63-bit seed, a hash of `numbers`."""
    digest = hashlib.blake2b(str(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def to_device(batch, device: torch.device):
    """`batch` with each tensor in it on `device`: a tensor, or nested dicts, lists and tuples.

    Dtypes do not change. Objects with a method `to` are moved too, all others stay as they are.
    """
    if isinstance(batch, torch.Tensor):
        # CUDA stages pageable memory before the call returns. Other devices may read it later, when
        # it has changed (pytorch issue 139550, on Apple's GPUs).
        is_safe = device.type == "cuda" or batch.is_pinned()
        return batch.to(device, non_blocking=is_safe)
    if isinstance(batch, Mapping):
        return {name: to_device(part, device) for name, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(part, device) for part in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(part, device) for part in batch)
    if hasattr(batch, "to"):
        return batch.to(device)
    return batch
