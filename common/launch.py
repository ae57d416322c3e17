"""How a recipe is started by a launcher, and how it ends: in one line, not after its parent."""

import ctypes
import faulthandler
import os
import signal
import sys
import time
from contextlib import contextmanager

import torch
import torch.multiprocessing as mp

from common.errors import InputError, RunError

# torchrun, horovodrun, mpirun, srun
RANKS = ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
SIZES = ("WORLD_SIZE", "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE")


@contextmanager
def plain_exits():
    """Let an InputError or RunError end the process with one line, and Ctrl-C at once.

    SIGUSR2 prints the stacks of all threads.
    """
    # Under nohup SIGINT is ignored, and stays so.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # A Python handler would wait for the current collective.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR2, file=sys.__stderr__)
    try:
        yield
    except (InputError, RunError) as error:
        rank = next((int(os.environ[name]) for name in RANKS if name in os.environ), None)
        if rank:
            # Usually all ranks fail: rank 0 prints, and its launcher ends the others.
            time.sleep(3)
        who = f"rank {rank}: " if rank else ""
        script = os.path.basename(sys.argv[0])
        print(f"{script}: {who}{error}", file=sys.stderr, flush=True)
        if rank is None:
            sys.exit(error.status)
        # Under mp.spawn rank 0 holds the store: ranks that connect would print errors.
        time.sleep(1)
        # Skips the destructors of the process group, which can hang or abort.
        os._exit(error.status)


def check_world_size(world_size: int) -> None:
    """Raise InputError if a launcher started more processes than those that train together."""
    for name in SIZES:
        started = int(os.environ.get(name, 1))
        if started > world_size:
            raise InputError(
                f"a launcher started {started} of these ({name}), and each would train alone: "
                "use python (hvd.py: horovodrun)"
            )


def torchrun_env() -> tuple[int, int]:
    """Return (LOCAL_RANK, LOCAL_WORLD_SIZE), which torchrun sets; raises InputError."""
    if "LOCAL_RANK" not in os.environ:
        raise InputError(
            "LOCAL_RANK is not set: start it with a launcher, "
            f"torchrun --nproc-per-node=2 {sys.argv[0]}"
        )
    return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])


def share_cores(local_world_size: int) -> None:
    """Use one thread per core of this process's share, unless OMP_NUM_THREADS is set."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // local_world_size))


def die_with_parent() -> None:
    """Let Linux kill this process when its parent dies: a rank in a collective would not notice.

    To Linux the parent is a thread. That of a launcher, of mp.spawn and of a DataLoader lives as
    long as its process; where none of them started this process, nothing is done.
    """
    parent = mp.parent_process()
    launched = any(name in os.environ for name in RANKS)
    if sys.platform != "linux" or not (launched or parent):
        return
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and parent.pid != os.getppid():
        # It died before prctl.
        os._exit(1)


def restart_unless_told(stop) -> None:
    """Under torchrun --max-restarts: end with status 1 unless this rank was told to stop, too.

    torchrun starts all ranks again if one ends with status 1. So they go on without the node that
    was told to stop, from the checkpoint. A launcher that tells all ranks does so within 2 s.
    """
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) == 0:
        return
    for _ in range(20):
        if stop.requested:
            return
        time.sleep(0.1)
    os._exit(1)
