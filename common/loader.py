"""Any torch Dataset for a DataObject: a DataLoader whose random augmentation is a function of seed, epoch and index."""

import random

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from common.processes import die_with_parent, fail


class Seeded(Dataset):
    """`dataset`, in which what a sample draws (torch, numpy, random) is a function of seed, epoch and index.

    Its places are epoch * N + index: loader workers, which live through all epochs, see from them which epoch it is.
    """

    def __init__(self, dataset, seed):
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, place):
        seed = hash((self.seed, place))  # of numbers, so the same in every process
        random.seed(seed)
        np.random.seed(seed % 2**32)
        with torch.random.fork_rng(devices=()):  # without workers this is the training process's own generator
            torch.default_generator.manual_seed(seed)
            return self.dataset[place % len(self.dataset)]


class Loader:
    """Batches of `dataset`, read by `workers` processes, or by this one where there are none.

    Fails where it does not give (image as a tensor of uint8 or float, label as an int).
    """

    def __init__(self, dataset, seed, workers, pin_memory):
        self.length, self.places = len(dataset), []  # the places of each batch of a pass
        seeded = Seeded(dataset, seed)
        check_sample(type(dataset).__name__, seeded[0])
        self.loader = DataLoader(seeded, batch_sampler=self.places, num_workers=workers, persistent_workers=workers > 0,
                                 pin_memory=pin_memory, worker_init_fn=die_with_parent, generator=torch.Generator(),
                                 multiprocessing_context="fork" if workers else None)  # under mp.spawn, too
        # Fork the workers now, by a pass over nothing. CPython 3.11 can deadlock in a fork while another thread makes
        # or drops its Python state, as those of Gloo and autograd do in training: one fork in 400 on two busy cores.
        iter(self.loader)

    def batches(self, indices, batch_size, epoch):
        """The images and labels at `indices` (int64), `batch_size` at a time, as `epoch` draws them."""
        self.places[:] = [batch.tolist() for batch in (epoch * self.length + indices).split(batch_size)]
        return iter(self.loader)


def check_sample(name, sample):
    image, label = sample if isinstance(sample, tuple | list) and len(sample) == 2 else (sample, None)
    if not isinstance(image, torch.Tensor) or not (image.dtype == torch.uint8 or image.is_floating_point()) or not (
            isinstance(label, int | np.integer) or (isinstance(label, torch.Tensor) and label.dtype == torch.int64)):
        kinds = ", ".join(str(getattr(part, "dtype", type(part).__name__)) for part in (image, label))
        fail(f"{name} gives ({kinds}), and a DataObject takes (image as a tensor of uint8 or float, label as an int)")
