"""Run recipes in processes that are forked from one in which torch is already imported.

A process then starts in 0.1 s instead of 3 s. This is for tests of what a recipe computes. Tests of launchers, signals
and orphans start real commands (launch.py).
"""

import multiprocessing
import os
import runpy
import shlex
import sys
import tempfile
import time
from pathlib import Path

import launch
from torch.distributed.elastic.utils.distributed import get_free_port

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([  # not common/, of which a test can have a changed copy
    "filelock", "torch._dynamo", "torch.nn.parallel", "torch.utils.tensorboard", "torchvision.models", "tqdm"])


def ranks_of(command):
    """(the script with its arguments, the environment of each rank), or None for a command that cannot be forked."""
    words = shlex.split(command)
    if words[0] == "python" and not words[1].endswith("ddp_spawn.py"):
        return words[1:], [{}]
    if words[:2] == ["torchrun", "--standalone"]:
        size, port = words[2].removeprefix("--nproc-per-node="), str(get_free_port())
        return words[3:], [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
                            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} for rank in range(int(size))]
    return None


def start(arguments, cwd, environment, printed):
    """In a forked process: run a script as `python` would."""
    multiprocessing.process._parent_process = None  # as in a process that a shell has started
    with open(printed, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(cwd)
    os.environ.update(environment)
    sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


def compute(command, cwd, status=0, timeout=150, **environment):
    """Run a command as launch.run does, but fork what `python` or `torchrun --standalone` would start."""
    if not (ranks := ranks_of(command)):
        return launch.run(command, cwd, status, timeout, **environment)
    arguments, ranks = ranks
    setting = {**launch.ENVIRONMENT, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    with tempfile.NamedTemporaryFile("r") as printed:
        processes = [CONTEXT.Process(target=start, args=(arguments, str(cwd), setting | rank, printed.name))
                     for rank in ranks]
        for process in processes:
            process.start()
        end = time.monotonic() + timeout
        for process in processes:
            process.join(max(0, end - time.monotonic()))
        hanging = [process for process in processes if process.is_alive()]
        for process in hanging:
            process.kill()
        output, ended_with = Path(printed.name).read_text(), max(process.exitcode or 0 for process in processes)
    assert not hanging, f"{command} still ran after {timeout} s:\n{output}"
    assert ended_with == status, f"{command} ended with {ended_with}, not {status}:\n{output}"
    return output
