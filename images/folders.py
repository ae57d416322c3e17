"""Images in folders: train/<class>/*.jpg and val/<class>/*.jpg."""

import errno
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS, is_image_file

from common.errors import InputError
from common.files import read_regular
from images.decode import decoded, open_image

# Which files are images. Hidden ones are not, such as ._1.jpg, which macOS writes beside 1.jpg.
IMAGES = f"<class>/*{', *'.join(IMG_EXTENSIONS)}"


class Folder(Dataset):
    """The images in `path`/<class>/, in torchvision's order: a PIL image in RGB, and its label.

    `labels` is an int64 array, `classes` a list of names, and `left_out` a text on the files whose
    names are not those of images. Raises InputError.

    The paths are one NumPy array, which loader workers share. A list of 1.3 million str would be
    copied into each worker, as reading an object changes its reference count.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self.classes, others = visible(path)
            above = tuple(identities_from(path))
            images = []
            labels = []
            for number, name in enumerate(self.classes):
                of_class, others_of_class = files_of_class(path, name, above)
                images += of_class
                labels += len(of_class) * [number]
                others += others_of_class
        except OSError as error:
            raise InputError(why_not(path, error)) from error
        if not images:
            raise InputError(no_folders(path, others))
        self.paths = np.array([os.fsencode(image) for image in images])
        self.labels = np.array(labels)
        self.left_out = in_words(others)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return decoded(self, index, open_image), int(self.labels[index])

    def fingerprint(self) -> int:
        """A checksum of the paths of all images, which contain the names of their classes."""
        start = len(os.fsencode(self.path))
        return zlib.crc32(b"\n".join(path[start:] for path in self.paths.tolist()))

    def where(self, index: int) -> str:
        """The path of an image."""
        return os.fsdecode(self.paths[index])

    def prefetch(self, indices: list[int]) -> None:
        """Do nothing: prefetching needs open files, as in an Archive."""

    def read(self, index: int) -> bytes:
        """The bytes of an image file; raises InputError."""
        path = self.where(index)
        try:
            return read_regular(path)
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from error


def visible(folder) -> tuple[list[str], list[str]]:
    """Return (folders, files): the names in `folder` that are not hidden. Raises OSError."""
    folders = []
    files = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                folders.append(entry.name)
            else:
                files.append(entry.name)
    return sorted(folders), sorted(files)


def is_hidden(name: str) -> bool:
    """Whether a file, or a folder in its path, is hidden, such as .ipynb_checkpoints/1.jpg."""
    return any(part.startswith(".") and part not in (".", "..") for part in name.split("/"))


def files_of_class(path, name, above):
    """Return (paths of the images of a class, paths below `path` of its other files).

    `above` has the identities of `path` and of the folders above it.
    Raises OSError, and InputError if there are no images.
    """
    images = []
    others = []
    start = len(os.path.join(path, ""))
    for folder, files in sorted(walk(os.path.join(path, name), above)):
        for file in files:
            if is_image_file(file):
                images.append(f"{folder}/{file}")
            else:
                others.append(f"{folder[start:]}/{file}")
    if not images:
        raise InputError(no_images(f"{path}/{name}", others))
    return images, others


def identity(folder) -> tuple[int, int]:
    """(device, inode) of a folder, the same through any link to it; raises OSError."""
    stat = os.stat(folder)
    return stat.st_dev, stat.st_ino


def identities_from(path: Path) -> Iterator[tuple[int, int]]:
    """The identities of the folder `path` and of those above it: a link to one is a loop."""
    for folder in (path, *path.resolve().parents):
        # A folder that we cannot access cannot be the target of a link that we follow.
        with suppress(PermissionError):
            yield identity(folder)


def walk(folder: str, above: tuple) -> Iterator[tuple[str, list[str]]]:
    """Yield `folder`, and each visible folder below it, with the names of its visible files.

    Follows links. `above` has the identities of the folders above. Raises OSError.
    """
    own = identity(folder)
    if own in above:
        # A loop of links: its images would count up to 40 times.
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), folder)
    folders, files = visible(folder)
    yield folder, files
    for name in folders:
        yield from walk(os.path.join(folder, name), (*above, own))


def find(folder: str) -> tuple[Folder, Folder]:
    """The images in `folder`/train and `folder`/val. Raises InputError, which names the path."""
    train = Folder(Path(folder, "train"))
    val = Folder(Path(folder, "val"))
    check_classes(train, val)
    return train, val


def check_classes(train, val) -> None:
    """Raise InputError unless two Folders or Archives have the same classes, at least two."""
    if only := set(train.classes) ^ set(val.classes):
        one = min(only)
        here, there = (train, val) if one in train.classes else (val, train)
        raise InputError(
            f"{there.path}/{one} is missing, but {here.path}/{one} exists: "
            f"the labels would differ ({len(only)} such classes)"
        )
    if len(train.classes) < 2:
        raise InputError(
            f"{train.path}/{train.classes[0]} is the only class, so that each answer is right: "
            f"the folders of the classes have to be directly in {train.path}"
        )


def origin(train, val) -> list[str]:
    """Lines for the log: where the images of two Folders or Archives are, and what is ignored."""
    both = (train, val)
    lines = [" and ".join(f"{len(each):,} images in {each.path}" for each in both)]
    for each in both:
        if each.left_out:
            lines.append(f"left out of {each.path}: {each.left_out}; images are {IMAGES}")
    return lines


def in_words(names: list[str]) -> str:
    """How many files have which endings, and the first name; "" without files."""
    if not names:
        return ""
    names = sorted(names)
    endings = Counter(os.path.splitext(name)[1].lower() or "without ending" for name in names)
    most = endings.most_common(4)
    counts = [f"{count:,} {ending}" for ending, count in most]
    rest = len(names) - sum(count for _, count in most)
    if rest:
        counts.append(f"{rest:,} others")
    return f"{', '.join(counts)} (such as {names[0]!r})"


def why_not(path, error):
    """What is wrong with a folder of images, and what to do."""
    if isinstance(error, FileNotFoundError | NotADirectoryError) and not path.is_dir():
        return (
            f"{path} is missing: --data-dir needs a folder with train/<class>/*.jpg and "
            "val/<class>/*.jpg"
        )
    return f"{error.filename}: {error.strerror}"


def no_images(path, others: list[str]) -> str:
    """A message for a class, or an archive, in which no file has the name of an image."""
    instead = f", but {in_words(others)}" if others else ""
    return f"{path} has no images{instead}: images are {IMAGES}"


def no_folders(path, names):
    """A message for a folder without classes that has files of these `names`."""
    if any(map(is_image_file, names)):
        return (
            f"{path} has all images in one folder: sort them by class into folders; leave "
            "ImageNet's archive as it is, or sort its images with "
            "https://raw.githubusercontent.com/soumith/imagenetloader.torch/master/valprep.sh"
        )
    return f"{path} has no folders: it needs a folder of images for each class"
