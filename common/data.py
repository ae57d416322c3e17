"""The data sets as DataObject(dataset, sampler, loader).

The usual pipeline opens, converts and normalises one image at a time in Python. MNIST and CIFAR-10 fit into memory, so
here the uint8 images of a data set are one tensor, on the GPU where it fits, and the loader asks for a whole batch at
once. benchmarks/data_path.py measures the difference.
"""

import contextlib
import io
import itertools
import os
import pickle
import shutil
import signal
import socket
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from filelock import FileLock, Timeout
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from common import failures, processes

MNIST_MEAN_STD = (0.1307,), (0.3081,)  # of the training images in 0..1, per channel
STALLED = 30  # seconds without a byte after which a download is given up
CIFAR10_MEAN_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class ImageTensor(Dataset):
    """uint8 `images` [N, channels, height, width] and int64 `labels` [N], fetched a whole batch at once."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def __getitems__(self, indices):
        """What DataLoader calls, where it is there, instead of __getitem__ once per index."""
        indices = torch.tensor(indices, device=self.labels.device)
        return self.images.index_select(0, indices), self.labels.index_select(0, indices)


class RandomCropFlip(ImageTensor):
    """Each image cropped at random out of itself padded with zeros, and mirrored or not, drawn anew for each sample.

    The draws are a function of seed, epoch and index: the same on any number of processes and after a resume.
    """

    def __init__(self, images, labels, seed, padding=4):
        self.labels, self.seed, self.padding = labels, seed, padding
        padded = F.pad(images, (padding,) * 4)
        both = torch.stack((padded, padded.flip(-1)))  # [mirrored, N, channels, height, width]
        self.strides = both.stride()
        # One view that holds every window of the image size, wherever in memory it starts: a crop is then a row of it,
        # and index_select copies a batch of rows in half the time that advanced indexing takes for the pixels.
        size, stride = images.shape[1:], both.stride()[2:]
        last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        self.windows = both.view(-1).as_strided((both.numel() - last, *size), (1, *stride))
        self.set_epoch(0)

    def set_epoch(self, epoch):
        """Draw the crop and the mirroring of every image for this epoch."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        count = len(self.labels)
        mirrored = torch.randint(2, (count,), generator=generator)
        top, left = torch.randint(2 * self.padding + 1, (2, count), generator=generator)
        to_image, to_next, _, to_row, to_column = self.strides
        start = mirrored * to_image + torch.arange(count) * to_next + top * to_row + left * to_column
        self.start = start.to(self.labels.device)

    def __getitems__(self, indices):
        indices = torch.tensor(indices, device=self.labels.device)
        return self.windows.index_select(0, self.start[indices]), self.labels.index_select(0, indices)


class EpochSampler(DistributedSampler):
    """A DistributedSampler whose next pass leaves out the first `start` of this rank's samples.

    A run that goes on within an epoch so comes to its place by index, and reads nothing twice.
    """

    start = 0

    def __iter__(self):
        start, self.start = self.start, 0
        return itertools.islice(super().__iter__(), start, None)


@dataclass
class DataObject:
    """A dataset, the sampler that picks this process's share of it, and the loader that makes batches of the share.

    Iterating gives the batches on `device`: float32 images [batch, channels, height, width], normalised, and int64
    labels [batch]. Set the epoch on the sampler first; the augmentation follows it.
    """

    dataset: ImageTensor
    sampler: EpochSampler | range
    loader: DataLoader
    device: torch.device
    mean_std: tuple

    def __len__(self):
        return len(self.loader)

    @property
    def epoch(self):
        """The epoch that the sampler of training data is set to; None for validation, which has one order."""
        return getattr(self.sampler, "epoch", None)

    def from_step(self, step):
        """An iterator over the batches of this epoch without its first `step`."""
        if step:
            self.sampler.start = step * self.loader.batch_size
        return iter(self)

    def __iter__(self):
        if isinstance(self.dataset, RandomCropFlip):
            self.dataset.set_epoch(self.sampler.epoch)
        mean, std = (torch.tensor(values, device=self.device).view(1, -1, 1, 1) for values in self.mean_std)
        scale, shift = 1 / (255 * std), -mean / std
        for images, labels in self.loader:
            images, labels = images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
            yield images.float().mul_(scale).add_(shift), labels


def mnist(args, device, rank=0, world_size=1):
    """MNIST [1, 28, 28]: a DataObject for training (60,000 images) and one for validation (10,000).

    Raises SystemExit(2), with one line, where the files are missing or broken. Source: Y. LeCun, C. Cortes, C. Burges.
    """
    train, val = _read(args, channels=1, size=28)
    return _objects(ImageTensor(*_place(train, args, device)), val, MNIST_MEAN_STD, args, device, rank, world_size)


def cifar10(args, device, rank=0, world_size=1):
    """CIFAR-10 [3, 32, 32]: a DataObject for training (50,000 images, cropped and mirrored) and one for validation.

    Raises SystemExit(2), with one line, where the files are missing or broken. Source: A. Krizhevsky, 2009.
    """
    train, val = _read(args, channels=3, size=32)
    train = RandomCropFlip(*_place(train, args, device), seed=args.seed)
    return _objects(train, val, CIFAR10_MEAN_STD, args, device, rank, world_size)


def _objects(train, val, mean_std, args, device, rank, world_size):
    if len(train) < args.batch_size * world_size:
        failures.fail(f"{len(train)} training images do not fill one batch of {args.batch_size} on each of "
                      f"{world_size} processes: take a smaller --batch-size")
    # Both drop the incomplete tail: N processes with batch B then take the very steps of one process with batch N*B.
    shuffled = EpochSampler(train, world_size, rank, seed=args.seed, drop_last=True)
    # Every image once, on one rank: DistributedSampler would repeat some where the ranks do not divide their number.
    share = range(rank, len(val[1]), world_size)

    def data_object(dataset, sampler, batch_size, drop_last):
        # Its own generator: else each epoch draws a number from the global one, and a resumed run differs.
        loader = DataLoader(dataset, batch_size, sampler=sampler, drop_last=drop_last, num_workers=args.workers,
                            collate_fn=_as_it_is, generator=torch.Generator(), worker_init_fn=_in_worker,
                            pin_memory=device.type == "cuda" and dataset.labels.device.type == "cpu")
        return DataObject(dataset, sampler, loader, device, mean_std)

    return (data_object(train, shuffled, args.batch_size, drop_last=True),
            data_object(ImageTensor(*_place(val, args, device)), share, args.test_batch_size, drop_last=False))


def _as_it_is(batch):
    return batch


def _in_worker(_):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the training process, and that one ends its workers
    processes.end_with_parent()


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
    download(args)
    read = {"mnist": _read_mnist, "cifar10": _read_cifar10}[args.dataset]
    try:
        splits = read(Path(args.data_dir), train=True), read(Path(args.data_dir), train=False)
    except (OSError, ValueError) as error:
        failures.fail(f"{error}: delete the file to have it downloaded again, or train with --synthetic")
    return splits


MNIST_FILES = [f"MNIST/raw/{name}-ubyte" for name in
               ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")]
CIFAR10_FILES = [f"cifar-10-batches-py/{name}" for name in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch")]


def download(args):
    """Bring args.dataset to --data-dir, from where torchvision has it, unless all its files are there.

    Call it in one process per machine, and let the others wait; where machines share the folder, a file lock lets the
    first one download for all. A file gets its name when it is whole and has the digest that torchvision knows.
    """
    if args.synthetic:
        return
    folder, files = Path(args.data_dir), {"mnist": MNIST_FILES, "cifar10": CIFAR10_FILES}[args.dataset]
    if not _missing(folder, files):
        return
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    lock = FileLock(folder / ".download.lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(Timeout):
            lock.acquire(timeout=0)
        if not lock.is_locked:
            print(f"waiting for another process, which downloads to {folder}", flush=True)
        with lock:
            for stale in folder.glob(".downloading-*"):  # of a process that was killed: it held the lock
                shutil.rmtree(stale)
            if _missing(folder, files):
                _fetch(args.dataset, folder, files)
        reason = None
    except (OSError, RuntimeError, EOFError, KeyError, tarfile.TarError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]  # the last mirror's
    finally:
        lock.release(force=True)
        with contextlib.suppress(OSError):
            Path(lock.lock_file).unlink()  # who waits for it finds the files there
    if reason:
        for path in new_folders:
            with contextlib.suppress(OSError):
                path.rmdir()
        failures.fail(f"{folder / _missing(folder, files)[0]} is not there and the download failed ({reason}): "
                      "bring the files, or train on generated images with --synthetic")


def _missing(folder, files):
    return [name for name in files if not (folder / name).exists()]


def _fetch(dataset, folder, files):
    """Download to a temporary folder in `folder`, where torchvision compares the digests, and move the files up."""
    from torchvision import datasets  # here: nothing else in this module needs the time that it takes
    from torchvision.datasets.utils import download_url

    socket.setdefaulttimeout(STALLED)  # torchvision sets none, and would wait for ever
    try:
        with (tempfile.TemporaryDirectory(dir=folder, prefix=".downloading-") as temporary,
              contextlib.redirect_stdout(io.StringIO())):
            if dataset == "mnist":
                datasets.MNIST(temporary, download=True)
            else:  # not by torchvision.datasets.CIFAR10, which unpacks and unpickles whatever has the MD5
                download_url(datasets.CIFAR10.url, temporary, "archive", datasets.CIFAR10.tgz_md5)
                _unpack(Path(temporary, "archive"), Path(temporary), files)
            for name in _missing(folder, files):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(Path(temporary, name), folder / name)
    finally:
        socket.setdefaulttimeout(None)


def _unpack(archive, folder, files):
    """Unpack `files` from a tar archive; refuse one with members that no data set has."""
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = Path(member.name).parts
            if not (member.isfile() or member.isdir()) or Path(member.name).is_absolute() or ".." in parts:
                raise tarfile.TarError(f"the archive has a link or a path that leads out of it: {member.name}")
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(tar.extractfile(name).read())


def _read_mnist(folder, train):
    from torchvision.datasets.mnist import read_image_file, read_label_file

    images_path, labels_path = (folder / name for name in (MNIST_FILES[:2] if train else MNIST_FILES[2:]))
    images, labels = _parse(images_path, read_image_file), _parse(labels_path, read_label_file)
    return _checked(images.unsqueeze(1), labels, (1, 28, 28), images_path)


def _read_cifar10(folder, train):
    paths = [folder / name for name in (CIFAR10_FILES[:5] if train else CIFAR10_FILES[5:])]
    images, labels = zip(*(_parse(path, _read_batch) for path in paths), strict=True)
    return _checked(torch.cat(images), torch.cat(labels), (3, 32, 32), paths[0].parent)


def _read_batch(path):
    with open(path, "rb") as file:
        batch = _ArraysOnly(file, encoding="latin1").load()
    return torch.from_numpy(batch["data"]).view(-1, 3, 32, 32), torch.tensor(batch["labels"])


def _parse(path, parse):
    try:
        return parse(str(path))
    except Exception as error:  # a broken file can raise anything
        raise ValueError(f"{path} is broken ({type(error).__name__}: {error})") from error


def _checked(images, labels, shape, path):
    if len(images) != len(labels) or images.shape[1:] != shape or images.dtype != torch.uint8:
        raise ValueError(f"{path} holds {list(images.shape)} images of {images.dtype} for {len(labels)} labels")
    if not 0 <= labels.min() <= labels.max() < 10:
        raise ValueError(f"{path} has a label outside 0..9")
    return images, labels


class _ArraysOnly(pickle.Unpickler):
    """A pickle can run any function that it names; CIFAR-10's batches need none but those that rebuild an array."""

    def find_class(self, module, name):
        if (module.replace("._core.", ".core."), name) in {
            ("numpy.core.multiarray", "_reconstruct"), ("numpy.core.numeric", "_frombuffer"),
            ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode"),
        }:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it wants {module}.{name}, which no CIFAR-10 batch needs")
