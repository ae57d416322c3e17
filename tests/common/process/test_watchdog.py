"""The watchdog ends a process that hangs, and no other."""

import faulthandler
import subprocess
import sys

import pytest
from recipes import ROOT

from common.process.watchdog import Watchdog

pytestmark = pytest.mark.check


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
def test_a_process_that_hangs_ends_with_its_stack(what):
    code = (
        "import signal\n"
        "from common.process.watchdog import Watchdog\n"
        "def hangs():\n"
        "    yield signal.pause()\n"
        "watchdog = Watchdog(0.5)\n"
        f"{HANGS[what]}"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("Timeout (")
    assert 'File "<string>"' in done.stderr


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


def test_the_watchdog_gives_the_batches():
    watchdog = Watchdog(1000)
    assert list(watchdog.watch(range(3))) == [0, 1, 2]
    watchdog.cancel()
