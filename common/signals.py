"""Act on a signal at once, also while the main thread waits in C++ for another rank."""

import faulthandler
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable

# What the thread does, by the number of the signal
actions: dict[int, Callable[[], object]] = {}


def act_on(number: int, action: Callable[[], object]) -> None:
    """Let a thread call `action` when signal `number` comes, until something else handles it.

    A handler that is written in Python runs in the main thread only, after the C++ code that this
    thread is in.
    """
    actions[number] = action
    start_thread(os.getpid())
    signal.signal(number, noted)
    # Restart interrupted system calls: libraries may not expect the signal.
    signal.siginterrupt(number, False)


def noted(*_) -> None:
    """A handler that does nothing: Python writes the number to a pipe, and the thread reads it."""


@functools.cache
def start_thread(process: int) -> None:
    """Start it, once in each `process`: a fork inherits no thread, and shares the pipe."""
    reader, writer = os.pipe()
    # A full pipe must not stop the process.
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def wait():
        while True:
            number = os.read(reader, 1)[0]
            if signal.getsignal(number) is noted:
                actions[number]()

    threading.Thread(target=wait, daemon=True).start()


def print_stacks() -> None:
    """Print the stacks of all threads. This thread holds the interpreter's lock meanwhile.

    faulthandler.register() prints them without the lock, while another thread may change them.
    CPython 3.11.7 crashed then, after 12 to 900 signals to a process that ran Python code (see
    cpython issue 116008).
    """
    faulthandler.dump_traceback(file=sys.__stderr__)
