"""How the processes of a run find each other on one machine, and how they end: on Ctrl-C, and with their parent."""

import contextlib
import ctypes
import logging
import signal
import socket
import sys

import torch.multiprocessing as mp


def exit_on_ctrl_c():
    """Let Ctrl-C end this process with status 130 and without a traceback; last.pt holds the last whole epoch."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it may be ignored on purpose, as under nohup
        signal.signal(signal.SIGINT, lambda *_: sys.exit(130))


def end_with_parent():
    """Let this process, one of several ranks, end at once on Ctrl-C and (on Linux) when what started it is gone.

    A handler in Python waits until the all-reduce returns that this rank is in, and that waits for a rank that is gone.
    So do the workers of a launcher that got SIGKILL, on a busy GPU.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


@contextlib.contextmanager
def ctrl_c_ignored():
    """Ignore Ctrl-C in the `with` block, and for good in the processes that are started in it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def join(context):
    """Wait for the processes of `mp.spawn(..., join=False)`; end them all when one fails, or on Ctrl-C.

    Ends with the status of a process that ended with one, as it has said why; an exception in one is raised here.
    """
    logging.getLogger("torch.multiprocessing").setLevel(logging.ERROR)  # no line for each that is ended
    try:
        while not context.join():
            pass
    except mp.ProcessExitedException as error:
        sys.exit(error.exit_code)
    finally:
        for process in context.processes:
            process.kill()


def free_port():
    """A TCP port that nothing listens on now, for the processes of one machine to meet at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
