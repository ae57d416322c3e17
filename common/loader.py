"""Any torch Dataset, through a DataLoader in which random augmentation is a function of seed, epoch and index."""

import os
import random
import signal
import threading

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from common.processes import die_with_parent


class Seeded(Dataset):
    """`dataset`, with the random state (torch, numpy, random) of each sample set from seed, epoch and index.

    The key is epoch * N + index, so that loader workers, which live through all epochs, know the epoch.
    """

    def __init__(self, dataset: Dataset, seed: int):
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, key: int) -> tuple:
        seed = hash((self.seed, key))  # hash() of integers is the same in every process
        random.seed(seed)
        np.random.seed(seed % 2**32)
        with torch.random.fork_rng(devices=()):  # without workers, training uses the same generator
            torch.default_generator.manual_seed(seed)
            return self.dataset[key % len(self.dataset)]


class Loader:
    """Batches of `dataset`, of (image tensor of uint8 or float, int), read by `workers` processes or by this one."""

    def __init__(self, dataset: Dataset, seed: int, workers: int, pin_memory: bool):
        self.length, self.keys = len(dataset), []  # the keys of each batch of a pass
        seeded = Seeded(dataset, seed)
        self.loader = DataLoader(seeded, batch_sampler=self.keys, num_workers=workers, persistent_workers=workers > 0,
                                 pin_memory=pin_memory, worker_init_fn=begin_worker, generator=torch.Generator(),
                                 multiprocessing_context="fork" if workers else None)  # also under mp.spawn
        # Start the workers now, by an empty pass. Training starts threads (Gloo, autograd), and in CPython 3.11 a fork
        # can deadlock while one creates or deletes its Python state: 1 fork in 400, on two busy cores.
        iter(self.loader)

    def batches(self, indices: torch.Tensor, batch_size: int, epoch: int):
        """Iterate over the images and labels at `indices` (int64), `batch_size` at a time, augmented for `epoch`."""
        self.keys[:] = [batch.tolist() for batch in (epoch * self.length + indices).split(batch_size)]
        return iter(self.loader)


def begin_worker(_) -> None:
    """Let SIGTERM end a worker only if its rank sent it: SLURM sends it to all processes, and the rank needs data."""
    def wait():
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        os._exit(0)

    die_with_parent()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=wait, daemon=True).start()
