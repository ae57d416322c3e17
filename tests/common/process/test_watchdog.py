"""The watchdog ends a process that hangs, and no other."""

import faulthandler

import pytest
from forked import compute
from recipes import ROOT

from common.process.watchdog import Watchdog

BEGIN = """\
import signal
from common.process.watchdog import Watchdog

# Without a watchdog it ends, too, with another status.
signal.alarm(60)

def hangs():
    yield signal.pause()

watchdog = Watchdog(0.5)
"""
HANGS = {
    "the first batch": "for _ in watchdog.watch(hangs()):\n    pass\n",
    "a step": "for _ in watchdog.watch([1, 2]):\n    signal.pause()\n",
    "a step after a save": (
        "for batch in watchdog.watch([1, 2]):\n"
        "    if batch == 2:\n"
        "        signal.pause()\n"
        "    watchdog.cancel()\n"
    ),
}


@pytest.mark.parametrize("what", HANGS)
def test_a_process_that_hangs_ends_with_its_stack(what, tmp_path):
    (tmp_path / "hangs.py").write_text(BEGIN + HANGS[what])
    said = compute("python hangs.py", tmp_path, status=1, PYTHONPATH=str(ROOT))
    assert said.startswith("Timeout (")
    assert 'hangs.py", line' in said


@pytest.mark.check
def test_a_cancelled_watchdog_does_not_end_the_process(monkeypatch):
    armed = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: armed.append(True))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", armed.clear)
    watchdog = Watchdog(1000)
    for _ in watchdog.watch(range(3)):
        assert armed
        watchdog.cancel()
    assert armed, "what follows the loop is watched, too"
    watchdog.cancel()
    assert not armed
