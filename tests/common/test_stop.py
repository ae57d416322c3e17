"""Signals that ask a run to stop."""

import os
import signal
import subprocess
import sys

import pytest
from recipes import ROOT

from common.stop import StopSignal

pytestmark = pytest.mark.check


def test_a_storm_of_signals_does_not_hang():
    code = (
        "import os, signal\n"
        "from common.stop import StopSignal\n"
        "stop = StopSignal()\n"
        "stop.listen()\n"
        "for _ in range(20000):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "print(stop.requested)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_a_stop_is_requested_by_both_signals():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    for number in before:
        stop = StopSignal()
        stop.listen()
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
    for number, handler in before.items():
        signal.signal(number, handler)
