"""What gives outputs their meaning: kept in a checkpoint, and the same in a run that goes on."""

import pytest
from forked import compute
from launch import checkpoint, refused_here
from recipes import ROOT, changed_copy
from trees import make_tree

from common.errors import InputError
from common.metadata import Metadata


@pytest.mark.check
@pytest.mark.parametrize(
    ("saved", "says"),
    [
        ({"classes": ["cat", "dog"]}, None),
        ({"classes": ["cat", "dog"], "std": [1.0]}, None),
        ({}, None),
        ({"classes": ["cat", "emu"]}, r"its classes\[1\] is 'emu', and in this run 'dog'"),
        ({"classes": ["cat"]}, "it has 1 classes, and this run 2"),
        ({"classes": "cat"}, r"its classes is 'cat', and in this run \['cat', 'dog'\]"),
        ({"mean": [0.4]}, r"its mean\[0\] is 0.4, and in this run 0.5"),
    ],
)
def test_differences(saved, says):
    own = Metadata(classes=["cat", "dog"], mean=(0.5,))
    if says is None:
        own.load_state_dict(saved)
    else:
        with pytest.raises(InputError, match=says):
            own.load_state_dict(saved)


CIFAR10 = "cifar10/single.py --synthetic 256 --model lenet --device cpu"
IMAGENET = (
    "imagenet/single.py --data-dir data --model lenet --image-size 32 -b 4 --device cpu -j 0 "
    "--warmup-epochs 0 --log-dir run"
)


def test_the_names_are_in_every_file_of_a_run(tmp_path):
    """In best.pt and in what scripts/export.py writes; a run with other names says so.

    libreyolo 61, mmdetection 3908: they were not saved, and those of COCO were shown.
    """
    copy = changed_copy(tmp_path, "cifar10/cifar.py", '"airplane"', '"plane"')
    compute(f"python {copy.parent}/{CIFAR10} --epochs 1 --log-dir run", tmp_path)
    names = checkpoint(tmp_path / "run", "best.pt")["metadata"]["classes"]
    assert names[:2] == ["plane", "automobile"]
    compute(f"python {ROOT}/scripts/export.py run/best.pt w.safetensors", tmp_path)
    others = "its classes[0] is 'plane', and in this run 'airplane'"
    begin = f"python {ROOT}/{CIFAR10} --dry-run --init-from w.safetensors"
    assert f"weights from w.safetensors: {others}" in compute(begin, tmp_path)
    line = refused_here(f"{CIFAR10} --resume run/last.pt --log-dir run", tmp_path)
    assert line.endswith(f"--resume run/last.pt does not fit this run: {others}")


def test_a_renamed_class(tmp_path):
    """As many folders as before, in another order: labels would mean other classes."""
    data = make_tree(tmp_path / "data")
    compute(f"python {ROOT}/{IMAGENET} --epochs 1", tmp_path)
    for part in ("train", "val"):
        (data / part / "cat").rename(data / part / "zcat")
    said = compute(f"python {ROOT}/{IMAGENET} --epochs 2 --resume auto", tmp_path, status=2)
    assert said.endswith("its classes[0] is 'cat', and in this run 'dog'\n")
