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
from common.files import read_surely

# The batches that TensorLoader picks at once.
AT_ONCE = 32


@dataclass
class DataObject:
    """A dataset, its sampler, and its loader, which has __iter__ and __len__ and yields batches."""

    dataset: Dataset
    sampler: Iterable
    loader: Iterable


class EpochSampler(Sampler[int]):
    """This rank's share of a permutation of `length` samples, a function of seed and epoch.

    The k-th batches of all ranks are together that of one process with a batch of `global_batch`
    samples. Samples that do not fill a global batch are left out until the next epoch.
    Raises InputError if they fill none.
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
        # (epoch, start, steps), in shared memory: loader workers live through all epochs.
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

        It goes on for `steps` steps, or to its end.
        """
        if steps is None:
            steps = max(0, self.length - start) // self.global_batch
        self._place.copy_(torch.tensor([epoch, start, steps]))

    def __len__(self) -> int:
        """The samples that this rank reads from here on."""
        return self.steps * self.batch_size

    def __iter__(self) -> Iterator[int]:
        # Each rank holds the numbers of all samples: int32 takes half of the memory.
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
    AT_ONCE batches are copied at a time.
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
        # Many batches in one operation: a step then only takes a view.
        for many in indices.to(self.tensors[0].device).split(AT_ONCE * self.batch_size):
            parts = [picked.split(self.batch_size) for picked in self.pick(many)]
            yield from map(list, zip(*parts, strict=True))

    def pick(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """The samples with these indices, each tensor in one piece."""
        return [tensor.index_select(0, indices) for tensor in self.tensors]


class Seeded(Dataset):
    """`dataset`, with what a sample draws at random set by (seed, epoch, index).

    So augmentation is the same on any number of processes and loader workers, and after a resume.
    It may draw from torch, numpy and random. `sampler` is the EpochSampler of the dataset; without
    one a sample is the same in each epoch, as a validation set needs it.
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
        """The samples of a batch. `dataset.prefetch`, if there is one, gets `indices` before."""
        if hasattr(self.dataset, "prefetch"):
            self.dataset.prefetch(indices)
        return [self[index] for index in indices]


@contextmanager
def random_state(seed: int):
    """Seed the CPU generators of torch, numpy and random, and put their states back at the end."""
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
    """The array in a .npy file, mapped where it can be; reads no pickle. Raises anything."""

    def read(path, mapped):
        if mapped:
            return np.lib.format.open_memmap(path, mode="r")
        with open(path, "rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)

    return read_surely(path, read)


def seed_of(*numbers: int) -> int:
    """A 63-bit seed that is a function of `numbers`."""
    digest = hashlib.blake2b(str(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def to_device(batch, device: torch.device):
    """`batch` with each tensor in it on `device`: a tensor, or nested dicts, lists and tuples.

    Dtypes stay as they are, and so does everything that has no `to`.
    """
    if isinstance(batch, torch.Tensor):
        # CUDA copies pageable memory aside before it returns. Others may read it later, when it has
        # changed (pytorch issue 139550, on Apple's GPUs).
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
