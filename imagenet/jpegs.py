"""ImageNet, or your own images in folders: cropping and decoding to uint8, and the loaders.

The usual pipeline resizes with Pillow and returns normalised float32. Here torch resizes the uint8
pixels with the same antialiased bilinear filter, and a batch stays uint8, a quarter of the bytes,
until it is on the device. benchmarks/jpeg_loader.py measures the difference.
"""

import errno
import functools
import os
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import is_image_file
from torchvision.transforms import RandomResizedCrop

from common import devices, flags
from common.data import EpochSampler, Seeded, TensorLoader
from common.errors import InputError
from common.workers import data_loader
from images import data

# uint8 images [batch, 3, size, size] as floats; the mean and deviation of the training images.
normalise = data.Normalise(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def add_flags(parser):
    """Add the flags of reading images."""
    add = parser.add_argument_group("images").add_argument
    cores = len(devices.own_cores()) // max(1, torch.accelerator.device_count())
    add("-j", "--workers", type=flags.non_negative_int, default=max(1, cores), help="of the loader")
    add("--loader", choices=LOADERS, default="pillow", help="nvimgcodec decodes only the crop")
    add("--image-size", type=flags.image_size, default=224, help="height and width in pixels")


def load(folder: str, synthetic: int | None, seed: int, size: int, decoder: str):
    """ImageNet, or your own images in the same layout: uint8 [3, size, size] and a label.

    Returns a Dataset for training and one for validation, whose `classes` is the number of
    classes. With `synthetic`, 256 generated images are repeated to that length, to measure the
    model alone. Raises InputError if the folders have another layout.
    Source: O. Russakovsky et al., 2015.
    """
    if synthetic:
        made = data.generate(min(256, synthetic), channels=3, size=size, seed=seed)
        lengths = (synthetic, max(1, synthetic // 5))
        return tuple(Repeated(*each) for each in zip(made, lengths, strict=True))
    train, val = image_tree(folder)
    return TrainTree(train, size, decoder), ValTree(val, size)


def loader(dataset, sampler, batch_size: int, workers: int, device: torch.device):
    """The batches of a dataset that `load` returned; in training each epoch crops anew."""
    if isinstance(dataset, Repeated):
        return RepeatedLoader(dataset.images, sampler, batch_size, device)
    if isinstance(sampler, EpochSampler):
        dataset = Seeded(dataset, sampler)
    return data_loader(dataset, sampler, batch_size, workers, pin_memory=device.type != "cpu")


class Repeated(Dataset):
    """The images of a TensorDataset, repeated to `length`."""

    classes = 1000  # of which ten occur

    def __init__(self, images, length):
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


class Tree(Dataset):
    """The images of an ImageFolder. The paths are one NumPy array, which loader workers share.

    A list of 1.3 million str would be copied in each worker, as reading an object changes its
    reference count.
    """

    def __init__(self, tree, size):
        self.paths = np.array([os.fsencode(path) for path, _ in tree.samples])
        self.labels = np.array(tree.targets)
        self.classes = len(tree.classes)
        self.size = size
        self.root = tree.root

    def fingerprint(self):
        """A checksum of the names of all images, and of their classes, which are in the names."""
        start = len(os.fsencode(self.root))
        return zlib.crc32(b"\n".join(path[start:] for path in self.paths.tolist()))

    def __len__(self):
        return len(self.labels)

    def path(self, index):
        return os.fsdecode(self.paths[index])


class TrainTree(Tree):
    """Training images, cropped at random as torchvision's RandomResizedCrop(size), and mirrored.

    `loader` is in LOADERS.
    """

    def __init__(self, tree, size, loader):
        super().__init__(tree, size)
        self.crop = LOADERS[loader]()

    def __getitem__(self, index):
        """uint8 [3, size, size] and its label."""
        image = resize(self.crop(self.path(index), random_box), self.size, self.size)
        return image.flip(-1) if torch.rand(1).item() < 0.5 else image, int(self.labels[index])


class ValTree(Tree):
    """Validation images, with torchvision's Resize(256 / 224 * size) and CenterCrop(size)."""

    def __getitem__(self, index):
        """uint8 [3, size, size] and its label."""
        image = pillow(self.path(index), lambda height, width: (0, 0, height, width))
        short, sides = int(self.size * 256 / 224), image.shape[-2:]
        height, width = (
            short if side == min(sides) else int(short * side / min(sides)) for side in sides
        )
        top, left = round((height - self.size) / 2), round((width - self.size) / 2)
        image = resize(image, height, width)[:, top : top + self.size, left : left + self.size]
        return image.contiguous(), int(self.labels[index])


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


def open_image(path):
    """Return the PIL image of a file, in RGB; raises InputError."""
    try:
        with Image.open(path) as image:
            image.load()
    except Image.DecompressionBombError as error:
        raise InputError(f"{path} has too many pixels: {error}") from error
    except (OSError, SyntaxError, ValueError) as error:
        if isinstance(error, OSError) and error.strerror:
            # The file system says so, and the image may be good.
            raise InputError(f"{path}: {error.strerror}") from error
        raise InputError(
            f"{path} cannot be decoded ({error}): delete it, or fetch it again"
        ) from error
    if image.mode.startswith("I;16"):
        # convert() would cut off all but the darkest 256 of 65,536 grey levels.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise InputError(
            f"{path} has pixels of 32 bits (mode {image.mode}), whose range is not known: "
            "convert it to 8 or 16 bits"
        )
    # convert() always copies.
    return image if image.mode == "RGB" else image.convert("RGB")


def pillow(path, box_of):
    """Crop the image in the file `path` to box_of(height, width), as uint8 [3, height, width].

    Pillow decodes the whole image. Raises InputError.
    """
    image = open_image(path)
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

    def crop(path, box_of):
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from error
        if not content.startswith(b"\xff\xd8") or b"\xff\xd9" not in content[-64:]:
            # It also reads PNG (ImageNet has one), and notices a truncated file.
            return pillow(path, box_of)
        try:
            stream = codec.CodeStream(content)
            top, left, height, width = box_of(stream.height, stream.width)
            region = codec.Region(top, left, top + height, left + width)
            pixels = decoder().decode(stream.get_sub_code_stream(region=region), params=params)
            return torch.from_numpy(np.asarray(pixels)).permute(2, 0, 1)
        # decode() returns None for what it cannot decode.
        except (RuntimeError, TypeError) as error:
            raise InputError(f"{path} cannot be decoded: delete it, or fetch it again") from error

    return crop


LOADERS = {"pillow": lambda: pillow, "nvimgcodec": nvimgcodec}


class VisibleFolder(ImageFolder):
    """An ImageFolder without hidden folders, such as .ipynb_checkpoints.

    Raises OSError for a folder that cannot be listed, whose images ImageFolder leaves out.
    """

    def find_classes(self, directory):
        """The visible folders in `directory`, and the numbers of them."""
        classes, _ = super().find_classes(directory)
        shown = [name for name in classes if not name.startswith(".")]
        return shown, {name: number for number, name in enumerate(shown)}

    @staticmethod
    def make_dataset(directory, class_to_idx, **_):
        """[(path, number of its class)], in ImageFolder's order."""
        samples = []
        for name, number in class_to_idx.items():
            paths = images_below(os.path.join(directory, name))
            if not paths:
                raise FileNotFoundError(f"Found no images of the class {name}")
            samples += [(path, number) for path in paths]
        return samples


def images_below(folder):
    """The paths of the image files in `folder`, and in its visible folders; raises OSError."""

    def stop(error):
        raise error

    walked = []
    seen = set()
    for path, folders, names in os.walk(folder, followlinks=True, onerror=stop):
        real = os.path.realpath(path)
        if real in seen:
            # A link leads back: its images would count up to 40 times.
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        seen.add(real)
        folders[:] = [name for name in folders if not name.startswith(".")]
        walked.append((path, names))
    return [
        os.path.join(path, name)
        for path, names in sorted(walked)
        for name in sorted(names)
        if is_image_file(name)
    ]


def image_tree(folder):
    """Return two torchvision ImageFolders: `folder`/train and `folder`/val, with <class>/*.JPEG.

    Raises InputError, and names the path, if a class is empty or missing in one of them.
    """
    trees = []
    for path in (Path(folder, "train"), Path(folder, "val")):
        try:
            trees.append(VisibleFolder(path))
        except OSError as error:
            raise InputError(why_no_tree(path, error)) from error
    if only := set(trees[0].classes) ^ set(trees[1].classes):
        one = min(only)
        here, there = ("train", "val") if one in trees[0].classes else ("val", "train")
        raise InputError(
            f"{Path(folder, there, one)} is missing, but {Path(folder, here, one)} exists: "
            f"the labels would differ ({len(only)} such classes)"
        )
    return trees


def why_no_tree(path, error):
    """What is wrong with the folder `path` of a tree, and what to do."""
    if isinstance(error, FileNotFoundError | NotADirectoryError) and not path.is_dir():
        return (
            f"{path} is missing: --data-dir needs a folder with train/<class>/*.JPEG and "
            "val/<class>/*.JPEG (ImageNet: https://image-net.org/download); or use --synthetic"
        )
    if error.strerror:
        return f"{error.filename}: {error.strerror}"
    if any(path.glob("*.JPEG")):
        return (
            f"{path} has all images in one folder, as in the archive: sort them by class, with "
            "https://raw.githubusercontent.com/soumith/imagenetloader.torch/master/valprep.sh"
        )
    return f"{path}: {error}: it needs a folder of images for each class"
