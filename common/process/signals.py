"""Signals: some are acted on at once, also in C++; others ask a run to save and stop."""

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


@contextmanager
def clean_up_first(*numbers: int):
    """Let these signals leave the `with` block by KeyboardInterrupt, and then do what they did."""
    came = []

    def leave(number, _):
        came.append(number)
        raise KeyboardInterrupt

    handlers = {number: signal.getsignal(number) for number in numbers}
    # Under nohup SIGINT is ignored, and stays so. Python can put no handler back that is of C code.
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
            os.kill(os.getpid(), number)


class StopSignal:
    """`requested` is True once SIGTERM or SIGUSR1, which schedulers send, came after listen().

    `agreed` is True once all ranks know that one of them was asked to stop.
    """

    def __init__(self):
        # A plain bool: a threading.Event takes a lock, on which a second signal could wait.
        self.requested = False
        self.agreed = False
        self.listening = False
        # Seconds of a step: of this rank, and after all ranks agreed, the mean over them.
        self.seconds_per_step = math.inf

    def listen(self) -> None:
        """From now on they do not end this process. Before the first step nothing is to be saved.

        A rank may then wait in C++ for the others, where Python would not notice a signal.
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
        """`all_reduce`, in which each rank also tells the others whether it was asked to stop.

        `all_reduce` adds up a tensor over all ranks in place, and so does what this returns. Every
        rank then has the same values of `agreed` and `seconds_per_step`. A process alone has None.
        """
        if all_reduce is None:
            self.agreed = self.requested
            return None

        def all_reduce_with_more(values: torch.Tensor) -> None:
            own = (float(self.requested), self.seconds_per_step, 1.0)
            # The device fills them in: a copy of a list would wait for it.
            everything = torch.cat([values, *(values.new_full((1,), number) for number in own)])
            all_reduce(everything)
            values.copy_(everything[:-3])
            requests, seconds, ranks = everything[-3:].tolist()
            self.agreed = requests > 0
            self.seconds_per_step = seconds / ranks

        return all_reduce_with_more
