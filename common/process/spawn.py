"""Wait for the processes of mp.spawn like a launcher: pass on signals, exit with their status."""

import contextlib
import logging
import os
import signal
import sys

import torch.multiprocessing as mp

from common.errors import RunError
from common.process import signals


def ignore_signals() -> None:
    """Let processes started from now on ignore SIGUSR1 and SIGUSR2 until they set handlers.

    The default would kill them while torch loads. In this process join() sets handlers.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def join(context: mp.ProcessContext) -> None:
    """Wait for the processes of mp.spawn(..., join=False).

    Passes SIGTERM, SIGUSR1 and Ctrl-C on to them. If one fails, exits with its status. Raises
    RunError if a signal killed one.
    """

    def pass_on(number, _):
        for process in context.processes:
            # The process can end meanwhile.
            with contextlib.suppress(ProcessLookupError):
                if process.is_alive():
                    os.kill(process.pid, number)

    # Else torch logs each process that it terminates.
    logging.getLogger("torch.multiprocessing").setLevel(logging.ERROR)
    # Let Ctrl-C raise KeyboardInterrupt, to pass it on, unless it is ignored (nohup).
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGUSR1, pass_on)
    signal.signal(signal.SIGTERM, pass_on)
    signals.act_on(signal.SIGUSR2, signals.print_stacks)
    try:
        while not context.join():
            pass
    except KeyboardInterrupt:
        # A terminal sends it to the ranks, too; `kill -INT PID` does not.
        pass_on(signal.SIGINT, None)
        sys.exit(130)
    except mp.ProcessExitedException as error:
        if error.exit_code > 0:
            # The process has printed why.
            sys.exit(error.exit_code)
        why = "; the kernel sends it at the memory limit" if error.signal_name == "SIGKILL" else ""
        raise RunError(f"{error}{why}") from error
