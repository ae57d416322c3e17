"""Wait for the processes of mp.spawn as a launcher does: pass signals on, end with their status."""

import contextlib
import logging
import os
import signal
import sys

import torch.multiprocessing as mp

from common.errors import RunError
from common.process import signals


def ignore_signals() -> None:
    """Let processes that start from now on ignore SIGUSR1 and SIGUSR2 until they have handlers.

    They would inherit the default, which ends them while torch loads. join() ends this here.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def join(context: mp.ProcessContext) -> None:
    """Wait for the processes of mp.spawn(..., join=False).

    SIGTERM, SIGUSR1 and Ctrl-C are passed on to them. If one failed, its status is that of this
    process. Raises RunError if a signal killed one.
    """

    def pass_on(number, _):
        for process in context.processes:
            # It can end meanwhile.
            with contextlib.suppress(ProcessLookupError):
                if process.is_alive():
                    os.kill(process.pid, number)

    # Else it logs each process that it ends.
    logging.getLogger("torch.multiprocessing").setLevel(logging.ERROR)
    # Ctrl-C raises KeyboardInterrupt here, so that it can be passed on; unless it is ignored.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGUSR1, pass_on)
    signal.signal(signal.SIGTERM, pass_on)
    signals.act_on(signal.SIGUSR2, signals.print_stacks)
    try:
        while not context.join():
            pass
    except KeyboardInterrupt:
        # A terminal has told the ranks; `kill -INT PID` has not.
        pass_on(signal.SIGINT, None)
        sys.exit(130)
    except mp.ProcessExitedException as error:
        if error.exit_code > 0:
            # It has printed why.
            sys.exit(error.exit_code)
        why = "; the kernel sends it at the memory limit" if error.signal_name == "SIGKILL" else ""
        raise RunError(f"{error}{why}") from error
