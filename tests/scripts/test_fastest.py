"""scripts/fastest.py: a trial is a real run, and what it finds is measured and can be typed."""

import math
import re
import shlex
import signal

import psutil
import pytest
from forked import ForkedJob, compute, refused
from launch import wait_until
from recipes import ROOT

from common.errors import InputError, RunError
from scripts import fastest

FASTEST = f"python {ROOT}/scripts/fastest.py"
CONFIG = {"global_batch": 8, "peak_lr": 0.02}


def arguments(command, monkeypatch):
    """(args, the flags of the recipe) of a command line, on a machine with two cores."""
    monkeypatch.setattr("sys.argv", ["fastest.py", *shlex.split(command)])
    monkeypatch.setattr(fastest.devices, "own_cores", lambda: [0, 1])
    return fastest.parse_args()


def test_a_trial(monkeypatch):
    """It starts the recipe as a user does, and ends it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    flags = f"{ROOT}/mnist/single.py --synthetic 64000 --model lenet --device cpu"
    search = fastest.Search(*arguments(flags, monkeypatch))
    trial = search.run(search.default)
    assert trial.speed > 0
    assert 0.1 < trial.memory < 10
    assert trial.start > 0
    assert trial.config["model"] == "lenet"


def recipe(folder, text):
    """A file that fastest.py takes for a recipe: it imports no torch."""
    (folder / "single.py").write_text(text)


def test_a_trial_that_fails(tmp_path):
    """It says what the recipe has said, and not torchrun's summary after it."""
    recipe(tmp_path, "print('single.py: unrecognized arguments: --flag\\nmore'); exit(2)")
    with pytest.raises(InputError, match=r"^single.py: unrecognized arguments: --flag$"):
        fastest.run(f"python {tmp_path}/single.py", 1, None, on_gpu=False)


SPEEDS = {
    "python {}/single.py": 100,
    "python {}/single.py --channels-last": 110,
    "torchrun --standalone --nproc-per-node=1 {}/ddp_amp.py --amp-dtype bf16": 20,
    "python {}/single.py --channels-last --compile": 150,
    "torchrun --standalone --nproc-per-node=2 {}/ddp_launch.py -G 8 --lr 0.02 "
    "--channels-last --compile": 300,
    "OMP_NUM_THREADS=1 python {}/single.py --channels-last --compile": 90,
}


@pytest.fixture
def found(monkeypatch, capsys):
    """A function that lets fastest.py find these speeds, and returns (rows, all it said)."""

    def of(speeds):
        tried = []

        def measured(command, seconds, interval, on_gpu, hopeless=0):
            plain = command.replace(f"{ROOT}/mnist", "{}").replace(" --device cpu", "")
            tried.append(plain)
            if plain not in speeds:
                raise RunError("no compiler")
            return fastest.Trial(speeds[plain], math.nan, 3, CONFIG)

        monkeypatch.setattr(fastest, "run", measured)
        fastest.find(*arguments(f"{ROOT}/mnist/single.py --device cpu", monkeypatch))
        said = capsys.readouterr().out
        return tried, dict(re.findall(r"^\| (.+?) \| (.+) \|$", said, re.M)), said

    return of


def test_the_fastest(found, tmp_path):
    tried, rows, said = found(SPEEDS)
    assert set(tried) == set(SPEEDS)
    assert rows["default"] == "100 | 1.00 | - | 3"
    assert rows["--channels-last --compile processes: 2"] == "300 | 3.00 | - | 3"
    # Each beside the fastest before it, and bf16 not in another memory format.
    assert "slower here: bf16 (0.20), processes: 1, OMP_NUM_THREADS=1 (0.60)\n" in said
    assert "the fastest trained 300 samples/s, 3.00 times as many as the default" in said
    (line,) = re.findall(r"^    (.+)$", said, re.M)
    assert line.endswith(
        "mnist/ddp_launch.py --device cpu -G 8 --lr 0.02 --channels-last --compile"
    )
    shorter = "--synthetic 640 --model lenet --dry-run"
    printed = compute(f"{line} {shorter}", tmp_path, TORCHDYNAMO_DISABLE="1")
    assert "world size 2" in printed


def test_nothing_is_faster(found):
    """A setting that fails has a row."""
    tried, rows, said = found({"python {}/single.py": 100})
    assert rows["bf16"] == rows["--compile"] == "failed: no compiler"
    assert "in 3 turns nothing was faster here than the default" in said
    # The probe, its trial, and its turns.
    assert tried.count("python {}/single.py") == 5


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
    return {"epoch": epoch, "samples": samples, "perf/samples_per_sec": samples / seconds}


def test_speed_between_lines():
    """Without what came before the first line of an epoch: a start, or an evaluation."""
    events = [event(0, 10, 5), event(0, 30, 6), event(1, 10, 7), event(1, 20, 8)]
    assert fastest.trained(events) == (30, 2)
    assert fastest.trained(events[:1]) == (0, 0)
    assert fastest.speed_of(events[:1]) == 2


ENDLESS = """
import os, sys, time
folder = sys.argv[sys.argv.index("--log-dir") + 1]
os.mkdir(folder)
os.symlink(folder, "log")
time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ended_within_a_trial(number, tmp_path):
    """No recipe trains on, and no log stays."""
    recipe(tmp_path, ENDLESS)
    job = ForkedJob(f"{FASTEST} single.py", tmp_path)
    wait_until((tmp_path / "log").exists, job)
    (trial,) = psutil.Process(job.process.pid).children()
    job.process.send_signal(number)
    assert job.finish() == 128 + number
    assert not trial.is_running()
    # The link dangles.
    assert not (tmp_path / "log").exists()


def test_wrong_input(tmp_path):
    assert "give one of single.py" in refused(f"{FASTEST} {ROOT}/mnist/hvd.py", tmp_path)
    assert "give one of single.py" in refused(f"{FASTEST} none/single.py", tmp_path)
