"""How a process is set up, and how it ends."""

import multiprocessing
import os
import re
import signal

import pytest
import torch
from launch import one_line, run
from recipes import ROOT

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


def test_torchrun_says_why_a_rank_failed(tmp_path):
    """Below what the rank itself prints, which may be far above."""
    torchrun = "torchrun --standalone --nproc-per-node=2"
    said = run(f"{torchrun} {ROOT}/mnist/ddp_launch.py --no-such-flag", tmp_path, status=1)
    _, _, root_cause = said.partition("Root Cause (first observed failure):")
    assert re.search(
        r"^ +traceback : .*: --no-such-flag \(--help lists the flags\)$", root_cause, re.M
    )
    assert "error_file: <N/A>" not in root_cause


@pytest.mark.parametrize(
    ("value", "threads"), [("", 2), ("abc", 2), ("0", 2), ("3", 4), ("4,2", 4)]
)
def test_a_number_of_threads_that_is_none(value, threads, monkeypatch):
    """BigDL 2842: each process would use all cores."""
    chosen = [4]
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    launch.share_cores(2)
    assert chosen[-1] == threads
