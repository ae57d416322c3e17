"""Ctrl-C, SIGTERM and a launcher that dies, at any time from the start on: no process is left.

What SIGTERM and SIGUSR1 save: test_resume.py.
"""

import contextlib
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from launch import (
    Job,
    free_port,
    need_horovod,
    strategies,
    wait_until,
)
from recipes import ROOT, changed_copy

ENDLESS = "--synthetic 640 --model lenet --device cpu --epochs 100000 --log-dir log"
TORCHRUN = "torchrun --standalone --nproc-per-node=2"
MPIRUN = "mpirun --oversubscribe --bind-to none -np 2 python"


def start_long_run(launcher, cwd):
    """A run of many epochs that is in its second one."""
    if launcher.startswith("hvd"):
        need_horovod(launcher)
    start = {"single": f"python {ROOT}/mnist/single.py", **strategies(2, ROOT / "mnist")}
    command = start[launcher]
    job = Job(f"exec {command} {ENDLESS}", cwd=cwd)
    job.wait_for("epoch 1/")
    return job


@pytest.mark.parametrize("launcher", ["single", *strategies(2, "")])
def test_ctrl_c(launcher, tmp_path):
    job = start_long_run(launcher, tmp_path)
    job.signal(signal.SIGINT)  # as the terminal does: to the whole process group
    status = job.finish()
    # horovodrun ends with 0 if it notices the signal before its ranks
    assert status != 0 or launcher == "hvd_gloo"
    of_a_rank = re.findall(r'File "[^"]*/(?:mnist|common)/', job.output())
    assert not of_a_rank, "no rank prints a traceback"
    # torchrun and horovodrun end with one
    tracebacks_of_its_own = {"ddp_launch": 1, "fsdp": 1, "hvd_gloo": 1}
    assert job.output().count("Traceback") <= tracebacks_of_its_own.get(launcher, 0), job.output()
    assert "leaked" not in job.output()


def test_ctrl_c_while_another_machine_is_awaited(tmp_path):
    port = free_port()
    job = Job(
        f"python {ROOT}/mnist/ddp_spawn.py -n 2 -g 2 -nr 0 --synthetic 512",
        cwd=tmp_path,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )

    def ports():
        return [known.laddr.port for known in psutil.net_connections() if known.laddr]

    # until rank 0 listens and both are connected
    wait_until(lambda: ports().count(port) >= 3, job)
    job.signal(signal.SIGINT)
    assert job.finish() == 130
    assert job.output() == f"-nr 0: all 2 machines wait for each other at 127.0.0.1:{port}\n"


@pytest.mark.parametrize(
    ("launcher", "number"),
    [
        *((launcher, signal.SIGKILL) for launcher in strategies(2, "") if launcher != "fsdp"),
        ("ddp_launch", signal.SIGTERM),
        ("ddp_spawn", signal.SIGINT),
    ],
)
def test_a_launcher_that_is_ended_leaves_no_process(launcher, number, tmp_path):
    job = start_long_run(launcher, tmp_path)
    job.process.send_signal(number)  # to it alone
    # on busy cores Horovod's helpers wait 5 s twice before they end a rank
    assert job.finish() != 0


def test_ranks_end_with_a_launcher_that_ignores_ctrl_c(tmp_path):
    """As in a script's background job, where mp.spawn's processes inherit the ignored SIGINT."""
    job = Job(f"trap '' INT; exec python {ROOT}/mnist/ddp_spawn.py -g 2 {ENDLESS}", cwd=tmp_path)
    job.wait_for("epoch 1/")
    job.signal(signal.SIGINT)
    job.wait_for("epoch 3/")
    job.process.terminate()
    assert job.finish() == 0
    assert "stopped after a signal" in job.output()


@pytest.mark.parametrize("launcher", ["single", "ddp_spawn"])
def test_more_signals_until_it_has_ended(launcher, tmp_path):
    """A scheduler or a user repeats them, also while a saved run ends: it is no failed run."""
    job = start_long_run(launcher, tmp_path)
    while job.running():
        job.process.terminate()
        time.sleep(0.002)
    assert job.finish() == 0
    assert job.output().count("stopped after a signal") == 1


def importing_torch(launcher):
    """The processes of a launcher that have begun to import torch."""
    found = []
    for child in psutil.Process(launcher.pid).children():
        # Some end at once, as the programs that torch looks for.
        with contextlib.suppress(OSError):
            if "libtorch" in Path(f"/proc/{child.pid}/maps").read_text():
                found.append(child)
    return found


@pytest.mark.parametrize(
    "command",
    [
        f"{TORCHRUN} {ROOT}/mnist/ddp_launch.py {ENDLESS}",
        f"python {ROOT}/mnist/ddp_spawn.py -g 2 {ENDLESS}",
        f"{MPIRUN} {ROOT}/mnist/hvd.py {ENDLESS}",
        f"{TORCHRUN} {ROOT}/scripts/doctor.py",
    ],
    ids=["torchrun", "mp.spawn", "mpirun", "doctor"],
)
def test_ranks_end_with_a_launcher_that_is_killed_while_they_start(command, tmp_path):
    """While they import torch, as when a memory limit takes the launcher."""
    if "hvd" in command:
        need_horovod("mpi")
    job = Job(f"exec {command}", tmp_path)
    wait_until(lambda: len(importing_torch(job.process)) >= 2, job)
    job.process.kill()
    # It checks that no process is left.
    job.finish()


@pytest.mark.parametrize("traps", ["", "trap '' TERM; "])
def test_told_to_stop_while_a_machine_is_awaited(traps, tmp_path):
    """SIGTERM, also if it is ignored for the launcher's sake, as in slurm/ddp_2nodes.sh."""
    port = free_port()
    job = Job(
        f"{traps}exec python {ROOT}/mnist/ddp_launch.py {ENDLESS}",
        tmp_path,
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    process = psutil.Process(job.process.pid)
    wait_until(lambda: any(known.laddr.port == port for known in process.net_connections()), job)
    process.send_signal(signal.SIGTERM)
    assert job.finish() == -signal.SIGTERM


BUILD = "    model, optimizer, lines = build(args, device, world_size)\n"


@pytest.mark.parametrize(
    ("name", "line", "command"),
    [
        ("single", "        step(images, labels)\n", "python"),
        ("ddp_launch", "        step(images, labels)\n", TORCHRUN),
        ("ddp_launch", BUILD, TORCHRUN),
        ("hvd", BUILD, MPIRUN),
        ("ddp_spawn", BUILD, "python"),
    ],
    ids=["python", "torchrun", "torchrun, model", "mpirun, model", "mp.spawn, model"],
)
def test_told_to_stop_before_the_first_step(name, line, command, tmp_path):
    """SIGTERM ends a rank whose loader hangs, and those that wait for it, as nothing is to save."""
    if name == "hvd":
        need_horovod("mpi")
    indent = " " * (len(line) - len(line.lstrip()))
    hangs = f"{indent}if {'True' if name == 'single' else 'rank == 1'}:\n"
    hangs += f"{indent}    import time\n{indent}    print('hangs', flush=True)\n"
    hangs += f"{indent}    time.sleep(1000)\n"
    folder = changed_copy(tmp_path, f"mnist/{name}.py", line, hangs + line)
    flags = f"{ENDLESS} -g 2" if name == "ddp_spawn" else ENDLESS
    job = Job(f"exec {command} {folder}/{name}.py {flags}", tmp_path)
    job.wait_for("hangs")
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() != 0
    # What torchrun says when it kills a rank that has not ended for 30 s.
    assert "forcefully exiting" not in job.output()
    assert not (tmp_path / "log" / "last.pt").exists()
