"""CIFAR-10: its files, its augmentation, and ResNet-18 for images of 32x32."""

import io
import pickle
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from common.data import ImageTensor
from common.datasets import checked, download, synthetic
from common.models import MODELS as SMALL

FILES = [f"cifar-10-batches-py/{name}" for name in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch")]
MEAN_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the training images in 0..1, per channel


def load(args) -> tuple[ImageTensor, ImageTensor]:
    """CIFAR-10 [3, 32, 32] as two ImageTensors: training (50,000 images, cropped and mirrored) and validation (10,000).

    Fails if the files are missing or damaged. Source: A. Krizhevsky, 2009.
    """
    train, val = synthetic(args, 3, 32, MEAN_STD) if args.synthetic else _read(Path(args.data_dir))
    return RandomCropFlip(train.images, train.labels, MEAN_STD, args.seed), val


def _read(folder):
    from torchvision.datasets import CIFAR10  # here, as generated images do not need it
    from torchvision.datasets.utils import download_and_extract_archive

    download(folder, FILES, lambda to: download_and_extract_archive(CIFAR10.url, to, md5=CIFAR10.tgz_md5))

    def read(names):
        batches = [_ArraysOnly(io.BytesIO((folder / name).read_bytes()), encoding="latin1").load() for name in names]
        images = torch.cat([torch.from_numpy(batch["data"]) for batch in batches])
        return images.view(-1, 3, 32, 32), torch.tensor([label for batch in batches for label in batch["labels"]])

    return (checked(folder / names[0], (3, 32, 32), MEAN_STD, lambda names=names: read(names))
            for names in (FILES[:5], FILES[5:]))


class _ArraysOnly(pickle.Unpickler):
    """A pickle can call any function; CIFAR-10's batches need only those that rebuild an array."""

    def find_class(self, module, name):
        if (module.replace("._core.", ".core."), name) in {
            ("numpy.core.multiarray", "_reconstruct"), ("numpy.core.numeric", "_frombuffer"),
            ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode"),
        }:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it calls {module}.{name}, which no CIFAR-10 batch needs")


class RandomCropFlip(ImageTensor):
    """Each image padded with zeros, cropped at random, and mirrored at random.

    The crops are a function of seed, epoch and index: the same on any number of processes, and after a resume.
    """

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, mean_std: tuple, seed: int, padding: int = 4):
        super().__init__(images, labels, mean_std)
        self.seed, self.padding = seed, padding

    def to(self, device):
        super().to(device)
        padded = F.pad(self.images, (self.padding,) * 4)
        both = torch.stack((padded, padded.flip(-1)))  # [mirrored, N, channels, height, width]
        # A view with one row for each window of the image size, at every offset in memory. A crop is one row, and
        # index_select copies a batch of rows in half the time that advanced indexing needs for the same pixels.
        size, self.strides = self.images.shape[1:], both.stride()
        last = sum((n - 1) * step for n, step in zip(size, self.strides[2:], strict=True))
        self.windows = both.view(-1).as_strided((both.numel() - last, *size), (1, *self.strides[2:]))

    def batches(self, indices, batch_size, epoch):
        generator, count = torch.Generator().manual_seed(hash((self.seed, epoch, 1))), len(self)
        mirrored = torch.randint(2, (count,), generator=generator)
        top, left = torch.randint(2 * self.padding + 1, (2, count), generator=generator)
        to_image, to_next, _, to_row, to_column = self.strides
        start = mirrored * to_image + torch.arange(count) * to_next + top * to_row + left * to_column
        start = start.to(self.labels.device)
        for batch in indices.to(self.labels.device).split(batch_size):
            yield self.windows.index_select(0, start[batch]), self.labels.index_select(0, batch)


def resnet18(channels: int, size: int, classes: int = 10) -> nn.Module:
    """torchvision's ResNet-18 with the stem for small images (He et al. 2015, section 4.2): 3x3, no max-pooling."""
    from torchvision.models import resnet18  # here, as the other models do not need it

    model = resnet18(num_classes=classes)
    model.conv1 = nn.Conv2d(channels, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


MODELS = {"resnet18": resnet18, **SMALL}
