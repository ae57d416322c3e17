"""DataObject: a dataset, the sampler that picks this rank's share of it, and the batches of that share."""

import time

import torch
from torch.utils.data import Dataset

from common.processes import fail


class EpochSampler:
    """This rank's share of a permutation of `length` samples, which is a function of seed and epoch.

    The k-th batches of all ranks are together that of one process with a batch of `world_size * batch_size`. Samples
    that do not fill a global batch are left out until the next epoch.
    """

    def __init__(self, length: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1):
        self.length, self.seed, self.rank, self.world_size = length, seed, rank, world_size
        self.global_batch = batch_size * world_size
        if length < self.global_batch:
            fail(f"{length} training images do not fill one batch of {batch_size} on each of {world_size} processes")
        self.set_epoch(0)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Begin epoch `epoch` (from 0); a resumed run has already used `start` samples of it, over all ranks."""
        self.epoch, self.start = epoch, start

    def __len__(self) -> int:
        return (self.length - self.start) // self.global_batch * self.global_batch // self.world_size

    def indices(self) -> torch.Tensor:
        """int64 [len(self)]: the samples that this rank reads in this epoch, in order."""
        generator = torch.Generator().manual_seed(hash((self.seed, self.epoch)))  # the same on each rank
        order = torch.randperm(self.length, generator=generator)[self.start:]
        return order[:len(self) * self.world_size][self.rank::self.world_size].contiguous()


class ImageTensor(Dataset):
    """uint8 `images` [N, channels, height, width], int64 `labels` [N], (means, stds) of the channels scaled to 0..1."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, mean_std: tuple):
        self.images, self.labels, self.mean_std = images, labels, mean_std

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> None:
        self.images, self.labels = self.images.to(device), self.labels.to(device)

    def batches(self, indices: torch.Tensor, batch_size: int, epoch: int):
        """Yield the images and labels at `indices` (int64, on any device), `batch_size` at a time."""
        for batch in indices.to(self.labels.device).split(batch_size):
            yield self.images.index_select(0, batch), self.labels.index_select(0, batch)


class DataObject:
    """Yields batches on `device`: float32 images [batch, channels, height, width] and int64 labels [batch].

    The sampler is an EpochSampler, or range(rank, N, world_size) for validation. The dataset is an ImageTensor, or any
    Dataset of (image, label), which `workers` processes read. uint8 images are normalised with its `mean_std`.
    """

    def __init__(self, dataset: Dataset, sampler: EpochSampler | range, batch_size: int, device: torch.device,
                 workers: int = 0):
        self.dataset, self.sampler, self.batch_size, self.device = dataset, sampler, batch_size, device
        self.waited = 0.0  # seconds that the last pass waited for data
        if isinstance(dataset, ImageTensor):
            dataset.to(device)
            self.source = dataset
        else:
            from common.loader import Loader  # here, as an ImageTensor does not need it
            self.source = Loader(dataset, getattr(sampler, "seed", 0), workers, pin_memory=device.type != "cpu")
        mean, std = torch.tensor(getattr(dataset, "mean_std", ((0.5,), (0.5,))), device=device).view(2, 1, -1, 1, 1)
        self.scale, self.shift = 1 / (255 * std), -mean / std

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.batch_size)

    def indices(self) -> torch.Tensor:
        """int64 [samples]: the samples that this rank reads in the next pass, in order."""
        share = self.sampler
        return torch.arange(share.start, share.stop, share.step) if isinstance(share, range) else share.indices()

    def __iter__(self):
        self.waited, asked = 0.0, time.perf_counter()
        indices, epoch = self.indices(), getattr(self.sampler, "epoch", 0)  # a rank may have none
        for images, labels in self.source.batches(indices, self.batch_size, epoch) if len(indices) else ():
            images = images.to(self.device, non_blocking=True)  # before it is four bytes per pixel
            labels = (labels if labels.is_floating_point() else labels.long()).to(self.device, non_blocking=True)
            images = torch.addcmul(self.shift, images, self.scale) if images.dtype == torch.uint8 else images.float()
            self.waited += time.perf_counter() - asked
            yield images, labels
            asked = time.perf_counter()
