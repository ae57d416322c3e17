"""common/signals.py: what a signal does in a thread, at once and without harm."""

import signal
import subprocess
import sys
import time

from recipes import ROOT

BUSY = """
import signal
from common import signals

def deep(levels):
    sum(x for x in range(3))
    if levels > 0:
        deep(levels - 1)

signals.act_on(signal.SIGUSR2, signals.print_stacks)
print("ready", flush=True)
while True:
    deep(30)
"""
FORK = """
import os, signal, time
from common import signals

signals.act_on(signal.SIGUSR2, lambda: print("the parent", flush=True))
if os.fork() == 0:
    signals.act_on(signal.SIGUSR2, lambda: print("the child", flush=True))
    os.kill(os.getpid(), signal.SIGUSR2)
    time.sleep(1)
else:
    os.wait()
    # The parent would print now.
    time.sleep(1)
"""


def python(code, **options):
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, **options
    )


def test_stacks_of_a_busy_process_do_not_end_it(tmp_path):
    """The handler of faulthandler.register() crashes there after tens to hundreds of signals."""
    with open(tmp_path / "stacks", "w") as stacks:
        process = python(BUSY, stderr=stacks)
    process.stdout.readline()
    for _ in range(3000):
        process.send_signal(signal.SIGUSR2)
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert (tmp_path / "stacks").read_text().count("in deep") > 100


def test_a_fork_acts_itself():
    process = python(FORK)
    assert process.communicate()[0] == "the child\n"
    assert process.returncode == 0
