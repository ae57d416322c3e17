"""How a process is set up, and how it ends."""

import multiprocessing
import os
import resource
import signal

import numpy as np
import pytest
import torch
from forked import compute
from launch import one_line, run
from recipes import ROOT, STEP, changed_copy

from common.errors import InputError
from common.process import launch
from common.process.signals import StopSignal


def fail_after_a_stop_request():
    with launch.plain_exits():
        stop = StopSignal()
        stop.listen()
        os.kill(os.getpid(), signal.SIGTERM)
        raise InputError("no such file")


@pytest.mark.check
def test_an_error_after_a_stop_request_is_printed(monkeypatch, capfd):
    """Also by a rank that is not the first."""
    monkeypatch.setenv("RANK", "1")
    # It waits for rank 0 to print.
    monkeypatch.setattr(launch.time, "sleep", lambda _: None)
    process = multiprocessing.get_context("fork").Process(target=fail_after_a_stop_request)
    process.start()
    process.join()
    assert process.exitcode == 2
    line = one_line(capfd.readouterr().err)
    assert line.endswith(": rank 1: no such file")


def test_open_files():
    """A rank may open as many as the machine allows, or nearly: 254 ranks of Gloo need 1,024."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    launch.allow_open_files()
    after, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert after == min(launch.OPEN_FILES, before[1])


CELLS = f"""
import os, runpy, signal, sys, threading, time
script = {str(ROOT / "mnist" / "single.py")!r}
def run(*flags):
    sys.path[0] = os.path.dirname(script)
    sys.argv = [script, "--synthetic", "640", "--model", "lenet", "--device", "cpu", *flags]
    try:
        runpy.run_path(script, run_name="__main__")
        return 0
    except SystemExit as end:
        return end.code
def interrupt():
    while not os.path.exists("other/results.jsonl"):
        time.sleep(0.1)
    time.sleep(2)
    os.kill(os.getpid(), signal.SIGINT)
numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
before = [signal.getsignal(number) for number in numbers]
def writers():
    return [thread for thread in threading.enumerate() if "Writer" in type(thread).__name__]
print("first", run("--epochs", "1", "--log-dir", "run"))
print("second", run("--epochs", "2", "--log-dir", "run", "--resume", "auto"))
os.environ["RANK"] = "0"
print("wrong", run("--epochs", "0"))
del os.environ["RANK"]
threading.Thread(target=interrupt, daemon=True).start()
try:
    # The watchdog of an interrupted run would end the process.
    run("--epochs", "100000", "--log-dir", "other", "--timeout", "10")
except KeyboardInterrupt:
    print("interrupted")
time.sleep(12)
assert [signal.getsignal(number) for number in numbers] == before
assert not writers(), "a thread of TensorBoard is left"
print("third", run("--epochs", "1", "--log-dir", "other", "--resume", "auto"))
"""


def test_cells_of_a_notebook(tmp_path):
    """%run is runpy in a process that lives on: with the same folder again, and after Ctrl-C.

    sos-notebook 261: the kernel died, with all its variables.
    """
    (tmp_path / "cells.py").write_text(CELLS)
    said = run("python cells.py", tmp_path)
    for line in ("first 0", "second 0", "wrong 2", "interrupted", "third 0"):
        assert f"\n{line}\n" in f"\n{said}"


def test_run_path_of_torchrun(tmp_path):
    """It waits for what a function around the script hands on, after the script."""
    flags = "--synthetic 320 --model lenet --device cpu --dry-run"
    torchrun = "torchrun --standalone --nproc-per-node=2 --run-path"
    assert " | val loss " in run(f"{torchrun} {ROOT}/mnist/ddp_launch.py {flags}", tmp_path)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "lower --batch"),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), "lower --batch"),
        (MemoryError(), "(MemoryError)"),
        (BlockingIOError(11, "Resource temporarily unavailable"), "fewer --workers"),
        (RuntimeError("can't start new thread"), "fewer --workers"),
        (ValueError("Expected more than 1 value per channel when training, got"), "a larger --b"),
    ],
)
def test_causes_that_are_explained(error, says, monkeypatch, capfd):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit), launch.plain_exits():
        raise error
    assert says in one_line(capfd.readouterr().err)


@pytest.mark.parametrize("allocate", [torch.empty, np.empty])
def test_too_little_memory_of_the_machine(allocate, monkeypatch, capfd):
    """What torch and NumPy say when the system refuses: no address space has so many bytes."""
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit), launch.plain_exits():
        allocate(2**58)
    line = one_line(capfd.readouterr().err)
    assert "there is too little memory: lower --batch-size" in line
    assert "allocate" in line


def test_an_operation_without_a_deterministic_algorithm(tmp_path):
    """Its name is in the line."""
    step = "            torch.zeros(4).put_(torch.tensor([1]), torch.ones(1))\n"
    copy = changed_copy(tmp_path, "mnist/single.py", STEP, step + STEP)
    command = f"python {copy}/single.py --synthetic 320 --model lenet --device cpu --dry-run"
    said = compute(f"{command} --deterministic", tmp_path, status=2)
    assert "\nsingle.py: an operation of the model has no deterministic algorithm" in said
    assert "put_" in said
    assert "Traceback" not in said


def test_batch_norm_with_one_image(tmp_path):
    flags = "-a resnet18 --image-size 32 -b 1 --synthetic 8 --device cpu --dry-run -j 0"
    said = compute(f"python {ROOT}/imagenet/single.py {flags}", tmp_path, status=2)
    assert "\nsingle.py: BatchNorm needs more than one value per channel: take a larger" in said
    assert "Traceback" not in said
