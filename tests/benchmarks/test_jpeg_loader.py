"""The benchmark of ImageNet's loaders."""

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
