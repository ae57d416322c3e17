"""The benchmarks of ImageNet's loaders, and of folders beside archives."""

import re

from launch import need, run
from recipes import ROOT

from benchmarks import jpeg_tree


def test_benchmark_of_the_loaders(tmp_path):
    try:
        from nvidia import nvimgcodec  # noqa: F401 - whether it is there
    except ImportError:
        need(False, "pip install nvidia-nvimgcodec-cu13[all]")
    jpeg_tree.make(tmp_path / "tree", images=20)
    command = f"python {ROOT}/benchmarks/jpeg_loader.py --data-dir tree --repeats 1"
    lines = run(command, cwd=tmp_path).splitlines()
    assert [line.partition("  ")[0] for line in lines[1:]] == [
        "usual pipeline",
        "--loader pillow",
        "limit of pillow: decode the crop",
        "--loader nvimgcodec",
        "limit of nvimgcodec: decode the crop",
    ]
    assert all(
        re.search(r" \d+ images/s per core, \d+\.\d\d times the usual", line) for line in lines[1:]
    )


def test_benchmark_of_archives(tmp_path):
    """It makes the files, packs them, and times both."""
    command = f"python {ROOT}/benchmarks/packed_images.py many --make 5000 --repeats 1"
    shown = run(command, cwd=tmp_path)
    starts = re.findall(r"^(.*?) +\d+\.\d\d s to the first batch$", shown, re.MULTILINE)
    assert starts == [
        "torchvision's ImageFolder",
        "folders",
        "tar, which makes its index",
        "tar with an index",
    ]
    assert re.search(
        r"^index: \d+ MB per million images, -?\d+ MiB in 8 processes", shown, re.MULTILINE
    )
    assert re.findall(r"^(\w+) +\d+ images/s, ", shown, re.MULTILINE) == ["folders", "tar"]
