"""CIFAR-10: its files, its normalisation, its augmentation, and the models for it."""

import functools
import io
import pickle
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from common.data import TensorLoader, seed_of
from common.metadata import Metadata
from common.ranks import World
from images import data, models
from images.download import download

TRAIN_FILES = [f"cifar-10-batches-py/data_batch_{number}" for number in range(1, 6)]
VAL_FILES = ["cifar-10-batches-py/test_batch"]
# uint8 images [batch, 3, 32, 32] as floats; the mean and deviation of the training images.
normalise = data.Normalise(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))
METADATA = Metadata(
    classes=[
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    ],
    mean=normalise.mean,
    std=normalise.std,
)


def add_flags(parser):
    """Add the flags for the data set and its models."""
    add = parser.add_argument
    add("-a", "--model", "--arch", choices=MODELS, default="resnet18", help="the network")
    data.add_flags(parser, "folder of CIFAR-10, which is downloaded if missing")


def load(
    folder: str, synthetic: int | None, seed: int, world: World | None = None
) -> tuple[TensorDataset, TensorDataset]:
    """CIFAR-10: 50,000 training and 10,000 validation images, uint8 [3, 32, 32], with labels 0..9.

    Downloads it if `folder` lacks it. With `synthetic`, generates that many images. If files differ
    from CIFAR-10's, such as your own images in their place, `world` prints their names.
    Raises InputError if files are damaged or missing. Source: A. Krizhevsky, 2009.
    """
    if synthetic:
        return data.generate(synthetic, channels=3, size=32, seed=seed)
    # Imported only here, as --synthetic does not need it.
    from torchvision.datasets import CIFAR10
    from torchvision.datasets.utils import download_and_extract_archive

    def fetch(to):
        download_and_extract_archive(CIFAR10.url, to, md5=CIFAR10.tgz_md5)

    root = Path(folder)
    download(root, TRAIN_FILES + VAL_FILES, fetch)
    train_set, val_set = (
        data.checked(root / files[0], (3, 32, 32), functools.partial(read, root, files))
        for files in (TRAIN_FILES, VAL_FILES)
    )
    md5s = [md5 for _, md5 in CIFAR10.train_list + CIFAR10.test_list]
    md5_of = dict(zip(TRAIN_FILES + VAL_FILES, md5s, strict=True))
    data.say_what_differs(world, "CIFAR-10", root, md5_of)
    return train_set, val_set


def read(root: Path, files: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """The images and labels of these files."""
    images = []
    labels = []
    for name in files:
        content = io.BytesIO((root / name).read_bytes())
        batch = WithoutNumPy(content, encoding="latin1").load()
        _, _, _, columns_first, pixels = batch["data"].state
        if columns_first:
            raise ValueError("the pixels are in Fortran order")
        # In a pickle from Python 2 the pixels are a str.
        if isinstance(pixels, str):
            pixels = pixels.encode("latin1")
        pixels = torch.frombuffer(bytearray(pixels), dtype=torch.uint8)
        images.append(pixels.view(-1, 3, 32, 32))
        labels += [int(label) for label in batch["labels"]]
    return torch.cat(images), torch.tensor(labels)


class Stated:
    """Stands in for an array or its dtype, and keeps the state from the file."""

    def __init__(self, *ignored):
        self.state = None

    def __setstate__(self, state):
        self.state = state

    @classmethod
    def from_buffer(cls, pixels, dtype, shape, order):
        """What pickles of newer NumPys call."""
        array = cls()
        array.state = (1, shape, dtype, order == "F", pixels)
        return array


# What a pickled array calls, and what we call instead.
INSTEAD = {
    "numpy.core.multiarray._reconstruct": Stated,
    "numpy.core.numeric._frombuffer": Stated.from_buffer,
    "numpy.ndarray": Stated,
    "numpy.dtype": Stated,
    "_codecs.encode": lambda text, _: text.encode("latin1"),
}


class WithoutNumPy(pickle.Unpickler):
    """Unpickles untrusted CIFAR-10 batches: allows the calls in INSTEAD only, and creates no array.

    A pickle could call any function, or build an array of pointers. read() sets the dtype.
    """

    def find_class(self, module, name):
        # Newer NumPys use numpy._core.
        called = f"{module}.{name}".replace("._core.", ".core.")
        if called not in INSTEAD:
            raise pickle.UnpicklingError(f"it calls {called}, which no CIFAR-10 batch needs")
        return INSTEAD[called]


class CropFlipLoader(TensorLoader):
    """A TensorLoader of images that are padded with zeros, cropped and mirrored at random.

    The crops depend only on seed, epoch and index: they are the same on any number of processes,
    and after a resume. The sampler is an EpochSampler.
    """

    PADDING = 4

    def __init__(self, dataset, sampler, batch_size, device):
        super().__init__(dataset, sampler, batch_size, device)
        images, labels = self.tensors
        channels, height, width = images.shape[1:]
        padded = F.pad(images, (self.PADDING,) * 4)
        self.to_next, to_channel, self.to_row, to_column = padded.stride()
        # A view with one row for each window of the image size, at every offset in memory. A crop
        # is one row, and index_select copies a batch of rows in half the time that advanced
        # indexing needs for the same pixels.
        last = (channels - 1) * to_channel + (height - 1) * self.to_row + (width - 1) * to_column
        windows = padded.view(-1).as_strided(
            (padded.numel() - last, channels, height, width),
            (1, to_channel, self.to_row, to_column),
        )
        self.tensors = [windows, labels]

    def __iter__(self):
        self.draw()
        return super().__iter__()

    def draw(self):
        """Draw where the crop of each image starts in this epoch, and whether it is mirrored."""
        windows, labels = self.tensors
        count = len(labels)
        generator = torch.Generator()
        generator.manual_seed(seed_of(self.sampler.seed, self.sampler.epoch, 1))
        mirrored = torch.randint(2, (count, 1, 1, 1), generator=generator)
        top, left = torch.randint(2 * self.PADDING + 1, (2, count), generator=generator)
        start = torch.arange(count) * self.to_next + top * self.to_row + left
        self.start = start.to(windows.device)
        self.mirrored = mirrored.bool().to(windows.device)

    def pick(self, indices):
        windows, labels = self.tensors
        crops = windows.index_select(0, self.start[indices])
        images = torch.where(self.mirrored[indices], crops.flip(-1), crops)
        return [images, labels.index_select(0, indices)]


def resnet18(channels: int, size: int, classes: int = 10) -> nn.Module:
    """torchvision's ResNet-18 with the stem for small images: 3x3, no max-pooling.

    Source: He et al. 2015, section 4.2.
    """
    # Imported only here, as the other models do not need it.
    from torchvision.models import resnet18

    model = resnet18(num_classes=classes)
    model.conv1 = nn.Conv2d(channels, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


MODELS = {"resnet18": resnet18, "convnet": models.ConvNet, "lenet": models.LeNet}
# The learning rate of each model for a batch of 128.
LRS = {"resnet18": 0.1, "convnet": 0.02, "lenet": 0.02}


def build(name: str) -> nn.Module:
    """Build the model for --model."""
    return MODELS[name](channels=3, size=32)
