"""Processes: how they end (with one line, on a signal, with their parent), and how they share the cores."""

import ctypes
import faulthandler
import logging
import os
import pickle
import signal
import sys
import threading
import time

import torch
import torch.multiprocessing as mp

RANK_VARIABLES = ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")  # torchrun, horovodrun, mpirun, srun
stop_requested = threading.Event()  # set by SIGTERM or SIGUSR1, which schedulers and launchers send to stop a job


def fail(message: str, status: int = 2):
    """Print one line that says what is wrong and what to do, and exit; status 2 means wrong input."""
    rank = next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), None)
    if not (rank and stop_requested.wait(3)):  # usually all ranks fail: rank 0 prints, and its launcher ends the others
        print(f"{os.path.basename(sys.argv[0])}: {f'rank {rank}: ' * bool(rank)}{message}", file=sys.stderr, flush=True)
    if rank is None:
        sys.exit(status)
    time.sleep(1)  # under mp.spawn rank 0 holds the store: ranks that still connect would print torch's errors
    os._exit(status)  # skips the destructors of the process group, which can hang or abort


def install_signal_handlers() -> None:
    """Ctrl-C ends this process at once, SIGTERM and SIGUSR1 make the run save and stop, SIGUSR2 prints the stacks."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # it is ignored under nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Python handler would wait for the current collective
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: stop_requested.set())
        signal.siginterrupt(number, False)  # restart interrupted system calls: libraries may not expect the signal
    faulthandler.register(signal.SIGUSR2, file=sys.__stderr__)


def die_with_parent(*_) -> None:
    """Let Linux kill this process when its parent dies: a rank that waits in a collective would not notice."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
        if (parent := mp.parent_process()) and parent.pid != os.getppid():  # the parent died before prctl
            os._exit(1)


def arm_watchdog(run) -> None:
    """End this process, with its stacks, unless called again within --timeout; shortly before, write_collectives."""
    faulthandler.dump_traceback_later(run.args.timeout, exit=True, file=sys.__stderr__)
    if "TORCH_FR_BUFFER_SIZE" in os.environ:
        run.recorder.cancel()
        run.recorder = threading.Timer(0.9 * run.args.timeout, write_collectives, [run])
        run.recorder.daemon = True
        run.recorder.start()


def write_collectives(run) -> None:
    """Write the collectives that DDP made last (torch's flight recorder), for torchfrtrace; Gloo's pg_config is bad."""
    recorder = torch._C._distributed_c10d
    trace = pickle.loads((recorder._dump_fr_trace if run.device.type == "cpu" else recorder._dump_nccl_trace)())
    trace["pg_config"] = {"0": {"name": "0", "desc": "default_pg", "ranks": str([*range(run.world_size)])}}
    with open(os.path.join(run.args.log_dir or ".", f"collectives-{run.rank}"), "wb") as file:
        pickle.dump(trace, file)


def torchrun_env() -> tuple[int, int]:
    """Return (LOCAL_RANK, LOCAL_WORLD_SIZE), which torchrun sets."""
    if "LOCAL_RANK" not in os.environ:
        fail(f"LOCAL_RANK is not set: start it with a launcher, torchrun --nproc-per-node=2 {sys.argv[0]}")
    return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])


def share_cores(local_world_size: int) -> None:
    """Use one thread per core of this process's share of the machine, unless OMP_NUM_THREADS is set."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // local_world_size))


def join(context: mp.ProcessContext) -> None:
    """Wait for the processes of mp.spawn(..., join=False), forward signals, exit with the status of one that failed."""
    def pass_on(number, _):
        for pid in [process.pid for process in context.processes if process.is_alive()]:
            os.kill(pid, number)

    logging.getLogger("torch.multiprocessing").setLevel(logging.ERROR)  # else it logs each process that it ends
    signal.signal(signal.SIGUSR1, pass_on)
    signal.signal(signal.SIGTERM, pass_on)
    faulthandler.register(signal.SIGUSR2, file=sys.__stderr__)
    try:
        while not context.join():
            pass
    except KeyboardInterrupt:
        pass_on(signal.SIGINT, None)  # a terminal has told the ranks; `kill -INT PID` has not
        sys.exit(130)
    except mp.ProcessExitedException as error:  # it has printed why, unless a signal killed it
        sys.exit(error.exit_code) if error.exit_code > 0 else fail(str(error), status=1)
