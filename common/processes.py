"""How the processes of a run find each other, and how they end: on Ctrl-C, and with their parent."""

import contextlib
import ctypes
import errno
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

import torch.multiprocessing as mp

from common import failures

warned = False  # whether SIGUSR1 came, which a scheduler sends before it takes the machine away


def age():
    """Seconds since this process began; where there is no /proc, of its time on a core."""
    try:
        began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")
    except OSError:
        return time.process_time()


def exit_on_ctrl_c():
    """Let Ctrl-C end this process with status 130 and without a traceback; last.pt is the newest whole checkpoint."""
    hear_signals()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it may be ignored on purpose, as under nohup
        signal.signal(signal.SIGINT, lambda *_: sys.exit(130))


def end_with_parent():
    """Let this process, one of several ranks, end at once on Ctrl-C and (on Linux) when what started it is gone.

    A handler in Python waits until the all-reduce returns that this rank is in, and that waits for a rank that is gone.
    So do the workers of a launcher that got SIGKILL, on a busy GPU.
    """
    hear_signals()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        parent = mp.parent_process()
        if parent and parent.pid != os.getppid():  # it was gone before it could be asked for
            os._exit(1)


def hear_signals():
    """Let kill -USR1 stop the run, with a checkpoint, and -USR2 print where each thread of this process is."""
    signal.signal(signal.SIGUSR1, note_warning)
    signal.siginterrupt(signal.SIGUSR1, False)  # no library that is in a system call need know of it
    faulthandler.register(signal.SIGUSR2, file=sys.__stderr__)


def note_warning(*_):
    global warned
    warned = True


@contextlib.contextmanager
def signals_ignored():
    """Ignore Ctrl-C and SIGUSR1 in the `with` block, and in processes started in it until they hear them."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Watchdog(threading.Thread):
    """Ends this process with one line when `alive` has not been called for `seconds`, and says where it is stuck.

    It does so whatever the collective, the loader or the backend that hangs: the timeout of a torch process group is
    one for data preparation and training, and Horovod's stall check ends nothing under Gloo. Only seconds in which
    this process can run count, so that Ctrl-Z and a laptop's sleep do no harm.
    """

    def __init__(self, seconds):
        super().__init__(daemon=True)
        self.seconds, self.idle = seconds, 0

    def alive(self):
        self.idle = 0

    def run(self):
        while self.idle < self.seconds:
            time.sleep(1)
            self.idle += 1
        stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
        here = Path(__file__).resolve().parents[1]  # in it may be the virtual environment as well
        ours = [frame for frame in stack if Path(frame.filename).resolve().is_relative_to(here)
                and "site-packages" not in frame.filename]
        places = (f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})" for frame in (*ours[-1:], stack[-1]))
        where = ", ".join(dict.fromkeys(places))
        with contextlib.suppress(SystemExit):
            failures.fail(f"no step in {self.seconds} s (--timeout): it hangs in {where}", wait=False)
        time.sleep(1)  # the other ranks, too, say where they are, before a launcher ends them
        os._exit(1)


def join(context):
    """Wait for the processes of `mp.spawn(..., join=False)`; end them all when one fails, or on Ctrl-C.

    Passes SIGUSR1 on to them. Ends with the status of a process that ended with one, as it has said why; an exception
    in one is raised here.
    """
    def pass_on(number, _):
        for pid in context.pids():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(pid, number)

    logging.getLogger("torch.multiprocessing").setLevel(logging.ERROR)  # no line for each that is ended
    signal.signal(signal.SIGUSR1, pass_on)
    try:
        while not context.join():
            pass
    except mp.ProcessExitedException as error:
        if error.exit_code < 0:
            failures.fail(f"process {error.error_index} was ended by {signal.Signals(-error.exit_code).name}: "
                          "SIGKILL is mostly the memory limit's", status=1)
        sys.exit(error.exit_code)
    except mp.ProcessRaisedException as error:
        failures.fail_if_known(str(error))
        raise
    finally:
        for process in context.processes:
            process.kill()


def launched():
    """(LOCAL_RANK, LOCAL_WORLD_SIZE), after checking all that torchrun sets and init_process_group reads.

    Raises SystemExit(2), with one line, where one of them is missing or is not a number that fits the others.
    """
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
    for name in names:
        if name not in os.environ:
            failures.fail(f"{name} is not set: start it with a launcher, torchrun --nproc-per-node=2 {sys.argv[0]}")
        if name != "MASTER_ADDR" and not os.environ[name].isdecimal():
            failures.fail(f"{name} is {os.environ[name]!r}, and not a whole number: a launcher sets it")
    rank, world_size, local_rank, local_world_size = (int(os.environ[name]) for name in names[:4])
    if rank >= world_size or local_rank >= local_world_size:
        failures.fail(f"rank {rank} of {world_size}, local rank {local_rank} of {local_world_size}: ranks count from 0")
    if rank == 0 and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ:  # else torchrun itself listens there
        check_port()
    return local_rank, local_world_size


def check_port():
    """End with status 2 where the ranks cannot meet at MASTER_PORT of this machine, as something listens there."""
    try:
        with socket.create_server(("", int(os.environ["MASTER_PORT"]))):
            pass
    except (OSError, OverflowError, ValueError) as error:
        name = errno.errorcode.get(getattr(error, "errno", None), str(error))
        failures.fail(f"cannot listen on MASTER_PORT={os.environ['MASTER_PORT']} ({name}): set it to another port")


def free_port():
    """A TCP port that nothing listens on now, for the processes of one machine to meet at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
