"""A tree of JPEG files as uint8 batches: what is cut out of an image, and what decodes it.

The usual pipeline resizes with Pillow, one image at a time, and hands over normalised float32. Here torch resizes the
uint8 pixels with the same antialiased bilinear filter, and a batch is uint8, a quarter of the bytes, until it is on the
device, which mirrors and normalises it. benchmarks/jpeg_loader.py measures the difference.
"""

import contextlib
import functools
import os

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from common import files, flags

NVIMGCODEC = 'pip install "nvidia-nvimgcodec-cu13[all]", or take --loader pillow'


class TrainTree(Dataset):
    """The images of an ImageFolder, under torchvision's RandomResizedCrop(size) and RandomHorizontalFlip.

    What is drawn for a sample is a function of seed, epoch and index: the same on any number of processes and workers,
    with any loader, and after a resume. `loader` is a name in LOADERS: what decodes an image.
    """

    def __init__(self, tree, size, seed, loader):
        self.paths, self.labels = _columns(tree)
        self.size, self.seed, self.crop = size, seed, LOADERS[loader]()

    def __len__(self):
        return len(self.labels)

    def __getitems__(self, places):
        """uint8 [batch, 3, size, size], int64 labels [batch], bool [batch]: which to mirror."""
        indices = torch.tensor(places).remainder_(len(self))
        images = torch.empty(len(places), 3, self.size, self.size, dtype=torch.uint8)
        mirrored = torch.empty(len(places), dtype=torch.bool)
        for k, place in enumerate(places):
            crop, mirrored[k] = self.drawn(place)
            images[k] = resize(crop, self.size, self.size)
        return images, self.labels[indices], mirrored

    def drawn(self, place):
        """What is drawn for a place: a crop, uint8 [3, h, w], and whether to mirror it."""
        with _seeded(hash((self.seed, place))):  # of numbers, so the same in every process
            return self.crop(os.fsdecode(self.paths[place % len(self)]), random_box), torch.rand(1).item() < 0.5


class ValTree(Dataset):
    """The images of an ImageFolder, under torchvision's Resize(256 / 224 * size) and CenterCrop(size)."""

    def __init__(self, tree, size):
        self.paths, self.labels = _columns(tree)
        self.size = size

    def __len__(self):
        return len(self.labels)

    def __getitems__(self, indices):
        """uint8 [batch, 3, size, size] and int64 labels [batch]."""
        images = torch.empty(len(indices), 3, self.size, self.size, dtype=torch.uint8)
        for k, index in enumerate(indices):
            image = pillow(os.fsdecode(self.paths[index]), lambda height, width: (0, 0, height, width))
            short, sides = int(self.size * 256 / 224), image.shape[-2:]
            height, width = (short if side == min(sides) else int(short * side / min(sides)) for side in sides)
            top, left = round((height - self.size) / 2), round((width - self.size) / 2)
            images[k] = resize(image, height, width)[:, top:top + self.size, left:left + self.size]
        return images, self.labels[indices]


def _columns(tree):
    """The paths of an ImageFolder as one array of bytes, and its labels as a tensor.

    Workers share them by fork. Of a list of 1.3 million paths each would get a copy of its own, as reading an object
    writes its reference count.
    """
    return np.array([os.fsencode(path) for path, _ in tree.samples]), torch.tensor(tree.targets)


@contextlib.contextmanager
def _seeded(seed):
    """Let torch's default generator, from which torchvision draws, start with `seed` in the `with` block."""
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(seed % 2**32)
    try:
        yield
    finally:
        generator.set_state(before)


def random_box(height, width):
    """(top, left, height, width) of a crop of an image, drawn by torchvision: 8 to 100% of it, 3:4 to 4:3."""
    from torchvision.transforms import RandomResizedCrop  # here: mnist and cifar10 do without the time that it takes

    return RandomResizedCrop.get_params(torch.empty(3, height, width, device="meta"), (0.08, 1), (3 / 4, 4 / 3))


def resize(image, height, width):
    """uint8 [3, h, w] as uint8 [3, height, width], bilinear and antialiased, as Pillow does up to two grey levels."""
    return F.interpolate(image.unsqueeze(0), size=(height, width), mode="bilinear", antialias=True)[0]


def pillow(path, box_of):
    """The part of an image that `box_of` (its height, its width) names, as uint8 [3, height, width].

    Pillow decodes all of it. Raises files.BrokenImage.
    """
    image = files.open_image(path)
    top, left, height, width = box_of(image.height, image.width)
    return torch.from_numpy(np.array(image.crop((left, top, left + width, top + height)))).permute(2, 0, 1)


def nvimgcodec():
    """A function like `pillow`, by NVIDIA's nvImageCodec: of a JPEG, libjpeg-turbo decodes only the part."""
    codec = flags.require("nvidia.nvimgcodec", "Decoder", NVIMGCODEC)

    @functools.cache
    def decoder():
        """Made in the worker, as it has a thread of its own."""
        return codec.Decoder(device_id=codec.NVIMGCODEC_DEVICE_CPU_ONLY, max_num_cpu_threads=1,
                             backends=[codec.Backend(codec.CPU_ONLY)])

    params = codec.DecodeParams(apply_exif_orientation=False)  # as Pillow

    def crop(path, box_of):
        with open(path, "rb") as file:
            content = file.read()
        if not content.startswith(b"\xff\xd8") or b"\xff\xd9" not in content[-64:]:
            return pillow(path, box_of)  # which reads PNG as well (there is one in ImageNet) and notices a cut file
        try:
            stream = codec.CodeStream(content)
            top, left, height, width = box_of(stream.height, stream.width)
            region = codec.Region(top, left, top + height, left + width)
            pixels = decoder().decode(stream.get_sub_code_stream(region=region), params=params)
        except RuntimeError as error:
            raise files.broken(path, type(error).__name__) from error
        if pixels is None:
            raise files.broken(path, "by nvImageCodec")
        return torch.from_numpy(np.asarray(pixels)).permute(2, 0, 1)

    return crop


LOADERS = {"pillow": lambda: pillow, "nvimgcodec": nvimgcodec}
