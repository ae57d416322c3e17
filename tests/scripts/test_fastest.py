"""scripts/fastest.py: its trials are real runs, and the line that it recommends can be typed."""

import math
import re
import signal
import sys

import pytest
from forked import refused
from launch import Job, run, wait_until
from recipes import ROOT

from scripts import fastest

FASTEST = f"python {ROOT}/scripts/fastest.py"
SMALL = "--synthetic 6400 --model lenet --device cpu --seconds 0.2 --turns 1"


def test_recommended_line(tmp_path):
    shown = run(f"{FASTEST} {ROOT}/mnist/single.py {SMALL}", tmp_path)
    rows = re.findall(r"^\| (.+?) \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \| (\d+) \|$", shown, re.M)
    names = [row[0] for row in rows]
    assert names[0] == "default"
    assert "bf16" in names
    # Not alone, if the default has turned out too slow.
    assert any("--channels-last" in name for name in names)
    assert any("processes: 2" in name or "OMP_NUM_THREADS" in name for name in names)
    first = float(rows[0][1].replace(",", ""))
    for _, speed, ratio, memory, _ in rows:
        assert float(speed.replace(",", "")) / first == pytest.approx(float(ratio), abs=0.02)
        assert 0.1 < float(memory) < 10
    recommended = re.findall(r"^    (.+)$", shown, re.M)
    assert len(recommended) == ("the fastest trained" in shown)
    for line in recommended:
        said = run(f"env {line} --epochs 1 --dry-run", tmp_path)
        assert re.search(r"^epoch [\d.]+/1: ", said, re.M)
    assert not (tmp_path / "runs").exists()


def test_settings_train_the_same(monkeypatch):
    """Another number of processes gets the default's global batch and rate."""
    command = f"fastest.py {ROOT}/mnist/ddp_launch.py --device cpu -b 8"
    monkeypatch.setattr(sys, "argv", command.split())
    monkeypatch.setattr(fastest.devices, "own_cores", lambda: [0, 1, 2, 3])
    search = fastest.Search(*fastest.parse_args())
    search.same_training = ["-G", "32", "--lr", "0.08"]
    given = "-b 8 --device cpu"
    assert search.command(search.default).endswith(
        f"--nproc-per-node=4 {ROOT}/mnist/ddp_launch.py {given}"
    )
    one = fastest.Setting("bf16", 1, channels_last=True)
    assert search.command(one).endswith(
        f"mnist/ddp_amp.py {given} -G 32 --lr 0.08 --amp-dtype bf16 --channels-last"
    )


@pytest.mark.parametrize(
    ("says", "gib"), [("echo 1024; echo 3072", 3), ("echo [N/A]", math.nan), ("exit 9", math.nan)]
)
def test_memory_of_gpus(says, gib, tmp_path, monkeypatch):
    """AMD's driver has no nvidia-smi."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert math.isnan(fastest.gpu_memory())
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{says}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert fastest.gpu_memory() == pytest.approx(gib, nan_ok=True)


def event(epoch, samples, seconds):
    return {"epoch": epoch, "samples": samples, "perf/images_per_sec": samples / seconds}


def test_speed_between_lines():
    """Without what came before the first line of an epoch: a start, or an evaluation."""
    events = [event(0, 10, 5), event(0, 30, 6), event(1, 10, 7), event(1, 20, 8)]
    assert fastest.trained(events) == (30, 2)
    assert fastest.trained(events[:1]) == (0, 0)
    assert fastest.speed_of(events[:1]) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ended_within_a_trial(number, tmp_path):
    """No recipe trains on, and no log stays."""
    job = Job(f"exec {FASTEST} {ROOT}/mnist/single.py {SMALL}", tmp_path, TMPDIR=str(tmp_path))
    wait_until(lambda: list(tmp_path.glob("*/log/results.jsonl")), job)
    job.process.send_signal(number)
    assert job.finish() == 128 + number
    assert job.alive() == []
    assert list(tmp_path.glob("*/log")) == []


def test_wrong_input(tmp_path):
    assert "give one of single.py" in refused(f"{FASTEST} {ROOT}/mnist/hvd.py", tmp_path)
    assert "give one of single.py" in refused(f"{FASTEST} none/single.py", tmp_path)
    # What the recipe says.
    assert "unrecognized arguments: --no-such-flag" in refused(
        f"{FASTEST} {ROOT}/mnist/single.py --no-such-flag", tmp_path
    )
