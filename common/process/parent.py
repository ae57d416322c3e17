"""A process that ends when its parent does."""

import ctypes
import multiprocessing
import os
import signal
import sys
from pathlib import Path

# torchrun, horovodrun, mpirun, srun
RANKS = ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
# A user, a pod or a notebook can have set RANK. Of these, torchrun alone sets the first.
OF_LAUNCHERS = ("TORCHELASTIC_RUN_ID", *RANKS[1:])


def launched() -> bool:
    """Whether the variables of a launcher are there."""
    return any(name in os.environ for name in OF_LAUNCHERS)


def die_with_parent() -> None:
    """Let Linux kill this process when its parent dies: a rank in a collective would not notice.

    To Linux the parent is a thread. That of a launcher, of mp.spawn and of a DataLoader lives as
    long as its process; where none of them started this process, nothing is done.
    """
    parent = multiprocessing.parent_process()
    if sys.platform != "linux" or not (launched() or parent):
        return
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may have died before.
    if parent:
        is_orphan = parent.pid != os.getppid()
    else:
        is_orphan = "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() == 1 and not in_python()
    if is_orphan:
        os._exit(1)


def in_python() -> bool:
    """Whether process 1, which adopts orphans, is a Python: in a container it may be torchrun."""
    return b"python" in Path("/proc/1/cmdline").read_bytes()
