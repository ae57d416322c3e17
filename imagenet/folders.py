"""Images in folders: train/<class>/*.JPEG and val/<class>/*.JPEG."""

import errno
import os
import zlib
from pathlib import Path

import numpy as np
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import is_image_file

from common.errors import InputError


class Folder:
    """The images in `path`/<class>/, in torchvision's order.

    `labels` is an int64 array, `classes` a list of names. The paths are one NumPy array, which
    loader workers share. A list of 1.3 million str would be copied in each worker, as reading an
    object changes its reference count. Raises OSError.
    """

    def __init__(self, path: Path):
        tree = VisibleFolder(path)
        self.path = path
        self.paths = np.array([os.fsencode(path) for path, _ in tree.samples])
        self.labels = np.array(tree.targets)
        self.classes = tree.classes

    def __len__(self):
        return len(self.labels)

    def fingerprint(self) -> int:
        """A checksum of the names of all images, and of their classes, which are in the names."""
        start = len(os.fsencode(self.path))
        return zlib.crc32(b"\n".join(path[start:] for path in self.paths.tolist()))

    def where(self, index: int) -> str:
        """The file of an image."""
        return os.fsdecode(self.paths[index])

    def prefetch(self, indices: list[int]) -> None:
        """Nothing: a file has to be opened first."""

    def read(self, index: int) -> bytes:
        """The bytes of an image file; raises InputError."""
        path = self.where(index)
        try:
            with open(path, "rb", buffering=0) as file:
                return file.read()
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from error


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


def find(folder: str) -> tuple[Folder, Folder]:
    """The images in `folder`/train and `folder`/val. Raises InputError, and names the path."""
    found = []
    for path in (Path(folder, "train"), Path(folder, "val")):
        try:
            found.append(Folder(path))
        except OSError as error:
            raise InputError(why_not(path, error)) from error
    return tuple(found)


def why_not(path, error):
    """What is wrong with the folder `path` of a tree, and what to do."""
    if isinstance(error, FileNotFoundError | NotADirectoryError) and not path.is_dir():
        return (
            f"{path} is missing: --data-dir needs a folder with train/<class>/*.JPEG and "
            "val/<class>/*.JPEG, or with ImageNet's archives as they are "
            "(https://image-net.org/download); or use --synthetic"
        )
    if error.strerror:
        return f"{error.filename}: {error.strerror}"
    if any(path.glob("*.JPEG")):
        return (
            f"{path} has all images in one folder, as in the archive: leave the archive as it is, "
            "or sort them by class, with "
            "https://raw.githubusercontent.com/soumith/imagenetloader.torch/master/valprep.sh"
        )
    return f"{path}: {error}: it needs a folder of images for each class"
