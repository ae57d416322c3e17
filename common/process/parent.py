"""A process that ends when its parent does."""

import ctypes
import multiprocessing
import os
import signal
import sys
from pathlib import Path

# torchrun, horovodrun, mpirun, srun
RANKS = ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
# Not RANK, which a user, a pod or a notebook may set. torchrun sets the first one instead.
OF_LAUNCHERS = ("TORCHELASTIC_RUN_ID", *RANKS[1:])


def launched() -> bool:
    """Whether the environment has the variables of a launcher."""
    return any(name in os.environ for name in OF_LAUNCHERS)


def die_with_parent() -> None:
    """Let Linux kill this process when its parent dies: a rank in a collective would not notice.

    PDEATHSIG fires when the parent *thread* ends, even if its process lives on. So it is set only
    under a launcher, mp.spawn or a DataLoader, which start processes from a thread that stays.
    """
    parent = multiprocessing.parent_process()
    if sys.platform != "linux" or not (launched() or parent):
        return
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the call.
    if parent:
        is_orphan = parent.pid != os.getppid()
    else:
        is_orphan = "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() == 1 and not in_python()
    if is_orphan:
        os._exit(1)


def in_python() -> bool:
    """Whether process 1, which adopts orphans, is Python: in a container it may be torchrun."""
    return b"python" in Path("/proc/1/cmdline").read_bytes()
