"""How a process of a run ends: with one line, on a signal, with its parent."""

import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
import time

import torch
import torch.multiprocessing as mp

RANK_VARIABLES = ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")  # torchrun, horovodrun, mpirun, srun
stop_requested = threading.Event()  # SIGUSR1 came, which a scheduler sends before it takes the machine away


def fail(message, status=2):
    """Print one line that says what is wrong and what to do, and end this process; status 2 is for wrong input."""
    rank = next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), None)
    if rank:  # wrong input is mostly wrong on all ranks: rank 0 prints at once, and the launcher then ends the others
        time.sleep(3)
    print(f"{os.path.basename(sys.argv[0])}: {f'rank {rank}: ' if rank else ''}{message}", file=sys.stderr, flush=True)
    if rank is None:
        sys.exit(status)
    os._exit(status)  # the destructors of a process group can wait for ranks that are gone, or abort


def install_signal_handlers():
    """Ctrl-C ends this process at once, SIGUSR1 makes the run save and stop, SIGUSR2 prints where each thread is."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a handler in Python would wait for a collective to return
    signal.signal(signal.SIGUSR1, lambda *_: stop_requested.set())
    signal.siginterrupt(signal.SIGUSR1, False)  # system calls go on: no library has to know of the signal
    faulthandler.register(signal.SIGUSR2, file=sys.__stderr__)


def die_with_parent(*_):
    """Let Linux end this process when its parent is gone: a rank that is in a collective cannot notice."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
        if (parent := mp.parent_process()) and parent.pid != os.getppid():  # it was gone already
            os._exit(1)


def torchrun_env():
    """(LOCAL_RANK, LOCAL_WORLD_SIZE), which torchrun sets."""
    if "LOCAL_RANK" not in os.environ:
        fail(f"LOCAL_RANK is not set: start it with a launcher, torchrun --nproc-per-node=2 {sys.argv[0]}")
    return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])


def share_cores(local_world_size):
    """Give this process its share of the cores, unless OMP_NUM_THREADS says how many threads it has."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // local_world_size))


def join(context):
    """Wait for the processes of mp.spawn(..., join=False), pass SIGUSR1 on, end with the status of one that failed."""
    def pass_on(number, _):
        for pid in [process.pid for process in context.processes if process.is_alive()]:
            os.kill(pid, number)

    logging.getLogger("torch.multiprocessing").setLevel(logging.ERROR)  # else a line for each process that it ends
    signal.signal(signal.SIGUSR1, pass_on)
    faulthandler.register(signal.SIGUSR2, file=sys.__stderr__)
    try:
        while not context.join():
            pass
    except KeyboardInterrupt:
        sys.exit(130)
    except mp.ProcessExitedException as error:  # it has said why, unless a signal ended it
        sys.exit(error.exit_code) if error.exit_code > 0 else fail(str(error), status=1)
