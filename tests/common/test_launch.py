"""How a process is set up, and how it ends."""

import os
import subprocess
import sys

import pytest
import torch
from recipes import ROOT

from common import launch


@pytest.mark.check
def test_an_error_after_a_stop_request_is_printed():
    """Also by a rank that is not the first."""
    code = (
        "import os, signal\n"
        "from common import launch\n"
        "from common.errors import InputError\n"
        "from common.stop import StopSignal\n"
        "with launch.plain_exits():\n"
        "    stop = StopSignal()\n"
        "    stop.listen()\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    raise InputError('no such file')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "RANK": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["-c: rank 1: no such file"]


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
