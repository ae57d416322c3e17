"""Images in memory: a TensorDataset of uint8 [N, channels, height, width], int64 labels [N]."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from common import flags
from common.errors import InputError
from common.files import read_regular, retry
from common.ranks import World

# How the log prints the figures of a classifier.
FORMS = {"accuracy": "acc {:.2%}", "top5": "top-5 {:.2%}"}


def add_flags(parser: flags.Parser, files: str) -> None:
    """Add the flags for a data set of images; `files` is the help text of --data-dir."""
    parser.set_defaults(forms=FORMS)
    parser.add_argument(
        "--synthetic",
        nargs="?",
        type=flags.positive_int,
        const=10_000,
        metavar="IMAGES",
        help="train on generated images, by default 10000",
    )
    add = parser.add_run_group()
    add("--data-dir", default="data", help=files)
    add("--channels-last", action="store_true", help="keep images and weights in NHWC order")


class Normalise:
    """Normalises uint8 images [batch, channels, height, width] to floats, on their device.

    `mean` and `std` are of the training images, scaled to 0..1, per channel.
    """

    def __init__(self, mean: tuple, std: tuple):
        self.mean = mean
        self.std = std
        self.constants = {}

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        dtype = torch.get_default_dtype()
        key = (images.device, dtype)
        if key not in self.constants:
            mean = torch.tensor(self.mean, dtype=dtype).view(-1, 1, 1)
            std = torch.tensor(self.std, dtype=dtype).view(-1, 1, 1)
            self.constants[key] = (
                (-mean / std).to(images.device),
                (1 / (255 * std)).to(images.device),
            )
        shift, scale = self.constants[key]
        # torch.addcmul takes four times as long on a CPU, as the operands have different types.
        return (images * scale).add_(shift)


def generate(
    count: int, channels: int, size: int, seed: int
) -> tuple[TensorDataset, TensorDataset]:
    """Generate `count` training images and a fifth as many for validation: noisy class patterns."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(10, channels, 7, 7, generator=generator)
    patterns = F.interpolate(patterns, size=(size, size), mode="bilinear")
    sets = []
    for length in (count, max(1, count // 5)):
        labels = torch.randint(10, (length,), generator=generator)
        noise = torch.randn(length, channels, size, size, generator=generator)
        images = 128 + 25 * (patterns[labels] + 2 * noise)
        sets.append(TensorDataset(images.clamp_(0, 255).to(torch.uint8), labels))
    return tuple(sets)


def say_what_differs(world: World | None, of: str, root: Path, files: dict[str, str]) -> None:
    """Let rank 0 warn if some of the `files` in `root`, {name: MD5}, differ from the data set `of`.

    For example, a test set may have been copied over a part of the training set. Raises InputError.
    """
    if world is None or world.rank != 0:
        return
    with ThreadPoolExecutor(len(files)) as pool:
        found = dict(zip(files, pool.map(md5_of, [root / name for name in files]), strict=True))
    others = []
    for name in files:
        if found[name] == files[name]:
            continue
        twins = [other for other in files if other != name and found[other] == found[name]]
        equals = f" (the same as {Path(twins[0]).name})" if twins else ""
        others.append(f"{root / name}{equals}")
    if others:
        world.say(f"warning: by their MD5s, these are not the files of {of}: {', '.join(others)}")


def md5_of(path: Path) -> str:
    try:
        return hashlib.md5(read_regular(path), usedforsecurity=False).hexdigest()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error


def checked(path, shape: tuple, read) -> TensorDataset:
    """A TensorDataset of the (images, labels) that `read()` returns; `path` is the first file.

    Raises InputError if they are damaged: wrong types or shapes, or labels other than 0..9.
    """
    try:
        images, labels = retry(read)
        if len(images) != len(labels) or images.shape[1:] != shape or images.dtype != torch.uint8:
            raise ValueError(f"{list(images.shape)} images of {images.dtype}, {len(labels)} labels")
        if not 0 <= labels.min() <= labels.max() < 10:
            raise ValueError(f"labels in {labels.min()}..{labels.max()}")
        return TensorDataset(images, labels)
    except OSError as error:
        raise InputError(f"{error.filename or path}: {error.strerror or error}") from error
    # A damaged file can raise any exception.
    except Exception as error:
        raise InputError(
            f"{path}, or a file beside it, is damaged ({type(error).__name__}: {error}): "
            "delete them to download them again, or train with --synthetic"
        ) from error
