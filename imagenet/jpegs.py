"""ImageNet, or your own images: cropping and decoding to uint8, and the loaders.

The usual pipeline resizes with Pillow and returns normalised float32. Here torch resizes the uint8
pixels with the same antialiased bilinear filter, and a batch stays uint8, a quarter of the bytes,
until it is on the device.
"""

import functools
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from torchvision.transforms import RandomResizedCrop

import archives  # beside this file
from common import flags
from common.data import EpochSampler, Seeded, TensorLoader
from common.errors import InputError
from common.metadata import Metadata
from common.process.workers import data_loader
from images import data, folders
from images.decode import BadImage, decoded, open_image

# uint8 images [batch, 3, size, size] as floats; the mean and deviation of the training images.
normalise = data.Normalise(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def add_flags(parser):
    """Add the flags of the images."""
    data.add_flags(parser, "folder with train/ and val/, or archives")
    add = parser.add_argument
    add("--image-size", type=flags.image_size, default=224, help="height and width in pixels")
    add = parser.add_run_group()
    add("--loader", choices=LOADERS, default="pillow", help="nvimgcodec decodes only the crop")
    add(
        "-j",
        "--workers",
        type=flags.non_negative_int,
        help="loader workers per process; by default one per core that it has",
    )


def load(folder: str, synthetic: int | None, seed: int, size: int, decoder: str):
    """ImageNet, or your own images in the same layout: uint8 [3, size, size] and a label.

    Reads folders, or archives (archives.find). Returns a Dataset for training and one for
    validation, whose `classes` are the class names. With `synthetic`, it repeats 256 generated
    images to that length, to measure the model alone. Raises InputError for another layout.
    Source: O. Russakovsky et al., 2015.
    """
    if synthetic:
        made = data.generate(min(256, synthetic), channels=3, size=size, seed=seed)
        lengths = (synthetic, max(1, synthetic // 5))
        return tuple(Repeated(*each) for each in zip(made, lengths, strict=True))
    train, val = find_files(folder)
    return TrainImages(train, size, decoder), ValImages(val, size)


def find_files(folder):
    """The training and validation images, from folders if there are any, else from archives.

    Raises InputError, which names the path.
    """
    try:
        if Path(folder, "train").is_dir() or Path(folder, "val").is_dir():
            return folders.find(folder)
        found = archives.find(folder)
    # The folder may not be accessible.
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}") from error
    if found is None:
        raise InputError(
            f"{folder}/train is missing: --data-dir needs a folder with train/<class>/*.jpg and "
            "val/<class>/*.jpg, or with ImageNet's archives as they are "
            "(https://image-net.org/download); or use --synthetic"
        )
    return found


def metadata(train_set) -> Metadata:
    """The class names and normalisation, to save with a model trained on this."""
    return Metadata(classes=train_set.classes, mean=normalise.mean, std=normalise.std)


def origin(train_set, val_set) -> list[str]:
    """Lines for the log: where the images are, and which files there are ignored."""
    if isinstance(train_set, Repeated):
        return [f"{len(train_set):,} generated images, of which {len(train_set.images)} differ"]
    return folders.origin(train_set.files, val_set.files)


def loader(dataset, sampler, batch_size: int, workers: int, device: torch.device):
    """A loader for a dataset from load(); in training each epoch draws new crops."""
    if isinstance(dataset, Repeated):
        return RepeatedLoader(dataset.images, sampler, batch_size, device)
    if isinstance(sampler, EpochSampler):
        dataset = Seeded(dataset, sampler)
    return data_loader(dataset, sampler, batch_size, workers, pin_memory=device.type != "cpu")


class Repeated(Dataset):
    """The images of a TensorDataset, repeated to `length`."""

    def __init__(self, images, length):
        # Only ten of them occur.
        self.classes = [str(number) for number in range(1000)]
        self.images = images
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.images[index % len(self.images)]


class RepeatedLoader(TensorLoader):
    """A TensorLoader whose dataset repeats."""

    def __iter__(self):
        images, labels = self.tensors
        indices = torch.tensor(list(self.sampler), dtype=torch.int64) % len(labels)
        if len(indices) == 0:
            return
        for batch in indices.to(labels.device).split(self.batch_size):
            yield [images.index_select(0, batch), labels.index_select(0, batch)]


class Images(Dataset):
    """Images of a Folder or an Archive, and their labels."""

    def __init__(self, files, size):
        self.files = files
        self.classes = files.classes
        self.size = size

    def fingerprint(self):
        """A checksum of the names of all images and classes."""
        return self.files.fingerprint()

    def __len__(self):
        return len(self.files)

    def prefetch(self, indices):
        """Start reading the images of a batch ahead of time."""
        self.files.prefetch(indices)

    def __getitems__(self, indices):
        """The samples of a batch."""
        self.prefetch(indices)
        return [self[index] for index in indices]

    def decode(self, index, crop, box_of):
        """`crop` of an image file, and its label; raises InputError, which names the file."""
        image = decoded(self.files, index, functools.partial(crop, box_of=box_of))
        return image, int(self.files.labels[index])


class TrainImages(Images):
    """Training images, cropped at random as torchvision's RandomResizedCrop(size), and mirrored.

    `loader` is in LOADERS.
    """

    def __init__(self, files, size, loader):
        super().__init__(files, size)
        self.crop = LOADERS[loader]()

    def __getitem__(self, index):
        """uint8 [3, size, size] and its label."""
        image, label = self.decode(index, self.crop, random_box)
        image = resize(image, self.size, self.size)
        return image.flip(-1) if torch.rand(1).item() < 0.5 else image, label


class ValImages(Images):
    """Validation images, with torchvision's Resize(256 / 224 * size) and CenterCrop(size)."""

    def __getitem__(self, index):
        """uint8 [3, size, size] and its label."""
        image, label = self.decode(index, pillow, whole)
        short, sides = int(self.size * 256 / 224), image.shape[-2:]
        height, width = (
            short if side == min(sides) else int(short * side / min(sides)) for side in sides
        )
        top, left = round((height - self.size) / 2), round((width - self.size) / 2)
        image = resize(image, height, width)[:, top : top + self.size, left : left + self.size]
        return image.contiguous(), label


def whole(height, width):
    """The box (top, left, height, width) of all pixels."""
    return 0, 0, height, width


def random_box(height, width):
    """A random crop (top, left, height, width): 8 to 100% of the area, aspect 3:4 to 4:3."""
    image = torch.empty(3, height, width, device="meta")
    return RandomResizedCrop.get_params(image, scale=(0.08, 1), ratio=(3 / 4, 4 / 3))


def resize(image, height, width):
    """Resize uint8 [3, h, w] to [3, height, width], bilinear and antialiased.

    The result is within two grey levels of Pillow's.
    """
    batch = image.unsqueeze(0)
    return F.interpolate(batch, size=(height, width), mode="bilinear", antialias=True)[0]


def pillow(content, box_of):
    """Crop the image in the bytes of a file to box_of(height, width): uint8 [3, height, width].

    Pillow decodes the whole image. Raises BadImage.
    """
    image = open_image(content)
    top, left, height, width = box_of(image.height, image.width)
    return torch.from_numpy(np.array(image.crop((left, top, left + width, top + height)))).permute(
        2, 0, 1
    )


def nvimgcodec():
    """Return a function like `pillow` that uses NVIDIA's nvImageCodec.

    libjpeg-turbo then decodes only the crop.
    """
    from nvidia import nvimgcodec as codec  # pip install "nvidia-nvimgcodec-cu13[all]"

    @functools.cache
    def decoder():
        """Created in the worker process: it has a thread, which would not survive a fork."""
        return codec.Decoder(
            device_id=codec.NVIMGCODEC_DEVICE_CPU_ONLY,
            max_num_cpu_threads=1,
            backends=[codec.Backend(codec.CPU_ONLY)],
        )

    params = codec.DecodeParams(apply_exif_orientation=False)  # like Pillow

    def crop(content, box_of):
        if not content.startswith(b"\xff\xd8") or b"\xff\xd9" not in content[-64:]:
            # Pillow also reads PNG (ImageNet has one), and notices a truncated file.
            return pillow(content, box_of)
        try:
            stream = codec.CodeStream(content)
            top, left, height, width = box_of(stream.height, stream.width)
            region = codec.Region(top, left, top + height, left + width)
            pixels = decoder().decode(stream.get_sub_code_stream(region=region), params=params)
            return torch.from_numpy(np.asarray(pixels)).permute(2, 0, 1)
        # TypeError: decode() returns None if it fails.
        except (RuntimeError, TypeError) as error:
            raise BadImage("cannot be decoded: fetch it again, or leave it out") from error

    return crop


LOADERS = {"pillow": lambda: pillow, "nvimgcodec": nvimgcodec}
