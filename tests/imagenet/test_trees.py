"""Folders of images: which files count, what is refused, and runs that read them."""

import os
import re
import shutil
import signal

import numpy as np
import pytest
from forked import ForkedJob, compute
from launch import Job, as_nobody, free_port, refused_here, strategies
from PIL import Image
from recipes import ROOT
from torchvision.datasets import ImageFolder

from common.errors import InputError
from imagenet import folders

SINGLE = f"python {ROOT}/imagenet/single.py"


@pytest.fixture
def tree(tmp_path):
    """Two classes of four small images, for training and validation; return the folder."""
    random = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            folder = tmp_path / "tree" / split / label
            folder.mkdir(parents=True)
            for number in range(4):
                pixels = random.integers(0, 256, (40, 40, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "tree"


def test_hidden_folders_are_no_classes_and_no_images(tree):
    shown = tree / "train" / "cat"
    for hidden in (shown / ".ipynb_checkpoints", tree / "train" / ".thumbnails"):
        hidden.mkdir()
        shutil.copy(shown / "0.png", hidden)
    train, val = folders.find(tree)
    assert len(train) == len(val) == 8
    assert train.classes == ["cat", "dog"]


def test_a_tree_within_a_hidden_folder(tree):
    moved = tree.rename(tree.parent / ".data")
    train, _ = folders.find(moved)
    assert len(train) == 8


def test_a_link_that_leads_back(tmp_path):
    """timm 334, fastai 2270: the images of a class would count forty times."""
    for split in ("train", "val"):
        folder = tmp_path / "tree" / split / "cat"
        folder.mkdir(parents=True)
        (folder / "1.png").touch()
    (tmp_path / "tree" / "train" / "cat" / "again").symlink_to(".")
    with pytest.raises(InputError, match="train/cat/again: Too many levels of symbolic links"):
        folders.find(tmp_path / "tree")


def test_the_order_of_images_is_that_of_torchvision(tree):
    for name in ("b/9.png", "b/10.png", "a/1.PNG", "b.png"):
        (tree / "train" / "dog" / name).parent.mkdir(exist_ok=True)
        shutil.copy(tree / "train" / "dog" / "0.png", tree / "train" / "dog" / name)
    found, _ = folders.find(tree)
    usual = ImageFolder(tree / "train")
    assert [os.fsdecode(path) for path in found.paths] == [path for path, _ in usual.samples]
    assert found.labels.tolist() == usual.targets


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


def flat(tree):
    for path in list((tree / "val").glob("*/*")):
        os.replace(path, tree / "val" / f"{path.parent.name}-{path.name}")
    for path in (tree / "val").glob("class?"):
        path.rmdir()


def without(name):
    def spoil(tree):
        shutil.rmtree(tree / name)

    return spoil


def no_class(tree):
    for path in (tree / "val").glob("class?"):
        shutil.rmtree(path)


def empty_class(tree):
    for path in (tree / "train" / "class0").iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (flat, ["val", "valprep.sh"]),
        (without("val/class3"), ["val/class3", "train/class3"]),
        (without("train/class3"), ["train/class3", "val/class3"]),
        (without("val"), ["val", "--data-dir", "--synthetic"]),
        (no_class, ["val"]),
        (empty_class, ["train", "class0"]),
    ],
    ids=["flat", "a class of val", "a class of train", "val", "all classes", "an empty class"],
)
def test_wrong_tree(spoil, says, tmp_path):
    for folder in ("train", "val"):
        for number in range(4):
            path = tmp_path / "tree" / folder / f"class{number}" / "0.JPEG"
            path.parent.mkdir(parents=True)
            path.touch()
    spoil(tmp_path / "tree")
    line = refused_here("imagenet/single.py --data-dir tree --arch lenet -b 4", tmp_path)
    for part in (f"tree/{says[0]}", *says[1:]):
        assert part in line


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_an_image_that_is_gone_ends_the_run_with_one_line(loader_workers, tree, tmp_path):
    path = tree / "train" / "dog" / "1.png"
    path.unlink()
    path.symlink_to("nowhere.png")
    flags = "--arch lenet --image-size 32 -b 4 --epochs 1 --device cpu --dry-run"
    command = f"python {ROOT}/imagenet/single.py --data-dir {tree} {flags} -j {loader_workers}"
    output = compute(f"{command} -b 8", tmp_path, status=2)
    last = output.splitlines()[-1]
    assert last == f"single.py: {path}: No such file or directory"
    assert "Traceback" not in output


def test_machines_with_different_images(tree, tmp_path):
    """One of them lacks a file: their batches would not be parts of one."""
    for machine in ("first", "second"):
        shutil.copytree(tree, tmp_path / machine / "tree")
    (tmp_path / "second" / "tree" / "train" / "cat" / "1.png").rename(
        tmp_path / "second" / "tree" / "train" / "cat" / "other.png"
    )
    flags = "--data-dir tree --arch lenet --image-size 32 -b 2 -j 0 --device cpu --log-dir log"
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    jobs = [
        ForkedJob(
            f"python {ROOT}/imagenet/ddp_spawn.py {flags} -n 2 -g 1 -nr {number}",
            cwd=tmp_path / machine,
            **where,
        )
        for number, machine in enumerate(("first", "second"))
    ]
    assert [job.finish() for job in jobs] == [2, 2]
    first = jobs[0].output()
    assert first.startswith("ddp_spawn.py: the data set is not the same on all ranks")
    assert len(first.splitlines()) == 1
    assert not (tmp_path / "first" / "log").exists()


@pytest.mark.parametrize("strategy", ["single", "ddp_launch"])
def test_ctrl_c_with_workers(strategy, tree, tmp_path):
    command = {"single": SINGLE, **strategies(2, ROOT / "imagenet")}[strategy]
    flags = "--data-dir tree --arch lenet -b 4 --image-size 32 -j 2 --epochs 100000 --log-dir log"
    job = Job(f"exec {command} {flags}", cwd=tmp_path)
    job.wait_for("epoch 1/")
    job.signal(signal.SIGINT)
    assert job.finish() != 0
    of_a_rank = re.findall(r'File "[^"]*/(?:imagenet|common)/', job.output())
    assert not of_a_rank, "no rank prints a traceback"
    assert "leaked" not in job.output()
