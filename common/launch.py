"""How a recipe is started by a launcher, and how it ends: in one line, not after its parent."""

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager

import torch
import torch.multiprocessing as mp

from common.errors import InputError, RunError

# torchrun, horovodrun, mpirun, srun
RANKS = ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
# The same, and MPICH; for a step of several tasks SLURM's own.
SIZES = (
    "WORLD_SIZE",
    "HOROVOD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "SLURM_STEP_NUM_TASKS",
)


@contextmanager
def plain_exits():
    """Let an InputError or RunError end the process with one line, and Ctrl-C at once.

    SIGUSR2 prints the stacks of all threads.
    """
    # Under nohup SIGINT is ignored, and stays so.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        end_at_once(signal.SIGINT)
    open_missing_streams()
    faulthandler.register(signal.SIGUSR2, file=sys.__stderr__)
    try:
        yield
    except (InputError, RunError, RuntimeError) as error:
        status = status_of(error)
        texts = [os.environ.get(name, "") for name in RANKS]
        rank = next((int(text) for text in texts if text.isdecimal()), None)
        if rank:
            # Usually all ranks fail: rank 0 prints, and its launcher ends the others.
            time.sleep(3)
        who = f"rank {rank}: " if rank else ""
        script = os.path.basename(sys.argv[0])
        print(f"{script}: {who}{message_of(error)}", file=sys.stderr, flush=True)
        if rank is None:
            sys.exit(status)
        # Under mp.spawn rank 0 holds the store: ranks that connect would print errors.
        time.sleep(1)
        # Skips the destructors of the process group, which can hang or abort.
        os._exit(status)


def end_at_once(*numbers: int) -> None:
    """Let these signals end this process, whatever it does; a later call replaces them."""
    for number in numbers:
        # A Python handler would wait for the current collective.
        signal.signal(number, signal.SIG_DFL)
    if os.getpid() != 1:
        return
    # In a container: Linux drops signals for process 1 unless it has a handler. This one notes the
    # signal in a pipe, which a thread reads.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)

    def wait():
        while (number := os.read(reader, 1)[0]) not in numbers:
            pass
        os._exit(128 + number)

    threading.Thread(target=wait, daemon=True).start()


def open_missing_streams() -> None:
    """Let output go nowhere where a stream is closed; show what a stream cannot encode as \\x."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            # A file that is opened later would get the stream's number, and what C code prints.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            stream = os.fdopen(number, "w")
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        getattr(sys, name).reconfigure(errors="backslashreplace")


def status_of(error: Exception) -> int:
    """The exit status of an error that is reported in one line; raises any other error again."""
    if isinstance(error, (InputError, RunError)):
        return error.status
    if "DataLoader worker" in str(error):
        return RunError.status
    raise error


def message_of(error: Exception) -> str:
    """Its message in one line, without what a DataLoader puts before and after it."""
    message = str(error)
    if message.startswith("Caught "):
        # The traceback of a worker.
        kind = f"{type(error).__module__}.{type(error).__qualname__}: "
        return message.rpartition(f"\n{kind}")[2].strip()
    if "Bus error" in message:
        return (
            "a loader worker found no room in /dev/shm: give the container more "
            "(docker run --shm-size=8g), or use fewer --workers"
        )
    return " ".join(message.split())


def check_world_size(world_size: int) -> None:
    """Raise InputError if a launcher started more processes than those that train together."""
    for name in SIZES:
        started = number_in_environment(name, default=1)
        if started > world_size:
            raise InputError(
                f"a launcher started {started} of these ({name}), and each would train alone: "
                f"use python (hvd.py: horovodrun), or unset {name} if no launcher did"
            )


def number_in_environment(name: str, default: int) -> int:
    """The number in an environment variable, `default` if it is empty; raises InputError."""
    text = os.environ.get(name) or str(default)
    if not text.isdecimal():
        raise InputError(f"{name}={text} in the environment is not a number: unset it")
    return int(text)


def torchrun_env() -> tuple[int, int]:
    """Return (LOCAL_RANK, LOCAL_WORLD_SIZE), which torchrun sets; raises InputError."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE"):
        if not os.environ.get(name):
            raise InputError(
                f"{name} is not set: start it with a launcher, "
                f"torchrun --nproc-per-node=2 {sys.argv[0]}"
            )
        number_in_environment(name, default=0)
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
