"""A process ends with the launcher that started it, and with nothing else."""

import os
import subprocess
import sys
import threading
import time

import pytest
from recipes import ROOT

pytestmark = pytest.mark.check


@pytest.mark.parametrize("variable", ["OTHER", "RANK"])
def test_a_process_outlives_the_thread_that_started_it(variable, monkeypatch):
    """Without a launcher, as in a script that starts trainings from a pool of threads.

    RANK alone is no launcher: a service can have it.
    """
    monkeypatch.setenv(variable, "0")
    child = (
        "from common.process import parent\n"
        "parent.die_with_parent()\n"
        "print('runs', flush=True)\n"
        "input()\n"
    )
    started = []

    def start():
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen([sys.executable, "-c", child], cwd=ROOT, text=True, **pipes)
        assert process.stdout.readline() == "runs\n"
        started.append(process)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    # Python's thread ends before that of Linux, with which Linux would end the child.
    while os.path.exists(f"/proc/self/task/{thread.native_id}"):
        time.sleep(0.01)
    started[0].communicate("go on\n")
    assert started[0].returncode == 0
