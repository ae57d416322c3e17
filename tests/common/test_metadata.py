"""What gives outputs their meaning: kept in a checkpoint, and the same in a run that goes on."""

import pytest
from forked import compute, refused
from launch import checkpoint
from PIL import Image
from recipes import ROOT, changed_copy

from common.errors import InputError
from common.metadata import Metadata


@pytest.mark.check
@pytest.mark.parametrize(
    ("saved", "says"),
    [
        ({"classes": ["cat", "dog"]}, None),
        ({"classes": ["cat", "dog"], "std": [1.0]}, None),
        ({}, None),
        ({"classes": ["cat", "emu"]}, "of its classes number 1 is 'emu', and in this run 'dog'"),
        ({"classes": ["cat"]}, "it has 1 classes, and this run 2"),
        ({"classes": "cat"}, r"its classes is 'cat', and in this run \['cat', 'dog'\]"),
        ({"mean": [0.4]}, "of its mean number 0 is 0.4, and in this run 0.5"),
    ],
)
def test_differences(saved, says):
    own = Metadata(classes=["cat", "dog"], mean=(0.5,))
    if says is None:
        own.load_state_dict(saved)
    else:
        with pytest.raises(InputError, match=says):
            own.load_state_dict(saved)


def test_the_names_are_in_every_file_of_a_run(tmp_path):
    """In best.pt and in what scripts/export.py writes; --init-from compares them in both.

    libreyolo 61, mmdetection 3908: they were not saved, and those of COCO were shown.
    """
    copy = changed_copy(tmp_path, "cifar10/cifar.py", '"airplane"', '"plane"')
    flags = "--synthetic 256 --model lenet --device cpu"
    compute(f"python {copy}/single.py {flags} --epochs 1 --log-dir run", tmp_path)
    assert checkpoint(tmp_path / "run", "best.pt")["metadata"]["classes"][:2] == [
        "plane",
        "automobile",
    ]
    compute(f"python {ROOT}/scripts/export.py run/best.pt w.safetensors", tmp_path)
    others = "of its classes number 0 is 'plane', and in this run 'airplane'"
    for path in ("run/best.pt", "w.safetensors"):
        again = compute(f"python {copy}/single.py {flags} --dry-run --init-from {path}", tmp_path)
        assert "classes" not in again
        renamed = f"python {ROOT}/cifar10/single.py {flags} --init-from {path} --dry-run"
        assert f"weights from {path}: {others}" in compute(renamed, tmp_path)
    line = refused(
        f"python {ROOT}/cifar10/single.py {flags} --resume run/last.pt --log-dir run", tmp_path
    )
    assert line.endswith(f"--resume run/last.pt does not fit this run: {others}")


@pytest.mark.parametrize("flags", ["--evaluate --resume run/last.pt", "--resume auto"])
def test_a_renamed_class(flags, tmp_path):
    """As many folders as before, in another order: labels would mean other classes."""
    for part in ("train", "val"):
        for number, name in enumerate(("cat", "dog", "emu")):
            folder = tmp_path / "data" / part / name
            folder.mkdir(parents=True)
            for image in range(4):
                Image.new("RGB", (40, 40), 3 * (80 * number,)).save(folder / f"{image}.png")
    command = (
        f"python {ROOT}/imagenet/single.py --data-dir data --model lenet --image-size 32 -b 4 "
        "--device cpu -j 0 --warmup-epochs 0 --log-dir run"
    )
    compute(f"{command} --epochs 1", tmp_path)
    for part in ("train", "val"):
        (tmp_path / "data" / part / "cat").rename(tmp_path / "data" / part / "zcat")
    line = refused(f"{command} {flags} --epochs 2", tmp_path)
    assert line.endswith("of its classes number 0 is 'cat', and in this run 'dog'")
