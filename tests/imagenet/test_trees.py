"""Folders of images: what is refused, and runs that read them."""

import os
import re
import shutil
import signal

import pytest
from forked import ForkedJob, compute
from launch import Job, as_nobody, free_port, refused_here
from recipes import ROOT
from trees import make_tree

from imagenet import jpegs

SINGLE = f"python {ROOT}/imagenet/single.py"


@pytest.fixture
def tree(tmp_path):
    return make_tree(tmp_path / "tree")


def flat(tree):
    for path in list((tree / "val").glob("*/*")):
        os.replace(path, tree / "val" / f"{path.parent.name}-{path.name}")
    for path in (tree / "val").glob("class?"):
        path.rmdir()


def without(name):
    def spoil(tree):
        shutil.rmtree(tree / name)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (flat, ["val", "valprep.sh"]),
        (without("val/class3"), ["val/class3", "train/class3"]),
        (without("train/class3"), ["train/class3", "val/class3"]),
        (without("val"), ["val is missing", "--data-dir"]),
    ],
    ids=["flat", "a class of val", "a class of train", "val"],
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


def test_no_data(tmp_path):
    line = refused_here("imagenet/single.py --data-dir none --arch lenet -b 4", tmp_path)
    for part in ("none/train is missing", "--data-dir", "--synthetic", "https://image-net.org"):
        assert part in line


def test_a_data_folder_that_may_not_be_entered(tree):
    (tree / "closed").mkdir(mode=0)
    says = as_nobody(tree, jpegs.find_files, "closed")
    assert says == "InputError: closed/train: Permission denied"


def test_an_image_that_is_gone_ends_the_run_with_one_line(tree, tmp_path):
    """A loader worker reads it. Before that, the log names what is left out."""
    path = tree / "train" / "dog" / "1.png"
    path.unlink()
    path.symlink_to("nowhere.png")
    (tree / "val" / "cat" / "more.avif").touch()
    flags = "--arch lenet --image-size 32 -b 8 -j 2 --device cpu --dry-run"
    output = compute(f"{SINGLE} --data-dir {tree} {flags}", tmp_path, status=2)
    assert f"8 images in {tree}/train and 8 images in {tree}/val\n" in output
    assert f"left out of {tree}/val: 1 .avif (such as 'cat/more.avif')" in output
    assert output.splitlines()[-1] == f"single.py: {path}: No such file or directory"
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
    *_, error = jobs[0].output().splitlines()
    assert error.startswith("ddp_spawn.py: the data set is not the same on all ranks")
    assert not (tmp_path / "first" / "log").exists()


def test_ctrl_c_with_workers(tree, tmp_path):
    flags = "--data-dir tree --arch lenet -b 4 --image-size 32 -j 2 --epochs 100000 --log-dir log"
    job = Job(f"exec {SINGLE} {flags}", cwd=tmp_path)
    job.wait_for("epoch 1/")
    job.signal(signal.SIGINT)
    assert job.finish() != 0
    of_a_rank = re.findall(r'File "[^"]*/(?:imagenet|common)/', job.output())
    assert not of_a_rank, "no rank prints a traceback"
    assert "leaked" not in job.output()
