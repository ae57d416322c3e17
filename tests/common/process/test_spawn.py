"""common/process/spawn.py: signals for the processes of mp.spawn."""

import signal
import subprocess
from unittest import mock

from common.process import spawn


def test_a_signal_for_a_process_that_has_just_ended():
    """The system call says so, before multiprocessing knows it."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    process = mock.Mock(pid=ended.pid, is_alive=lambda: True)

    def join():
        signal.raise_signal(signal.SIGUSR1)
        return True

    numbers = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        spawn.join(mock.Mock(processes=[process], join=join))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
