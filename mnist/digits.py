"""MNIST: its files, its normalisation, and the models for it."""

import functools
from pathlib import Path

from torch.utils.data import TensorDataset

from common.metadata import Metadata
from common.ranks import World
from images import data, models
from images.download import download

# The files of MNIST, with their MD5s.
FILES = {
    "MNIST/raw/train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "MNIST/raw/train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "MNIST/raw/t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "MNIST/raw/t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
MODELS = {"convnet": models.ConvNet, "lenet": models.LeNet}
# uint8 images [batch, 1, 28, 28] as floats; the mean and deviation of the training images.
normalise = data.Normalise(mean=(0.1307,), std=(0.3081,))
METADATA = Metadata(
    classes=[str(digit) for digit in range(10)], mean=normalise.mean, std=normalise.std
)


def add_flags(parser):
    """Add the flags for the data set and its models."""
    add = parser.add_argument
    add("-a", "--model", "--arch", choices=MODELS, default="convnet", help="the network")
    data.add_flags(parser, "folder of MNIST, which is downloaded if missing")


def load(
    folder: str, synthetic: int | None, seed: int, world: World | None = None
) -> tuple[TensorDataset, TensorDataset]:
    """MNIST: 60,000 training and 10,000 validation images, uint8 [1, 28, 28], with labels 0..9.

    Downloads it if `folder` lacks it. With `synthetic`, generates that many images. If files differ
    from MNIST's, such as your own images in their place, `world` prints their names.
    Raises InputError if files are damaged or missing. Source: LeCun, Cortes, Burges.
    """
    if synthetic:
        return data.generate(synthetic, channels=1, size=28, seed=seed)
    # Imported only here, as --synthetic does not need it.
    from torchvision.datasets import MNIST

    def read(train):
        dataset = MNIST(folder, train)
        return dataset.data.unsqueeze(1), dataset.targets

    root = Path(folder)
    download(root, list(FILES), lambda to: MNIST(to, download=True))
    train_images, _, val_images, _ = FILES
    train_set = data.checked(root / train_images, (1, 28, 28), functools.partial(read, True))
    val_set = data.checked(root / val_images, (1, 28, 28), functools.partial(read, False))
    data.say_what_differs(world, "MNIST", root, FILES)
    return train_set, val_set


def build(name: str):
    """Build the model for --model."""
    return MODELS[name](channels=1, size=28)
