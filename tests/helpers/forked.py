"""Run commands in processes that are forked from one in which torch is already imported.

A process then starts in 0.1 s instead of 3 s. This is for tests of what a recipe computes, saves
and prints. Tests of launchers, Ctrl-C, orphans and the end of a process start real commands
(launch.py).
"""

import functools
import multiprocessing
import os
import re
import runpy
import shlex
import sys
import tempfile
import time
from pathlib import Path

import launch
import pretended_gpu
import torch.distributed.run

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [  # not common/, which a test can replace by a changed copy
        "filelock",
        "horovod.torch",
        "torch._dynamo",
        "torch.nn.parallel",
        "torch.utils.tensorboard",
        "torchvision.models",
        "tqdm",
    ]
)


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


def run_script(arguments, cwd, environment, printed):
    """In a forked process: run a script as `python` would."""
    multiprocessing.process._parent_process = None  # as in a process that a shell has started
    with open(printed, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(cwd)
    os.environ.update(environment)
    set_threads = functools.partial(torch.set_num_threads, int(environment["OMP_NUM_THREADS"]))
    set_threads()  # OpenMP read its variable when torch was imported
    # A fork makes torch build its thread pool anew at the next call, and two threads that call at
    # once abort with "Invalid thread pool!": call before there is a second thread.
    os.register_at_fork(after_in_child=set_threads)
    # ddp_spawn.py's ranks are forked as well; tests that start it as a command spawn them
    torch.multiprocessing.spawn = functools.partial(
        torch.multiprocessing.start_processes, start_method="fork"
    )
    sys.argv = arguments
    # Not the folders of the repository that pytest has added: a copied script must find its own.
    of_pytest = {str(launch.ROOT), str(launch.ROOT / "imagenet"), str(launch.ROOT / "benchmarks")}
    beside_script = str(Path(arguments[0]).resolve().parent)
    sys.path = [beside_script, *(folder for folder in sys.path[1:] if folder not in of_pytest)]
    sys.path += filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    if "PROVE" in environment:
        # As Python does at its start, with the PYTHONPATH of prove.py.
        runpy.run_path(str(launch.ROOT / "scripts" / "prove_start" / "sitecustomize.py"))
    if "PRETENDED_GPUS" in environment:
        pretended_gpu.run(arguments[0])
    else:
        runpy.run_path(arguments[0], run_name="__main__")


class ForkedJob:
    """The ranks, on this machine, of a command that begins with python, torchrun or horovodrun."""

    def __init__(self, command, cwd, **environment):
        self.command = command
        self.server = None
        self.printed = tempfile.NamedTemporaryFile("r")  # noqa: SIM115
        words = shlex.split(command)
        while re.fullmatch(r"\w+=.*", words[0]):
            name, _, environment[name] = words.pop(0).partition("=")
        if words[0] == "torchrun":
            parsed = torch.distributed.run.parse_args(words[1:])
            arguments = [parsed.training_script, *parsed.training_script_args]
            # The store is there as long as this object is.
            ranks, self.store = torchrun_ranks(int(parsed.nproc_per_node))
        elif words[:3] == ["horovodrun", "--gloo", "-np"]:
            arguments = words[5:]
            ranks, self.server = horovodrun_ranks(int(words[3]))
        else:
            arguments = words[1:]
            ranks = [{}]
        setting = {
            **launch.ENVIRONMENT,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            **environment,
        }
        self.ranks = [
            CONTEXT.Process(
                target=run_script, args=(arguments, str(cwd), setting | rank, self.printed.name)
            )
            for rank in ranks
        ]
        for process in self.ranks:
            process.start()

    def output(self):
        return Path(self.printed.name).read_text()

    def running(self):
        return any(process.is_alive() for process in self.ranks)

    def kill(self):
        for process in self.ranks:
            process.kill()

    def finish(self):
        """Wait for the end, and return the highest exit status."""
        end = time.monotonic() + launch.PATIENCE
        for process in self.ranks:
            process.join(max(0, end - time.monotonic()))
        hangs = self.running()
        self.kill()
        if self.server:
            self.server.stop()
        assert not hangs, f"{self.command} still ran after {launch.PATIENCE} s:\n{self.output()}"
        return max(abs(process.exitcode) for process in self.ranks)


def compute(command, cwd, status=0, **environment):
    """Do what launch.run does, with forked processes unless the launcher is mpirun."""
    if command.startswith("mpirun"):
        return launch.run(command, cwd, status, **environment)
    job = ForkedJob(command, cwd, **environment)
    ended_with = job.finish()
    assert ended_with == status, f"{command} ended with {ended_with}, not {status}:\n{job.output()}"
    return job.output()


def refused(command, cwd):
    """The one line that a command prints before it ends with status 2."""
    before = launch.everything(cwd)
    line = launch.one_line(compute(command, cwd, status=2))
    assert launch.everything(cwd) == before, "a refused run leaves nothing behind"
    return line
