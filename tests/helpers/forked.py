"""Run commands in processes that are forked from one in which torch is already imported.

A process then starts in 0.1 s instead of 3 s. torchrun is torch's own, with its store, its signals
and its ranks as processes of their own. Real commands (launch.py) are for tests of what a shell,
an import or the end of the interpreter does, and of mpirun and horovodrun, which start programs.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import multiprocessing
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import types
from pathlib import Path

import fake_gpu
import launch
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

FROM_SERVER = multiprocessing.get_context("forkserver")
FROM_HERE = multiprocessing.get_context("fork")
FROM_SERVER.set_forkserver_preload(
    [  # not common/, which a test can replace by a changed copy
        "filelock",
        "horovod.torch",
        "psutil",
        "pytest",
        "torch._dynamo",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.run",
        "torch.nn.parallel",
        "torch.utils.tensorboard",
        "torchvision.models",
        "tqdm",
    ]
)


class LikePopen:
    """What subprocess.Popen has, for a process of multiprocessing."""

    def poll(self):
        return self.exitcode

    def wait(self, timeout=None):
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self.name, timeout)
        return self.exitcode

    def send_signal(self, number):
        os.kill(self.pid, number)


class Command(LikePopen, FROM_SERVER.Process):
    """A process that is forked from the one with torch."""


class Rank(LikePopen, FROM_HERE.Process):
    """A process that a forked launcher forks."""


def torchrun_ranks(size):
    """The variables that torchrun gives to each rank of one machine, and the store where they meet.

    The store listens on a port that is free, whatever else runs on this machine.
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)], store


def horovodrun_ranks(size):
    """The variables that `horovodrun --gloo` gives to each rank, and the server where they meet."""
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
    from horovod.runner.gloo_run import create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    slots = get_host_assignments([HostInfo("localhost", size)], size)
    shared = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.start()),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "lo",
    }
    server.init(slots)
    return [{**shared, **create_slot_env_vars(slot)} for slot in slots], server


def run_ranks(words, ranks):
    """Run a script once for each dict of variables in `ranks`, and end with the highest status."""
    processes = [Rank(target=be_rank, args=(words, {**os.environ, **rank})) for rank in ranks]
    for process in processes:
        process.start()
    # Unlike a launcher, this ends no rank because another has failed.
    sys.exit(max(abs(process.wait()) for process in processes))


def run_torchrun(words):
    """Be torchrun, which starts its ranks by a fork."""
    SubprocessHandler._popen = start_rank
    sys.argv = ["torchrun", *words]
    torch.distributed.run.main()


def start_rank(handler, words, environment):
    """In place of torch's SubprocessHandler._popen: fork where it would start Python."""
    # `python -u SCRIPT ARGUMENTS`
    assert words[1] == "-u", words
    rank = Rank(target=be_rank, args=(words[2:], environment, handler._stdout, handler._stderr))
    rank.start()
    return rank


def be_rank(words, environment, stdout=None, stderr=None):
    """In a forked process: be a script that a launcher starts."""
    os.setsid()
    for file, number in ((stdout, 1), (stderr, 2)):
        if file is not None:
            os.dup2(file.fileno(), number)
    reset_signals()
    os.environ.clear()
    os.environ.update(environment)
    run_script(words)
    # multiprocessing skips exit handlers. Horovod needs its own: it tells the other ranks.
    atexit._run_exitfuncs()


def reset_signals():
    """As a program finds them: no handlers but Python's own, and what is ignored stays so."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def run_script(words):
    """In a forked process: run a script as `python` would."""
    # With a parent plain_exits() does not look for code around the script, which is of the tests.
    multiprocessing.process._parent_process = types.SimpleNamespace(pid=os.getppid())
    set_threads = functools.partial(torch.set_num_threads, int(os.environ["OMP_NUM_THREADS"]))
    set_threads()  # OpenMP read its variable when torch was imported
    # A fork makes torch build its thread pool anew at the next call, and two threads that call at
    # once abort with "Invalid thread pool!": call before there is a second thread.
    os.register_at_fork(after_in_child=set_threads)
    # ddp_spawn.py's ranks are forked as well; tests that start it as a command spawn them
    torch.multiprocessing.spawn = functools.partial(
        torch.multiprocessing.start_processes, start_method="fork"
    )
    sys.argv = list(words)
    # Not the folders of the repository that pytest has added: a copied script must find its own.
    of_pytest = {str(launch.ROOT), str(launch.ROOT / "imagenet"), str(launch.ROOT / "benchmarks")}
    beside_script = str(Path(words[0]).resolve().parent)
    sys.path = [beside_script, *(folder for folder in sys.path[1:] if folder not in of_pytest)]
    sys.path += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if "PROVE" in os.environ or "CHECK" in os.environ:
        # As Python does at its start, with the PYTHONPATH of check.py and prove.py.
        hooks = launch.ROOT / "scripts" / "hooks"
        sys.path.append(str(hooks))
        runpy.run_path(str(hooks / "sitecustomize.py"))
    if "FAKE_GPUS" in os.environ:
        fake_gpu.run(words[0])
    else:
        runpy.run_path(words[0], run_name="__main__")


@contextlib.contextmanager
def small_disk(at, size):
    """For this process and what it starts, `at` is a disk of `size`, which is copied at the end."""
    os.makedirs(at, exist_ok=True)
    CLONE_NEWNS = 0x20000
    assert ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", at], check=True)
    try:
        yield
    finally:
        subprocess.run(["cp", "-a", at, "copy"], check=True)


def be_command(words, cwd, environment, printed, agent, disk):
    """In a forked process: be the command `words`, as a shell would start it."""
    os.setsid()
    # A background job ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Its garbage collections need not look at what it has inherited.
    gc.freeze()
    with open(printed, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(cwd)
    os.environ.update(environment)
    with small_disk(*disk) if disk else contextlib.nullcontext():
        start_words(words, agent)


def start_words(words, agent):
    """Run a script, or be the launcher that runs its ranks."""
    if words[0] == "torchrun" and agent:
        run_torchrun(words[1:])
    elif words[0] == "torchrun":
        parsed = torch.distributed.run.parse_args(words[1:])
        ranks, _store = torchrun_ranks(int(parsed.nproc_per_node))
        run_ranks([parsed.training_script, *parsed.training_script_args], ranks)
    elif words[:3] == ["horovodrun", "--gloo", "-np"]:
        # horovodrun --gloo -np 2 python SCRIPT
        ranks, _server = horovodrun_ranks(int(words[3]))
        run_ranks(words[5:], ranks)
    else:
        run_script(words[1:])


started = []


@atexit.register
def kill_those_left():
    """Those of tests that failed: multiprocessing would wait for their end."""
    for process in started:
        if process.is_alive():
            process.kill()


class ForkedJob(launch.Job):
    """A Job in forked processes. Its command begins with python, torchrun or horovodrun --gloo.

    Without `agent` there is no torchrun: its ranks alone, and the highest of their statuses.
    With `disk`, a folder and a size, that folder is a small disk, which is copied at the end.
    """

    def __init__(self, command, cwd, agent=True, disk=None, **environment):
        if disk:
            launch.need_mounts()
        self.agent = agent
        self.disk = disk
        super().__init__(command, cwd, **environment)

    def start(self, cwd, environment):
        words = shlex.split(self.command)
        if words[0] == "exec":
            del words[0]
        while re.fullmatch(r"\w+=.*", words[0]):
            name, _, environment[name] = words.pop(0).partition("=")
        variables = {**launch.setting(), "CUDA_VISIBLE_DEVICES": "", **environment}
        more = (self.printed.name, self.agent, self.disk)
        process = Command(target=be_command, args=(words, str(cwd), variables, *more))
        process.start()
        started.append(process)
        return process

    def owns(self, process):
        # Forks share what /proc says of their environment.
        streams = (f"/proc/{process.pid}/fd/{number}" for number in (1, 2))
        return self.printed.name in map(os.readlink, streams)


def compute(command, cwd, status=0, **environment):
    """Do what launch.run does, with forked processes unless the launcher is mpirun."""
    if command.startswith("mpirun"):
        return launch.run(command, cwd, status, **environment)
    job = ForkedJob(command, cwd, agent=False, **environment)
    ended_with = job.finish()
    assert ended_with == status, f"{command} ended with {ended_with}, not {status}:\n{job.output()}"
    return job.output()


def refused(command, cwd):
    """The one line that a command prints before it ends with status 2."""
    before = launch.everything(cwd)
    line = launch.one_line(compute(command, cwd, status=2))
    assert launch.everything(cwd) == before, "a refused run leaves nothing behind"
    return line
