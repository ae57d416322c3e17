"""MNIST, generated images, and the download of a data set's files."""

import contextlib
import io
import os
import socket
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from filelock import FileLock

from common.data import ImageTensor
from common.processes import fail

MNIST_FILES = [f"MNIST/raw/{of}-{kind}-ubyte" for of in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
MNIST_MEAN_STD = (0.1307,), (0.3081,)  # of the training images in 0..1


def mnist(args) -> list[ImageTensor]:
    """MNIST [1, 28, 28] (LeCun, Cortes, Burges): ImageTensors for training (60,000 images) and validation (10,000)."""
    if args.synthetic:
        return synthetic(args, 1, 28, MNIST_MEAN_STD)
    from torchvision import datasets  # here, as generated images do not need it
    folder = Path(args.data_dir)
    download(folder, MNIST_FILES, lambda to: datasets.MNIST(to, download=True))
    return [checked(folder / name, (1, 28, 28), MNIST_MEAN_STD, lambda train=train: (
        (read := datasets.MNIST(folder, train)).data.unsqueeze(1), read.targets))
        for train, name in ((True, MNIST_FILES[0]), (False, MNIST_FILES[2]))]


def synthetic(args, channels: int, size: int, mean_std: tuple) -> list[ImageTensor]:
    """ImageTensors of generated images: each class is a smooth random pattern, under noise twice as strong."""
    patterns = torch.randn(10, channels, 7, 7, generator=torch.Generator().manual_seed(args.seed))
    patterns, sets = F.interpolate(patterns, size=(size, size), mode="bilinear"), []
    for count in (args.synthetic, max(1, args.synthetic // 5)):
        generator = torch.Generator().manual_seed(hash((args.seed, len(sets))))
        labels = torch.randint(10, (count,), generator=generator)
        noise = torch.randn(count, channels, size, size, generator=generator)
        images = (128 + 25 * (patterns[labels] + 2 * noise)).clamp_(0, 255).to(torch.uint8)
        sets.append(ImageTensor(images, labels, mean_std))
    return sets


def download(folder: Path, files: list[str], fetch) -> None:
    """Let `fetch(to)` download `files` to a folder, unless they are there; one process does, the others wait for it."""
    def missing():
        return [name for name in files if not (folder / name).exists()]

    if not missing():
        return
    socket.setdefaulttimeout(30)  # seconds without a byte; the default is to wait forever
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".download.lock"), tempfile.TemporaryDirectory(dir=folder, prefix=".downloading-") as to:
            if missing():
                with contextlib.redirect_stdout(io.StringIO()):
                    fetch(to)
            for name in missing():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(Path(to, name), folder / name)
    except (OSError, RuntimeError, EOFError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]  # the last mirror's
        fail(f"{folder / (missing() or files)[0]} is missing and the download failed ({reason}): copy the files "
             "there, or train on generated images with --synthetic")


def checked(path: str | Path, shape: tuple, mean_std: tuple, read) -> ImageTensor:
    """An ImageTensor of the (images, labels) that `read()` returns; fails if the files (`path`, ...) are damaged."""
    try:
        images, labels = read()
        if len(images) != len(labels) or images.shape[1:] != shape or images.dtype != torch.uint8:
            raise ValueError(f"{list(images.shape)} images of {images.dtype} for {len(labels)} labels")
        if not 0 <= labels.min() <= labels.max() < 10:
            raise ValueError(f"labels in {labels.min()}..{labels.max()}")
        return ImageTensor(images, labels, mean_std)
    except Exception as error:  # a damaged file can raise anything
        return fail(f"{path}, or a file beside it, is damaged ({type(error).__name__}: {error}): delete them to "
                    "download them again, or train with --synthetic")
