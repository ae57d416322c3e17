"""The data sets as DataObject(dataset, sampler, loader).

The usual pipeline opens, converts and normalises one image at a time in Python. MNIST and CIFAR-10 fit into memory, so
here the uint8 images of a data set are one tensor, on the GPU where it fits, and the loader asks for a whole batch at
once. benchmarks/data_path.py measures the difference. ImageNet's files are read by common/jpegs.py.
"""

import itertools
import signal
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from common import failures, files, jpegs, processes

MNIST_MEAN_STD = (0.1307,), (0.3081,)  # of the training images in 0..1, per channel
CIFAR10_MEAN_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
IMAGENET_MEAN_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ImageTensor(Dataset):
    """uint8 `images` [N, channels, height, width] and int64 `labels` [N], fetched a whole batch at once.

    `length` makes a larger dataset of them: it begins again with the first whenever it has come to the last.
    """

    def __init__(self, images, labels, length=None):
        if images.dtype != torch.uint8:
            raise TypeError(f"images are uint8, as normalising them divides by 255, and not {images.dtype}")
        self.images, self.labels, self.length = images, labels, length or len(labels)

    def __len__(self):
        return self.length

    def __getitems__(self, places):
        """What DataLoader calls, where it is there, instead of __getitem__ once per index; see EpochSampler."""
        indices = torch.tensor(places).remainder_(len(self)).remainder_(len(self.labels)).to(self.labels.device)
        return self.images.index_select(0, indices), self.labels.index_select(0, indices)


class RandomCropFlip(ImageTensor):
    """Each image cropped at random out of itself padded with zeros, and mirrored or not, drawn anew for each sample.

    The draws are a function of seed, epoch and index: the same on any number of processes and after a resume.
    """

    def __init__(self, images, labels, seed, padding=4):
        self.labels, self.length, self.seed, self.padding = labels, len(labels), seed, padding
        padded = F.pad(images, (padding,) * 4)
        both = torch.stack((padded, padded.flip(-1)))  # [mirrored, N, channels, height, width]
        self.strides = both.stride()
        # One view that holds every window of the image size, wherever in memory it starts: a crop is then a row of it,
        # and index_select copies a batch of rows in half the time that advanced indexing takes for the pixels.
        size, stride = images.shape[1:], both.stride()[2:]
        last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        self.windows = both.view(-1).as_strided((both.numel() - last, *size), (1, *stride))
        self.epoch = None

    def _draw(self, epoch):
        """Draw the crop and the mirroring of every image for this epoch."""
        self.epoch = epoch
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        count = len(self.labels)
        mirrored = torch.randint(2, (count,), generator=generator)
        top, left = torch.randint(2 * self.padding + 1, (2, count), generator=generator)
        to_image, to_next, _, to_row, to_column = self.strides
        start = mirrored * to_image + torch.arange(count) * to_next + top * to_row + left * to_column
        self.start = start.to(self.labels.device)

    def __getitems__(self, places):
        epoch = places[0] // len(self)
        if epoch != self.epoch:
            self._draw(epoch)
        indices = torch.tensor(places).remainder_(len(self)).to(self.labels.device)
        return self.windows.index_select(0, self.start[indices]), self.labels.index_select(0, indices)


class EpochSampler(DistributedSampler):
    """A DistributedSampler that gives places in the run: epoch * N + index, in a dataset of N samples.

    A loader worker, which lives through all epochs, learns from it what to draw for a sample. The next pass leaves out
    the first `start` of this rank's samples: a run that goes on within an epoch comes to its place, and reads nothing
    twice.
    """

    start = 0

    def __iter__(self):
        start, self.start = self.start, 0
        first = self.epoch * len(self.dataset)
        return (first + index for index in itertools.islice(super().__iter__(), start, None))


@dataclass
class DataObject:
    """A dataset, the sampler that picks this process's share of it, and the loader that makes batches of the share.

    The loader gives uint8 images and labels, and bool [batch] where it is left to the device to mirror some. Iterating
    gives the batches on `device`: float32 images [batch, channels, height, width], normalised, and int64 labels
    [batch]. Set the epoch on the sampler first; the augmentation follows it.
    """

    dataset: Dataset
    sampler: EpochSampler | range
    loader: DataLoader
    device: torch.device
    mean_std: tuple
    classes: int
    memory_format: torch.memory_format

    def __post_init__(self):
        if not isinstance(self.sampler, EpochSampler | range):
            raise TypeError(f"a {type(self.sampler).__name__} repeats samples in validation, and no run resumes within "
                            "an epoch with it: take EpochSampler for training, range(rank, N, world_size) to validate")

    def __len__(self):
        return len(self.loader)

    @property
    def epoch(self):
        """The epoch that the sampler of training data is set to; None for validation, which has one order."""
        return getattr(self.sampler, "epoch", None)

    def from_batch(self, number):
        """An iterator over the batches of this epoch without its first `number`."""
        if number:
            self.sampler.start = number * self.loader.batch_size
        return iter(self)

    def __iter__(self):
        mean, std = (torch.tensor(values, device=self.device).view(1, -1, 1, 1) for values in self.mean_std)
        scale, shift = 1 / (255 * std), -mean / std
        for batch in self.loader:
            images, labels, *mirrored = (tensor.to(self.device, non_blocking=True) for tensor in batch)
            for which in mirrored:
                images = torch.where(which.view(-1, 1, 1, 1), images.flip(-1), images)
            images = images.to(torch.float32, memory_format=self.memory_format)
            yield images.mul_(scale).add_(shift), labels


def mnist(args, device, rank=0, world_size=1):
    """MNIST [1, 28, 28]: a DataObject for training (60,000 images) and one for validation (10,000).

    Raises SystemExit(2), with one line, where the files are missing or broken. Source: Y. LeCun, C. Cortes, C. Burges.
    """
    train, val = (ImageTensor(*_place(split, args, device)) for split in _read(args, channels=1, size=28))
    return objects(train, val, MNIST_MEAN_STD, args, device, rank, world_size)


def cifar10(args, device, rank=0, world_size=1):
    """CIFAR-10 [3, 32, 32]: a DataObject for training (50,000 images, cropped and mirrored) and one for validation.

    Raises SystemExit(2), with one line, where the files are missing or broken. Source: A. Krizhevsky, 2009.
    """
    train, val = (_place(split, args, device) for split in _read(args, channels=3, size=32))
    train, val = RandomCropFlip(*train, seed=args.seed), ImageTensor(*val)
    return objects(train, val, CIFAR10_MEAN_STD, args, device, rank, world_size)


def imagenet(args, device, rank=0, world_size=1):
    """A tree of images [3, size, size], as ImageNet's is: a DataObject for training and one for validation.

    Training images are cropped at random, resized and mirrored, those for validation resized and cropped in the middle
    (see common/jpegs.py). --synthetic takes 256 generated images in turn, which stay on the device: it measures the
    model. Raises SystemExit(2), with one line, where the tree is not one. Source: O. Russakovsky et al., 2015.
    """
    if args.synthetic:
        lengths = args.synthetic, max(1, args.synthetic // 5)
        made = (synthetic(min(256, length), 3, args.image_size, args.seed, k) for k, length in enumerate(lengths))
        train, val = (ImageTensor(*_place(split, args, device), n) for split, n in zip(made, lengths, strict=True))
        classes = 1000  # of which ten come up
    else:
        trees = files.image_tree(args.data_dir)
        train = jpegs.TrainTree(trees[0], args.image_size, args.seed, args.loader)
        val, classes = jpegs.ValTree(trees[1], args.image_size), len(trees[0].classes)
    return objects(train, val, IMAGENET_MEAN_STD, args, device, rank, world_size, classes)


def objects(train, val, mean_std, args, device, rank, world_size, classes=10):
    """A DataObject for training and one for validation, of two datasets that give uint8 images.

    A dataset has `__getitems__(places)`, which returns the images and labels of a batch; the index of a sample is
    `place % len(self)`, see EpochSampler. `mean_std` is of images in 0..1, a number per channel each.
    """
    if len(train) < args.batch_size * world_size:
        failures.fail(f"{len(train)} training images do not fill one batch of {args.batch_size} on each of "
                      f"{world_size} processes: take a smaller --batch-size")
    # Both drop the incomplete tail: N processes with batch B then take the very steps of one process with batch N*B.
    shuffled = EpochSampler(train, world_size, rank, seed=args.seed, drop_last=True)
    # Every image once, on one rank: DistributedSampler would repeat some where the ranks do not divide their number.
    share = range(rank, len(val), world_size)
    memory_format = torch.channels_last if args.channels_last else torch.contiguous_format

    def data_object(dataset, sampler, batch_size, drop_last):
        on_device = getattr(getattr(dataset, "labels", None), "is_cuda", False)
        # Its own generator: else each epoch draws a number from the global one, and a resumed run differs.
        loader = DataLoader(dataset, batch_size, sampler=sampler, drop_last=drop_last, num_workers=args.workers,
                            collate_fn=as_it_is, generator=torch.Generator(), worker_init_fn=_in_worker,
                            persistent_workers=args.workers > 0,
                            pin_memory=device.type == "cuda" and not on_device)
        if args.workers:
            _start_workers(loader)
        return DataObject(dataset, sampler, loader, device, mean_std, classes, memory_format)

    return (data_object(train, shuffled, args.batch_size, drop_last=True),
            data_object(val, share, args.test_batch_size, drop_last=False))


def as_it_is(batch):
    """For a DataLoader's collate_fn: the dataset has made a batch already."""
    return batch


def _start_workers(loader):
    """Fork the persistent workers of a loader now, by a pass over nothing.

    CPython 3.11 deadlocks in a fork while another thread makes or drops its Python state, as those of Gloo, autograd
    and TensorBoard do: at each start of an epoch it met about one fork in 400 on two busy cores. Now they are idle.
    """
    own, loader.batch_sampler.sampler = loader.batch_sampler.sampler, ()
    iter(loader)
    loader.batch_sampler.sampler = own


def _in_worker(_):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the training process, and that one ends its workers
    processes.end_with_parent()
    sys.excepthook = lambda *_: None  # called by the thread that hands batches over, when who asked for one has ended


def _place(tensors, args, device):
    """The images and labels on the device if they, padded and mirrored, take less than half of its free memory."""
    if device.type == "cuda" and args.workers == 0 and 8 * tensors[0].nbytes < torch.cuda.mem_get_info(device)[0]:
        return [tensor.to(device) for tensor in tensors]
    return tensors


def synthetic(count, channels, size, seed, split, classes=10):
    """Generated images that can be learned: uint8 [count, channels, size, size] and labels int64 [count].

    Each class is a smooth random pattern, the same in every split and on every rank; an image is its class's pattern
    under noise twice as strong.
    """
    patterns = torch.randn(classes, channels, 7, 7, generator=torch.Generator().manual_seed(seed))
    patterns = F.interpolate(patterns, size=(size, size), mode="bilinear")
    own = torch.Generator().manual_seed(seed * 1_000_003 + split)
    labels = torch.randint(classes, (count,), generator=own)
    noise = torch.randn(count, channels, size, size, generator=own)
    return (128 + 25 * (patterns[labels] + 2 * noise)).clamp_(0, 255).to(torch.uint8), labels


def _read(args, channels, size):
    """((train images, labels), (val images, labels)) of args.dataset, downloaded if they are not there."""
    if args.synthetic:
        return (synthetic(args.synthetic, channels, size, args.seed, split=0),
                synthetic(max(1, args.synthetic // 5), channels, size, args.seed, split=1))
    return files.read(args)
