"""scripts/export.py, scripts/install_horovod.sh and scripts/pin.sh."""

import os
import re
from pathlib import Path

import pytest
import torch
from forked import compute, refused
from launch import HOROVOD, need, need_horovod, run
from recipes import ROOT
from safetensors.torch import load_file

EXPORT = f"python {ROOT}/scripts/export.py"


def test_export(tmp_path):
    compute(
        f"python {ROOT}/mnist/single.py --synthetic 640 --epochs 1 --channels-last --log-dir log",
        cwd=tmp_path,
    )
    assert compute(f"{EXPORT} log/best.pt weights.safetensors", cwd=tmp_path) == ""
    weights, model = (
        load_file(tmp_path / "weights.safetensors"),
        torch.load(tmp_path / "log" / "best.pt")["model"],
    )
    assert weights.keys() == model.keys()
    assert all(torch.equal(weights[name], model[name]) for name in model)
    assert "already exists" in refused(f"{EXPORT} log/best.pt weights.safetensors", tmp_path)
    assert "No such file" in refused(f"{EXPORT} log/none.pt other", tmp_path)
    assert "No such file" in refused(f"{EXPORT} log/best.pt none/other", tmp_path)
    damaged = bytearray((tmp_path / "log" / "best.pt").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "log" / "best.pt").write_bytes(damaged)
    assert "damaged" in refused(f"{EXPORT} log/best.pt other", tmp_path)
    assert not (tmp_path / "other").exists()


def test_export_without_safetensors(tmp_path):
    (tmp_path / "safetensors.py").write_text("raise ImportError")
    assert "pip install safetensors" in run(
        f"{EXPORT} a b", tmp_path, status=2, PYTHONPATH=str(tmp_path)
    )


def test_horovod_has_nccl_where_nvcc_is():
    """All tests of Horovod use this build, on the CPU."""
    need_horovod()
    import horovod.torch as hvd

    nvcc = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    need(nvcc.exists(), f"the CUDA toolkit, then again {HOROVOD}")
    assert hvd.nccl_built()


@pytest.mark.parametrize(
    "launcher",
    [
        "torchrun --standalone --nproc-per-node=2 --no-python",
        "horovodrun --gloo -np 2",
        "mpirun --bind-to none -np 2",
    ],
)
def test_pin(launcher, tmp_path):
    """Each of two processes has half of the cores, and a thread for each."""
    if not launcher.startswith("torchrun"):
        need_horovod("gloo" if "gloo" in launcher else "mpi")
    half = len(os.sched_getaffinity(0)) // 2
    need(half > 0, "two cores")
    # In one write: torchrun starts `python -u`, and two ranks' print() could mix.
    (tmp_path / "show.py").write_text(
        "import os; cores = ' '.join(map(str, os.sched_getaffinity(0)))\n"
        "os.write(1, f\"cores {cores} {os.environ['OMP_NUM_THREADS']}\\n\".encode())\n"
    )
    shown = run(f"{launcher} {ROOT}/scripts/pin.sh show.py", tmp_path)
    shares = [list(map(int, numbers.split())) for numbers in re.findall(r"cores ([\d ]+)", shown)]
    assert len(shares) == 2
    assert all(threads == len(own) == half for *own, threads in shares)
    assert len({core for *own, _ in shares for core in own}) == 2 * half, "they share no core"


def test_horovod_from_another_file(tmp_path):
    (tmp_path / "other.tar.gz").write_text("another version")
    shown = run(
        f"{ROOT}/scripts/install_horovod.sh", tmp_path, status=1, HOROVOD_SDIST="other.tar.gz"
    )
    assert "other.tar.gz: FAILED" in shown
