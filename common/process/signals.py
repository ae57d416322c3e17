"""Signals: some take effect at once, even during C++ code; others ask a run to save and stop."""

import faulthandler
import functools
import math
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager

import torch

# What the thread calls, by signal number
actions: dict[int, Callable[[], object]] = {}


def act_on(number: int, action: Callable[[], object]) -> None:
    """Let a thread call `action` when signal `number` arrives, until another handler is set.

    A Python handler would run in the main thread only, once it returns from C++ code.
    """
    actions[number] = action
    start_thread(os.getpid())
    signal.signal(number, noted)
    # Restart interrupted system calls: libraries may not expect EINTR.
    signal.siginterrupt(number, False)


def noted(*_) -> None:
    """Does nothing: Python also writes the signal number to a pipe, which the thread reads."""


@functools.cache
def start_thread(process: int) -> None:
    """Start the thread, once per `process`: a fork has no thread, and shares its parent's pipe."""
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
    """Print the stacks of all threads, holding the GIL.

    faulthandler.register() prints them without the GIL, while other threads may change them. That
    crashed CPython 3.11.7 after 12 to 900 signals to a process that ran Python code (see cpython
    issue 116008).
    """
    faulthandler.dump_traceback(file=sys.__stderr__)


@contextmanager
def clean_up_first(*numbers: int):
    """Let these signals raise KeyboardInterrupt in the `with` block, then act as before."""
    came = []

    def leave(number, _):
        came.append(number)
        raise KeyboardInterrupt

    handlers = {number: signal.getsignal(number) for number in numbers}
    # Under nohup SIGINT is ignored, and stays so. Python cannot restore a handler of C code.
    kept = (signal.SIG_IGN, None)
    handlers = {number: handler for number, handler in handlers.items() if handler not in kept}
    for number in handlers:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in came:
            if signal.getsignal(number) is noted:
                # Not by a signal: this thread might print a traceback before the other one acts.
                actions[number]()
            else:
                os.kill(os.getpid(), number)


class StopSignal:
    """`requested` is True once SIGTERM or SIGUSR1, which schedulers send, arrives after listen().

    `agreed` is True once all ranks know that one of them was asked to stop.
    """

    def __init__(self):
        # A plain bool: a threading.Event takes a lock, on which a second signal could deadlock.
        self.requested = False
        self.agreed = False
        self.listening = False
        # Seconds per step on this rank; after an all-reduce, the mean over all ranks.
        self.seconds_per_step = math.inf

    def listen(self) -> None:
        """Handle the signals from now on, rather than die from them. Call it after the first step.

        Before that there is nothing to save, and a rank may wait for the others in C++, where
        Python would not notice a signal.
        """
        if self.listening:
            return
        self.listening = True
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._request)
            # Restart interrupted system calls: libraries may not expect the signal.
            signal.siginterrupt(number, False)

    def _request(self, *_):
        self.requested = True

    def carried_by(self, all_reduce):
        """Return `all_reduce` with more numbers: whether a rank was asked to stop, and its speed.

        `all_reduce` adds up a tensor over all ranks in place, and so does the returned function.
        Afterwards `agreed` and `seconds_per_step` are the same on every rank. A single process has
        no `all_reduce` (None), and gets None.
        """
        if all_reduce is None:
            self.agreed = self.requested
            return None

        def all_reduce_with_more(values: torch.Tensor) -> None:
            own = (float(self.requested), self.seconds_per_step, 1.0)
            # new_full() runs on the device; copying a list to it would sync.
            everything = torch.cat([values, *(values.new_full((1,), number) for number in own)])
            all_reduce(everything)
            values.copy_(everything[:-3])
            requests, seconds, ranks = everything[-3:].tolist()
            self.agreed = requests > 0
            self.seconds_per_step = seconds / ranks

        return all_reduce_with_more
