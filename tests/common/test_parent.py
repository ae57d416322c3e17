"""A process ends with the launcher that started it, and with nothing else."""

import subprocess
import sys

import pytest
from recipes import ROOT

pytestmark = pytest.mark.check


def test_a_process_outlives_the_thread_that_started_it():
    """Without a launcher, as in a script that starts trainings from a pool of threads."""
    child = "from common import parent; parent.die_with_parent(); import time; time.sleep(2)"
    code = (
        "import subprocess, sys, threading\n"
        "started = []\n"
        "def start():\n"
        f"    started.append(subprocess.Popen([sys.executable, '-c', {child!r}]))\n"
        "    started[0].poll()\n"
        "    import time; time.sleep(0.1)\n"
        "thread = threading.Thread(target=start)\n"
        "thread.start()\n"
        "thread.join()\n"
        "sys.exit(started[0].wait())\n"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, cwd=ROOT, timeout=300).returncode == 0
