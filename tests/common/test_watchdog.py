"""The watchdog ends a process that hangs, and no other."""

import subprocess
import sys

import pytest
from recipes import ROOT

from common.watchdog import Watchdog

pytestmark = pytest.mark.check


def test_a_cancelled_watchdog_does_not_end_the_process():
    code = (
        "import time\n"
        "from common.watchdog import Watchdog\n"
        "watchdog = Watchdog(1)\n"
        "assert list(watchdog([1, 2])) == [1, 2]\n"
        "{}\n"
        "time.sleep(3)\n"
    )
    ends = {}
    for line in ("watchdog.cancel()", "pass"):
        command = [sys.executable, "-c", code.format(line)]
        ends[line] = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300).returncode
    assert ends["watchdog.cancel()"] == 0
    assert ends["pass"] != 0


def test_the_watchdog_gives_the_batches():
    watchdog = Watchdog(1000)
    assert list(watchdog(range(3))) == [0, 1, 2]
    watchdog.cancel()
