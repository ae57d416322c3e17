"""Signals that are acted on in a thread, at once and without harm, and those that ask to stop."""

import signal
import time

import pytest
import torch
from forked import ForkedJob, compute
from recipes import ROOT

from common.metrics import Sums
from common.process.signals import StopSignal

BUSY = """
import signal
from common.process import signals

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
from common.process import signals

signals.act_on(signal.SIGUSR2, lambda: print("the parent", flush=True))
if os.fork() == 0:
    signals.act_on(signal.SIGUSR2, lambda: print("the child", flush=True))
    os.kill(os.getpid(), signal.SIGUSR2)
    time.sleep(1)
    os._exit(0)
os.wait()
# The parent would print now.
time.sleep(1)
"""
STORM = """
import os, signal
from common.process.signals import StopSignal

stop = StopSignal()
stop.listen()
for _ in range(20000):
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGUSR1)
print(stop.requested)
"""


def test_stacks_of_a_busy_process_do_not_end_it(tmp_path):
    """The handler of faulthandler.register() crashes there after tens to hundreds of signals."""
    (tmp_path / "busy.py").write_text(BUSY)
    job = ForkedJob("python busy.py", tmp_path, PYTHONPATH=str(ROOT))
    job.wait_for("ready")
    for _ in range(1000):
        job.process.send_signal(signal.SIGUSR2)
        time.sleep(0.001)
    assert job.running()
    job.kill()
    assert job.output().count("in deep") > 100


def test_a_fork_acts_itself(tmp_path):
    (tmp_path / "fork.py").write_text(FORK)
    assert compute("python fork.py", tmp_path, PYTHONPATH=str(ROOT)) == "the child\n"


def test_a_storm_of_signals_does_not_hang(tmp_path):
    (tmp_path / "storm.py").write_text(STORM)
    assert compute("python storm.py", tmp_path, PYTHONPATH=str(ROOT)) == "True\n"


def averages(loss, samples):
    return {"loss": loss / samples}


@pytest.mark.check
@pytest.mark.parametrize("asked", [set(), {0}, {1}, {0, 1}])
def test_all_ranks_agree_to_stop_if_one_was_asked(asked):
    """It travels with the sums of two ranks, and leaves them as they are."""
    stops = [StopSignal() for _ in range(2)]
    sums = [Sums(torch.device("cpu"), averages) for _ in range(2)]
    for rank, stop in enumerate(stops):
        stop.requested = rank in asked
        sums[rank].add(loss=torch.tensor(0.5 + rank), samples=3)
    # A first total of each rank gives what they would send, a second has the sum of it.
    sent = []
    for rank, stop in enumerate(stops):
        sums[rank].total(stop.carried_by(lambda values: sent.append(values.clone())))
    totals = [
        sums[rank].total(stop.carried_by(lambda values: values.copy_(sum(sent))))
        for rank, stop in enumerate(stops)
    ]
    assert totals == 2 * [{"loss": 2, "samples": 6}]
    assert [stop.agreed for stop in stops] == 2 * [bool(asked)]
    assert [stop.requested for stop in stops] == [0 in asked, 1 in asked]
