"""How a launcher starts a recipe, and how the recipe ends: an error is one line."""

import atexit
import ctypes
import faulthandler
import functools
import gc
import io
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import threading
import time
import traceback
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch

from common.errors import InputError, RunError, printable, show
from common.process import signals
from common.process.parent import RANKS, die_with_parent, launched

# torchrun, horovodrun, Open MPI, MPICH, and a step of SLURM
SIZES = (
    "WORLD_SIZE",
    "HOROVOD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "SLURM_STEP_NUM_TASKS",
)
# As in requirements.txt.
OLDEST_TORCH = "2.8"
# Enough for any run, and few enough for programs that try to close every possible file.
OPEN_FILES = 65_536
# The newest checkpoint of the run, in the process that saves it
last_checkpoint: Path | None = None
# Functions that release what a run holds, for a process that outlives it: in a notebook
to_give_back = []
# The types of the exceptions that CAUSES explains
KINDS = (RuntimeError, ValueError, MemoryError, BlockingIOError)
# Causes outside of the code: (how the run ends, words in the error of torch or Horovod, the cause)
CAUSES = (
    (
        RunError,
        (
            "Connection closed by peer",
            "Connection reset by peer",
            "Horovod has been shut down",
            "ncclRemoteError",
        ),
        "another rank has ended: its own output says why; it has none if the rank was killed, for "
        "example at the memory limit",
    ),
    (
        RunError,
        ("Bus error", "unable to allocate shared memory"),
        "a loader worker found no room in /dev/shm: give the container more (docker run "
        "--shm-size=8g; in Kubernetes an emptyDir with medium: Memory), or use fewer --workers",
    ),
    (
        RunError,
        ("BlockingIOError: ", "can't start new thread"),
        "no more processes or threads may be started here: use fewer --workers, set "
        "OMP_NUM_THREADS=1, or raise the limit (ulimit -u, docker run --pids-limit)",
    ),
    (RunError, ("DataLoader worker (pid",), "a loader worker has ended"),
    (
        InputError,
        ("Expected more than 1 value per channel when training",),
        "BatchNorm needs more than one value per channel: take a larger --batch-size",
    ),
    (
        RunError,
        ("out of memory", "MemoryError: ", "DefaultCPUAllocator: ", "Cannot allocate memory"),
        "there is too little memory: lower --batch-size (more processes, or gradients that "
        "accumulate over several batches, keep the global batch)",
    ),
    (
        InputError,
        ("does not have a deterministic implementation",),
        "an operation of the model has no deterministic algorithm: leave out --deterministic",
    ),
    (
        InputError,
        ("Duplicate GPU detected",),
        "two processes of this machine have the same GPU: start fewer, let each see one of its "
        "own, or use --device cpu",
    ),
)


@contextmanager
def plain_exits():
    """End the process with one line on an InputError or RunError, at once on Ctrl-C or SIGTERM.

    SIGUSR2 prints the stacks of all threads. A process that a launcher started dies with it, and
    ends at the end of the block: no code after it runs. If other code runs the script, such as a
    notebook or a profiler, that code continues, and the process is left as it was before.
    """
    die_with_parent()
    # .dev, as a container may have 2.8.0a0, which sorts before 2.8.
    if torch.__version__ < f"{OLDEST_TORCH}.dev":
        too_old = f"torch {torch.__version__} is too old: {OLDEST_TORCH} is the oldest that works"
        end_with_a_line(InputError(f"{too_old} (docs/install.md)"))
    allow_open_files()
    if within_other_code():
        with given_back():
            yield
        return
    end_at_once(signal.SIGTERM)
    # Under nohup SIGINT is ignored, and stays so.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signals.act_on(signal.SIGINT, end_by_ctrl_c)
        # A forked process lacks the thread that handles the signal.
        os.register_at_fork(after_in_child=functools.partial(end_at_once, signal.SIGINT))
    open_missing_streams()
    signals.act_on(signal.SIGUSR2, signals.print_stacks)
    # Python collects garbage twice at exit, a second with torch; the system frees memory anyway.
    # (Rarer collections during the run would save 0.1 s more, but tensors in cycles would pile up.)
    atexit.register(gc.freeze)
    try:
        yield
        # The run is saved. A second signal during Python's exit must not make it fail.
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
    except Exception as error:
        end_with_a_line(explained(error))
    if launched_rank() is not None:
        end_rank()


def allow_open_files() -> None:
    """Raise the soft limit of open files, often 1,024: connections and loader workers need more.

    With Horovod's Gloo a rank opens four files for each other rank; each worker takes five.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # macOS may allow fewer than its hard limit.
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def within_other_code() -> bool:
    """Whether the script that calls plain_exits() was itself started by other Python code."""
    frame = sys._getframe()
    callers = []
    while frame:
        module = frame.f_globals.get("__name__")
        caller = frame.f_code.co_name
        # torchrun --run-path calls the script by _wrap(), which returns a result to torchrun.
        if module == "torch.distributed.elastic.multiprocessing.api" and caller == "_wrap":
            return True
        # runpy is `python -m`, and contextlib the `with` block.
        if module not in (__name__, "contextlib", "runpy"):
            callers.append(frame)
        frame = frame.f_back
    return len(callers) > 1 and multiprocessing.parent_process() is None


@contextmanager
def given_back():
    """Afterwards restore the signal handlers, stop the watchdog, and release what the run holds."""
    global last_checkpoint
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    handlers = {number: signal.getsignal(number) for number in numbers}
    # Python cannot restore a handler that C code has set.
    handlers = {number: handler for number, handler in handlers.items() if handler is not None}
    try:
        yield
    except KeyboardInterrupt:
        if how := how_to_continue():
            show(f"interrupted{how}")
        raise
    except Exception as error:
        end_with_a_line(explained(error))
    finally:
        faulthandler.cancel_dump_traceback_later()
        last_checkpoint = None
        while to_give_back:
            with suppress(OSError):
                to_give_back.pop()()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def end_with_a_line(error: InputError | RunError) -> None:
    """Print `error` in one line, and end this process with its status."""
    # First of all: once rank 0 ends, the launcher kills the others.
    tell_torchrun(str(error))
    rank = launched_rank()
    if within_other_code() and not launched():
        # A notebook continues, even if RANK is set.
        rank = None
    if rank:
        # Usually all ranks fail: rank 0 prints, and the launcher kills the others meanwhile.
        time.sleep(3)
    who = f"rank {rank}: " if rank else ""
    script = os.path.basename(sys.argv[0])
    print(f"{script}: {who}{error}", file=sys.stderr, flush=True)
    if rank is None:
        sys.exit(error.status)
    # Under mp.spawn rank 0 hosts the store: ranks still connecting to it would print errors.
    time.sleep(1)
    # Skip the destructors of the process group, which can hang or abort.
    os._exit(error.status)


def tell_torchrun(said: str, **more: str) -> None:
    """Write the error of this rank to the file that torchrun reads for its summary."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    more["timestamp"] = str(int(time.time()))
    # Without the file, torchrun reports only which rank failed.
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": {"message": said, "extraInfo": more}}))


def launched_rank() -> int | None:
    """The rank that a launcher gave to this process, or None without a launcher."""
    texts = [os.environ.get(name, "") for name in RANKS]
    return next((int(text) for text in texts if text.isdecimal()), None)


def end_rank() -> None:
    """Exit with status 0, as Python would, but without destructors.

    If a thread of Gloo drops a tensor while Python destroys its objects, the process aborts
    (pytorch issue 190489). destroy_process_group() ends these threads only if nothing else refers
    to the group. But DTensor's caches do (for FSDP), torch.distributed.nn (which DDP imports), and
    a DDP wrapper in a reference cycle.
    """
    # What Python does first at exit: wait for threads, and call exit handlers.
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # A full disk or a closed terminal does not make the run fail.
        with suppress(OSError):
            stream.flush()
    os._exit(0)


def end_at_once(number: int) -> None:
    """Let signal `number` end this process, whatever it is doing, until another handler is set."""
    # A Python handler would wait for the current collective.
    signal.signal(number, signal.SIG_DFL)
    if os.getpid() == 1:
        # In a container: Linux ignores signals to process 1 that have no handler.
        end = functools.partial(os._exit, 128 + number)
        signals.act_on(number, end)


def end_by_ctrl_c() -> None:
    """Print how to continue, and end this process as SIGINT does."""
    # By libc: Python's signal() works in the main thread only. If the prints below hang, a second
    # Ctrl-C ends the process.
    SIG_DFL = 0
    ctypes.CDLL(None).signal(signal.SIGINT, SIG_DFL)
    if how := how_to_continue():
        # On a terminal, below the progress bar.
        print(file=sys.stderr, end="\n" if sys.stderr.isatty() else "", flush=True)
        show(f"interrupted{how}")
    os.kill(os.getpid(), signal.SIGINT)
    # In a container: the signal does not end process 1.
    os._exit(128 + signal.SIGINT)


def how_to_continue() -> str:
    """The end of a line that says how to resume, or "" if this process has saved nothing."""
    if last_checkpoint is None or not last_checkpoint.exists():
        return ""
    return f": continue with --resume {last_checkpoint}"


def open_missing_streams() -> None:
    """Replace closed streams by /dev/null; print what a stream cannot encode as \\x escapes."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            # Else the next file opened would get the stream's number, and the output of C code.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            stream = os.fdopen(number, "w")
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        stream = getattr(sys, name)
        # A notebook has streams of its own.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def explained(error: Exception) -> InputError | RunError:
    """`error` as an error of ours, if it is one or CAUSES explains it; raises any other."""
    said = last_words(error)
    if isinstance(error, InputError | RunError):
        return type(error)(said)
    # With its type: NumPy and Python raise some errors without these words.
    text = f"{type(error).__name__}: {error}"
    for kind, words, meaning in CAUSES:
        explains = any(word in text for word in words)
        if explains and isinstance(error, KINDS):
            how = how_to_continue() if kind is RunError else ""
            return kind(f"{meaning} ({said}){how}")
    tell_torchrun(said, py_callstack="".join(traceback.format_exception(error)))
    raise error


def last_words(error: Exception) -> str:
    """The message of `error` in one line, without the traceback of a loader worker."""
    text = str(error) or type(error).__name__
    if text.startswith("Caught "):
        text = re.split(r"\n[\w.]+: ", text)[-1]
    return printable(" ".join(text.split()))


def check_world_size(world_size: int) -> None:
    """Raise InputError if a launcher started more than `world_size` processes."""
    for name in SIZES:
        started = number_in_environment(name, default=1)
        if started > world_size:
            raise InputError(
                f"a launcher started {started} processes ({name}), and each would train alone: "
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
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not os.environ.get(name):
            raise InputError(
                f"{name} is not set: start it with a launcher, "
                f"torchrun --nproc-per-node=2 {sys.argv[0]}"
            )
        number_in_environment(name, default=0)
    return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])


def group_timeout(seconds: float) -> timedelta:
    """The timeout of a process group: an hour more than a step, which the watchdog limits.

    Startup and saves get the extra hour: the others wait while one rank downloads or indexes the
    data, or writes a checkpoint. NCCL's default is 10 minutes.
    """
    return timedelta(seconds=seconds, hours=1)


def leave_restart_to_torchrun(stop) -> None:
    """Under torchrun --max-restarts, end a rank that got no signal itself with status 1.

    torchrun restarts all ranks if one ends with status 1. So they resume from the checkpoint
    without the node that was told to stop. A launcher that signals all ranks does so within 2 s.
    """
    if number_in_environment("TORCHELASTIC_MAX_RESTARTS", default=0) == 0:
        return
    for _ in range(20):
        if stop.requested:
            return
        time.sleep(0.1)
    os._exit(1)
