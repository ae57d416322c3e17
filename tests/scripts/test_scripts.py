"""scripts/export.py, summarize_runs.py, usage.py and install_horovod.sh."""

import json
import os
import re
import signal
import socket
from pathlib import Path

import torch
from forked import compute, refused
from launch import HOROVOD, Job, assert_same, need, need_horovod, run, wait_until
from recipes import ROOT
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from common import checkpoint
from mnist import digits

EXPORT = f"python {ROOT}/scripts/export.py"


def test_export(tmp_path):
    compute(
        f"python {ROOT}/mnist/single.py --synthetic 640 --epochs 1 --channels-last --log-dir log",
        cwd=tmp_path,
    )
    said = compute(f"{EXPORT} log/best.pt weights.safetensors", cwd=tmp_path)
    assert said == "weights.safetensors has the weights of model\n"
    weights, model = (
        load_file(tmp_path / "weights.safetensors"),
        torch.load(tmp_path / "log" / "best.pt")["model"],
    )
    assert weights.keys() == model.keys()
    assert all(torch.equal(weights[name], model[name]) for name in model)
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    (predict,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    (tmp_path / "predict.py").write_text(predict)
    predicted = compute("python predict.py", tmp_path, PYTHONPATH=str(ROOT))
    assert re.fullmatch(r"tensor\(\[\d(, \d){3}\]\)\n", predicted)
    assert "already exists" in refused(f"{EXPORT} log/best.pt weights.safetensors", tmp_path)
    assert "No such file" in refused(f"{EXPORT} log/none.pt other", tmp_path)
    assert "No such file" in refused(f"{EXPORT} log/best.pt none/other", tmp_path)
    damaged = bytearray((tmp_path / "log" / "best.pt").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "log" / "best.pt").write_bytes(damaged)
    assert "damaged" in refused(f"{EXPORT} log/best.pt other", tmp_path)
    assert not (tmp_path / "other").exists()


def test_weights_of_an_average(tmp_path):
    """best.pt was chosen by the EMA, so that is exported, and what others begin with."""
    model = digits.build("lenet")
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1)
    average.update_parameters(model)
    # The second model of a GAN can have the same names, and the same shapes.
    parts = {"model": model, "discriminator": digits.build("lenet"), "ema": average}
    checkpoint.save(tmp_path, {name: part.state_dict() for name, part in parts.items()}, {})
    said = compute(f"{EXPORT} last.pt ema.safetensors", tmp_path)
    assert "has the weights of ema" in said
    said = compute(f"{EXPORT} last.pt raw.safetensors --part model", tmp_path)
    assert "has the weights of model; --part discriminator has weights of the same shapes" in said
    begun = f"python {ROOT}/mnist/single.py --model lenet --synthetic 64 --dry-run --init-from"
    assert "weights from last.pt, of its ema: 10 of 10" in compute(f"{begun} last.pt", tmp_path)
    for name, expected in (("ema", average.module), ("raw", model)):
        assert_same(load_file(tmp_path / f"{name}.safetensors"), expected.state_dict())
    assert "--part critic" in refused(f"{EXPORT} last.pt other --part critic", tmp_path)


NVML = """
NVML_TEMPERATURE_GPU = 0

class NVMLError(Exception):
    pass

class Fields:
    gpu = 50
    used = 2**30

def refuse(handle):
    raise NVMLError

nvmlInit = lambda: None
nvmlDeviceGetCount = lambda: 2
nvmlDeviceGetHandleByIndex = lambda number: number
nvmlDeviceGetUtilizationRates = nvmlDeviceGetMemoryInfo = lambda handle: Fields
nvmlDeviceGetPowerUsage = refuse
nvmlDeviceGetTemperature = lambda handle, sensor: 40 + handle
"""


def test_usage(tmp_path):
    """Of two GPUs that do not tell their power. (test_slurm.py: two nodes, without GPUs.)"""
    (tmp_path / "pynvml.py").write_text(NVML)
    command = f"exec python {ROOT}/scripts/usage.py out --seconds 0.1"
    job = Job(command, tmp_path, PYTHONPATH=str(tmp_path))
    host = socket.gethostname()
    wait_until((tmp_path / "out" / f"{host}.jsonl").exists, job)
    job.signal(signal.SIGTERM)
    assert job.finish() == 0
    gpus = "gpu0 50%, 1.0 GiB, 40 °C; gpu1 50%, 1.0 GiB, 41 °C"
    assert re.fullmatch(rf"{host}, mean of 0:00:\d\d: cpu .*; {gpus}\n", job.output())
    said = run(f"python {ROOT}/scripts/usage.py out --seconds 0", tmp_path, status=2)
    assert "give a number above 0" in said


def test_summarize_runs(tmp_path):
    """A table of all runs: also of those that ended early, of other tasks, and of other flags."""

    def write(name, config, **figures):
        lines = [
            {"event": "start", "step": 0, "config": config},
            {"event": "evaluation", "step": 5, "epoch": 1, **figures},
        ]
        (tmp_path / "runs" / name).mkdir(parents=True)
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (tmp_path / "runs" / name / "results.jsonl").write_text(text)

    write("a", {"lr": 0.1, "epochs": 1}, **{"val/loss": 0.5, "val/accuracy": 0.75})
    # It was killed at its start.
    (tmp_path / "runs" / "b").mkdir()
    (tmp_path / "runs" / "b" / "results.jsonl").touch()
    write("c", {"lr": 0.2, "epochs": 2, "clip": 1}, **{"val/rmse": 0.5})
    with open(tmp_path / "runs" / "c" / "results.jsonl", "a") as file:
        # The last line of a run that was killed.
        file.write('{"event": "evaluation", "step": 10, "epo')
    (tmp_path / "runs" / "d" / "results.jsonl").mkdir(parents=True)
    shown = compute(f"python {ROOT}/scripts/summarize_runs.py runs", tmp_path)
    table = [line for line in shown.splitlines() if line.startswith("|")]
    assert table == [
        "| run | lr | epochs | clip | epochs | best val accuracy | last val loss |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| runs/a | 0.1 | 1 | - | 1/1 | 75.00% | 0.5000 |",
        "| runs/b | - | - | - | 0/- | - | - |",
        "| runs/c | 0.2 | 2 | 1 | 1/2 | - | - |",
        "| runs/d | - | - | - | 0/- | - | - |",
    ]
    assert "summarize_runs.py: runs/d/results.jsonl: Is a directory" in shown


def test_horovod_has_nccl_where_nvcc_is():
    """All tests of Horovod use this build, on the CPU."""
    need_horovod()
    import horovod.torch as hvd

    nvcc = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    need(nvcc.exists(), f"the CUDA toolkit, then again {HOROVOD}")
    assert hvd.nccl_built()


def test_horovod_from_another_file(tmp_path):
    """It also says how long it has taken."""
    (tmp_path / "other.tar.gz").write_text("another version")
    # In place of Python: all that is asked of it succeeds, and pip takes a moment.
    fake = tmp_path / "python"
    clock = 'exec python3 "$@"'
    fake.write_text(f"#!/bin/sh\ncase $* in *minutes*) {clock};; *pip*) sleep 1;; esac\n")
    fake.chmod(0o755)
    variables = {"HOROVOD_SDIST": "other.tar.gz", "PYTHON": str(fake)}
    shown = run(f"{ROOT}/scripts/install_horovod.sh", tmp_path, status=1, **variables)
    assert "other.tar.gz: FAILED" in shown
    assert shown.startswith("building Horovod: 0 min so far")
