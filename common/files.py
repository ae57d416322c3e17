"""The files of the data sets: how they come to this machine, and that they hold what they should."""

import contextlib
import io
import os
import pickle
import shutil
import socket
import tarfile
import tempfile
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from common import failures

STALLED = 30  # seconds without a byte after which a download is given up
MNIST_FILES = [f"MNIST/raw/{name}-ubyte" for name in
               ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")]
CIFAR10_FILES = [f"cifar-10-batches-py/{name}" for name in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch")]


def read(args):
    """((train images, labels), (val images, labels)) of args.dataset, downloaded if they are not there.

    Images are uint8 [N, channels, height, width] and labels int64 [N]. Raises SystemExit(2), with one line, where a
    file is not what it should be.
    """
    download(args)
    read_split = {"mnist": _read_mnist, "cifar10": _read_cifar10}[args.dataset]
    try:
        return read_split(Path(args.data_dir), train=True), read_split(Path(args.data_dir), train=False)
    except (OSError, ValueError) as error:
        failures.fail(f"{error}: delete the file to have it downloaded again, or train with --synthetic")


def download(args):
    """Bring args.dataset to --data-dir, from where torchvision has it, unless all its files are there.

    Call it in one process per machine, and let the others wait; where machines share the folder, a file lock lets the
    first one download for all. A file gets its name when it is whole and has the digest that torchvision knows.
    """
    folder, files = Path(args.data_dir), {"mnist": MNIST_FILES, "cifar10": CIFAR10_FILES}.get(args.dataset)
    if args.synthetic or not files:  # ImageNet's owners give it to those who register
        return
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
            lock.acquire()
        for stale in folder.glob(".downloading-*"):  # of a process that was killed: it held the lock
            shutil.rmtree(stale)
        if _missing(folder, files):
            _fetch(args.dataset, folder, files)
        reason = None
    except (OSError, RuntimeError, EOFError, KeyError, tarfile.TarError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]  # the last mirror's
    finally:
        if lock.is_locked:
            Path(lock.lock_file).unlink(missing_ok=True)  # while it is held: who waits for it then takes a new one
        lock.release(force=True)
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


def image_tree(folder):
    """Two torchvision ImageFolders (PIL images and int labels): `folder`/train/<class>/*.JPEG and `folder`/val/...

    Raises SystemExit(2), with one line that names the path, where a class is empty or is not in both. A file that
    cannot be read ends the run in the same way, once its turn has come.
    """
    from torchvision.datasets import ImageFolder  # here: the other data sets do without the time that it takes

    trees = []
    for path in (Path(folder, "train"), Path(folder, "val")):
        if not path.is_dir():
            failures.fail(f"{path} is not there: --data-dir takes a folder with train/<class>/*.JPEG and "
                          "val/<class>/*.JPEG (ImageNet: https://image-net.org/download); or train with --synthetic")
        try:
            trees.append(ImageFolder(path, loader=open_image))
        except OSError as error:
            if any(path.glob("*.JPEG")):
                failures.fail(f"{path} has its images in one folder, as the archive has them: sort them by class, with "
                              "https://raw.githubusercontent.com/soumith/imagenetloader.torch/master/valprep.sh")
            failures.fail(f"{path}: {str(error).splitlines()[0]}: it takes a folder for each class, "
                          "with the images of that class in it")
    only = set(trees[0].classes) ^ set(trees[1].classes)
    if only:
        one = min(only)
        here, there = ("train", "val") if one in trees[0].classes else ("val", "train")
        failures.fail(f"{Path(folder, there, one)} is not there, and {Path(folder, here, one)} is: the labels of the "
                      f"two would differ ({len(only)} such classes)")
    return trees


def open_image(path):
    """The image of a file as a PIL image in RGB; raises BrokenImage."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            image.load()
        return image if image.mode == "RGB" else image.convert("RGB")  # which would copy
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise broken(path, type(error).__name__) from error


def broken(path, reason):
    """The exception for a file that is in a tree of images and is none."""
    return BrokenImage(f"{path} is not an image that can be read ({reason})")


class BrokenImage(ValueError):
    """A file of an image tree is not an image."""


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
