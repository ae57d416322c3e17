"""The one way in which a run ends that cannot go on: one line that says what is wrong and what to do."""

import atexit
import os
import re
import signal
import sys
import time
import traceback

RANK_VARIABLES = ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")  # torchrun, horovodrun, mpirun, srun
# What is said when the fault is not in the code: (pattern, the line to print, the status, whether to let a rank that
# knows the reason speak first). Every other exception keeps its traceback, also one in a loader worker.
KNOWN = [
    (r"DataLoader worker.*Bus error|unable to (allocate|resize|open) shared memory|/torch_.*No space left on device",
     "a loader worker found no room in /dev/shm: make it larger (docker run --shm-size), or take fewer --workers",
     1, False),
    (r"(DataLoader worker \(pid.*)", "{0}: it may have met the memory limit of the job; try fewer --workers", 1, False),
    (r"multiprocessing/resource_sharer",  # it was killed while it handed a batch over
     "a loader worker is gone: it may have met the memory limit of the job; try fewer --workers", 1, False),
    (r"BrokenImage: (.* is not an image that can be read .*)", "{0}: delete it, or fetch it again", 2, False),
    (r"can't allocate memory|std::bad_alloc|MemoryError|out of memory|Cannot allocate memory",
     "out of memory: take a smaller --batch-size, or fewer processes", 1, False),
    (r"InvalidCxxCompiler", "--compile finds no C++ compiler: install g++, or leave --compile out", 2, False),
    (r"EADDRINUSE", "the port {MASTER_PORT} is in use (EADDRINUSE): set MASTER_PORT to another", 2, False),
    (r"gloo/.*(by peer|refused|Broken pipe|Socket closed|Timed out)|DistNetworkError|DistStoreError|DistBackendError|"
     r"Horovod has been shut down|HorovodInternalError", "another rank is gone: what it printed says why", 1, True),
]
ended = False  # whether this is one of several ranks, and has called `end`


def own_rank():
    """The rank that a launcher gave this process, and 0 where there is none."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if os.environ.get(name, "").isdigit()), 0)


def fail(message, status=2, wait=None):
    """Print one line that says what is wrong and what to do, and end this process with `status`: 2 for a wrong input.

    A wrong input is mostly wrong for all ranks. Rank 0 speaks at once, the launcher then ends the others,
    and a rank that is still there after three seconds has something of its own to say. `wait` overrules that.
    """
    rank = own_rank()
    if wait or (wait is None and rank > 0):
        time.sleep(3)
    print(f"{os.path.basename(sys.argv[0])}: {'' if rank == 0 else f'rank {rank}: '}{message}", file=sys.stderr)
    end(status)


def end(status):
    """End this process; one of several ranks without the destructors of its process group, which can abort."""
    global ended
    sys.stdout.flush()
    sys.stderr.flush()
    if any(name in os.environ for name in RANK_VARIABLES):
        ended = True
        if status:  # a peer may be gone, for which exit handlers would wait
            atexit.register(os._exit, status)  # what is registered last runs first
    sys.exit(status)


@atexit.register  # before any library registers something: this runs last, after Horovod has ended MPI
def skip_destructors():
    if ended:
        os._exit(0)


def fail_if_known(text):
    """End with one line where `text` (an exception's name, message and places) tells of a fault outside the code."""
    for pattern, line, status, wait in KNOWN:
        if found := re.search(pattern, text):
            fail(line.format(*found.groups(), MASTER_PORT=os.environ.get("MASTER_PORT")), status, wait)


def excepthook(kind, error, trace):
    """For sys.excepthook: one line for a known fault, the traceback for any other."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch raises there when another loader worker ends
    collected, sys.stderr = sys.stderr, sys.__stderr__  # init_process_group's hook around this one collects the former
    try:
        places = " ".join(frame.filename for frame in traceback.extract_tb(trace))
        fail_if_known(f"{kind.__name__}: {error}\n{places}")
    except SystemExit as stop:
        os._exit(stop.code)  # without the destructors of process groups, which can abort where a peer is gone
    sys.stderr = collected
    sys.__excepthook__(kind, error, trace)
