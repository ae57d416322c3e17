"""Folders of images: which files count, in which order, and what is refused."""

import os
import shutil

import numpy as np
import pytest
from launch import as_nobody
from torchvision.datasets import ImageFolder
from trees import make_tree

from common.errors import InputError
from images import folders

pytestmark = pytest.mark.check


@pytest.fixture
def tree(tmp_path):
    return make_tree(tmp_path / "tree")


def test_images_and_labels(tree):
    found, _ = folders.find(tree)
    usual = ImageFolder(tree / "train")
    assert found.classes == usual.classes
    for (image, label), (other, its_label) in zip(found, usual, strict=True):
        assert (np.asarray(image) == np.asarray(other)).all()
        assert label == its_label


def test_the_order_of_images_is_that_of_torchvision(tree):
    for name in ("b/9.png", "b/10.png", "a/1.PNG", "a-b/1.png", "a/c/1.png", "b.png"):
        (tree / "train" / "dog" / name).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(tree / "train" / "dog" / "0.png", tree / "train" / "dog" / name)
    found, _ = folders.find(tree)
    usual = ImageFolder(tree / "train")
    assert [os.fsdecode(path) for path in found.paths] == [path for path, _ in usual.samples]
    assert found.labels.tolist() == usual.targets


def test_hidden_folders_are_no_classes_and_no_images(tree):
    shown = tree / "train" / "cat"
    for hidden in (shown / ".ipynb_checkpoints", tree / "train" / ".thumbnails"):
        hidden.mkdir()
        shutil.copy(shown / "0.png", hidden)
    train, val = folders.find(tree)
    assert len(train) == len(val) == 8
    assert train.classes == ["cat", "dog"]


def test_hidden_files_are_no_images(tree):
    """macOS writes ._0.png beside 0.png, on disks of other systems and into archives."""
    (tree / "train" / "cat" / "._0.png").write_bytes(b"Mac OS X")
    (tree / "train" / ".DS_Store").touch()
    train, _ = folders.find(tree)
    assert len(train) == 8
    assert train.left_out == ""


def test_a_tree_within_a_hidden_folder(tree):
    moved = tree.rename(tree.parent / ".data")
    train, _ = folders.find(moved)
    assert len(train) == 8


def test_files_with_other_endings_are_counted(tree):
    """Pillow reads more than what ImageFolder takes for images."""
    for name in ("cat/a.avif", "dog/more/b.AVIF", "dog/c.jp2", "dog/README", "labels.csv"):
        (tree / "train" / name).parent.mkdir(exist_ok=True)
        (tree / "train" / name).touch()
    train, val = folders.find(tree)
    assert train.left_out == "2 .avif, 1 without ending, 1 .jp2, 1 .csv (such as 'cat/a.avif')"
    assert folders.origin(train, val) == [
        f"8 images in {tree}/train and 8 images in {tree}/val",
        f"left out of {tree}/train: {train.left_out}; images are <class>/*.jpg, *.jpeg, *.png, "
        "*.ppm, *.bmp, *.pgm, *.tif, *.tiff, *.webp",
    ]


@pytest.mark.parametrize(
    "links",
    [{"again": "."}, {"up": ".."}, {"top": "/"}, {"a": "../dog", "../dog/b": "../cat"}],
    ids=["itself", "its parent", "the root", "by way of another"],
)
def test_a_link_that_leads_back(links, tree):
    """timm 334, fastai 2270: the images of a class would count forty times."""
    for name, target in links.items():
        (tree / "train" / "cat" / name).symlink_to(target)
    with pytest.raises(InputError, match=r"train/cat/.*: Too many levels of symbolic links"):
        folders.find(tree)


def test_two_links_to_one_folder(tree, tmp_path):
    """They lead nowhere back: as in ImageFolder, its images count twice."""
    (tmp_path / "pool").mkdir()
    shutil.copy(tree / "train" / "dog" / "0.png", tmp_path / "pool")
    for name in ("cat/one", "cat/two", "dog/one"):
        (tree / "train" / name).symlink_to(tmp_path / "pool")
    train, _ = folders.find(tree)
    usual = ImageFolder(tree / "train")
    assert [os.fsdecode(path) for path in train.paths] == [path for path, _ in usual.samples]


@pytest.mark.parametrize("below", ["images", "."])
def test_one_class(below, tree):
    """A folder too many, as in train/images/cat: each answer would be right."""
    for split in ("train", "val"):
        if below == ".":
            shutil.rmtree(tree / split / "dog")
        else:
            (tree / split).rename(tree / "moved")
            (tree / split).mkdir()
            (tree / "moved").rename(tree / split / below)
    name = "cat" if below == "." else below
    with pytest.raises(InputError, match=f"train/{name} is the only class"):
        folders.find(tree)


def test_a_class_without_images(tree):
    for path in (tree / "val" / "dog").iterdir():
        path.rename(path.with_suffix(".avif"))
    says = r"val/dog has no images, but 4 .avif \(such as 'dog/0.avif'\): images are <class>/\*.jpg"
    with pytest.raises(InputError, match=says):
        folders.find(tree)


def test_a_large_tree_is_two_arrays(tree):
    """Each worker would copy a Python object, as reading it writes its reference count."""
    found, _ = folders.find(tree)
    assert isinstance(found.paths, np.ndarray) and found.paths.dtype.kind == "S"
    assert isinstance(found.labels, np.ndarray)


@pytest.mark.parametrize("hidden", ["train/cat", "train/cat/more", "val"])
def test_a_folder_that_may_not_be_listed(hidden, tree):
    """Left out, its images would be missing on one machine, perhaps."""
    (tree / "train" / "cat" / "more").mkdir()
    shutil.copy(tree / "train" / "cat" / "0.png", tree / "train" / "cat" / "more")
    assert as_nobody(tree, folders.find, ".") == ""
    (tree / hidden).chmod(0)
    says = as_nobody(tree, folders.find, ".")
    assert says == f"InputError: {hidden}: Permission denied"


def test_an_image_that_may_not_be_read(tree):
    (tree / "train" / "cat" / "0.png").chmod(0)
    says = as_nobody(tree, lambda: folders.find(".")[0].read(0))
    assert says == "InputError: train/cat/0.png: Permission denied"


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("/dev/zero"), os.mkfifo])
def test_an_image_without_an_end(make, tree):
    path = tree / "train" / "cat" / "0.png"
    path.unlink()
    make(path)
    train, _ = folders.find(tree)
    with pytest.raises(InputError, match=r"0.png: it is not a regular file"):
        train[0]
