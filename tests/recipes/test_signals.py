"""Ctrl-C, SIGTERM and a launcher that dies, at any time from the start on: no process is left.

What SIGTERM and SIGUSR1 save: test_resume.py.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from forked import ForkedJob
from launch import Job, free_port, need_horovod, strategies, wait_until
from recipes import ROOT, STEP, changed_copy

from common.process import parent

ENDLESS = "--synthetic 640 --model lenet --device cpu --epochs 100000 --log-dir log"
TORCHRUN = "torchrun --standalone --nproc-per-node=2"


def start_long_run(start, launcher, cwd):
    """A run of many epochs that is in its second one. `start` is Job or ForkedJob."""
    if launcher.startswith("hvd"):
        need_horovod(launcher)
    commands = {"single": f"python {ROOT}/mnist/single.py", **strategies(2, ROOT / "mnist")}
    job = start(f"exec {commands[launcher]} {ENDLESS}", cwd)
    job.wait_for("epoch 1/")
    return job


@pytest.mark.parametrize("launcher", ["single", "ddp_spawn", "ddp_launch", "hvd_gloo", "hvd_mpi"])
def test_ctrl_c(launcher, tmp_path):
    """With each real launcher. fsdp.py, too, is started by torchrun."""
    job = start_long_run(Job, launcher, tmp_path)
    job.signal(signal.SIGINT)  # as the terminal does: to the whole process group
    status = job.finish()
    # horovodrun ends with 0 if it notices the signal before its ranks
    assert status != 0 or launcher == "hvd_gloo"
    # horovodrun sends SIGTERM to its ranks, which save. mpirun does not wait for what they print.
    says_how = ": continue with --resume log/last.pt\n" in job.output()
    assert says_how or launcher == "hvd_mpi"
    of_a_rank = re.findall(r'File "[^"]*/(?:mnist|common)/', job.output())
    assert not of_a_rank, "no rank prints a traceback"
    # torchrun and horovodrun end with one
    tracebacks_of_its_own = {"ddp_launch": 1, "hvd_gloo": 1}
    assert job.output().count("Traceback") <= tracebacks_of_its_own.get(launcher, 0), job.output()
    assert "leaked" not in job.output()


def test_ctrl_c_while_another_machine_is_awaited(tmp_path):
    port = free_port()
    job = ForkedJob(
        f"python {ROOT}/mnist/ddp_spawn.py -n 2 -g 2 -nr 0 --synthetic 512",
        tmp_path,
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
        ("ddp_spawn", signal.SIGKILL),
        ("ddp_spawn", signal.SIGINT),
        ("ddp_launch", signal.SIGKILL),
        ("ddp_launch", signal.SIGTERM),
    ],
)
def test_a_launcher_that_is_ended_leaves_no_process(launcher, number, tmp_path):
    job = start_long_run(ForkedJob, launcher, tmp_path)
    job.process.send_signal(number)  # to it alone
    assert job.finish() != 0


RANK = f"""
import sys, time
sys.path.append({str(ROOT)!r})
from common.process.parent import die_with_parent
die_with_parent()
print("rank runs", flush=True)
time.sleep(60)
open("outlived", "w")
"""


@pytest.mark.parametrize("launcher", ["hvd_gloo", "hvd_mpi"])
def test_ranks_end_with_horovodrun_and_mpirun(launcher, tmp_path):
    """When these are killed. The ranks call what a recipe calls, but import no torch."""
    need_horovod(launcher)
    (tmp_path / "hvd.py").write_text(RANK)
    job = Job(f"exec {strategies(2, tmp_path)[launcher]}", tmp_path)
    wait_until(lambda: job.output().count("rank runs") == 2, job)
    job.process.kill()
    # on busy cores Horovod's helpers wait 5 s twice before they end a rank
    assert job.finish() == -signal.SIGKILL
    assert not (tmp_path / "outlived").exists()


def ignores(number, to, recipe):
    """Copy a recipe, which then finds that a shell has let it ignore a signal: `trap '' INT`."""
    line = "import torch\n"
    ignore = f"import signal\nsignal.signal({int(number)}, signal.SIG_IGN)\n"
    return changed_copy(to, recipe, line, ignore + line)


def test_ranks_end_with_a_launcher_that_ignores_ctrl_c(tmp_path):
    """As in a script's background job, where mp.spawn's processes inherit the ignored SIGINT."""
    folder = ignores(signal.SIGINT, tmp_path, "mnist/ddp_spawn.py")
    job = ForkedJob(f"python {folder}/ddp_spawn.py -g 2 {ENDLESS}", tmp_path)
    job.wait_for("epoch 1/")
    job.signal(signal.SIGINT)
    job.wait_for("epoch 3/")
    job.process.terminate()
    assert job.finish() == 0
    assert "stopped after a signal" in job.output()


@pytest.mark.parametrize(
    ("start", "launcher"), [(Job, "single"), (ForkedJob, "ddp_spawn")], ids=["single", "ddp_spawn"]
)
def test_more_signals_until_it_has_ended(start, launcher, tmp_path):
    """A scheduler or a user repeats them, also while a saved run ends: it is no failed run."""
    job = start_long_run(start, launcher, tmp_path)
    while job.running():
        job.process.terminate()
        time.sleep(0.002)
    assert job.finish() == 0
    assert job.output().count("stopped after a signal") == 1
    assert not (tmp_path / "log" / ".in-use").exists(), "else its successor would wait"


def importing_torch(launcher):
    """The processes of a launcher that have begun to import torch."""
    found = []
    for child in psutil.Process(launcher.pid).children():
        # Some end at once, as the programs that torch looks for.
        with contextlib.suppress(OSError):
            if "libtorch" in Path(f"/proc/{child.pid}/maps").read_text():
                found.append(child)
    return found


def test_ranks_end_with_a_launcher_that_is_killed_while_they_start(tmp_path):
    """While they import torch, as when a memory limit takes the launcher."""
    job = Job(f"exec {TORCHRUN} {ROOT}/mnist/ddp_launch.py {ENDLESS}", tmp_path)
    wait_until(lambda: len(importing_torch(job.process)) >= 2, job)
    job.process.kill()
    # It checks that no process is left.
    job.finish()


def test_a_process_of_mp_spawn_whose_launcher_has_died_ends(monkeypatch):
    """It notices at its start: Linux only tells of deaths that are still to come."""
    died = SimpleNamespace(pid=-1)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: died)
    rank = os.fork()
    if rank == 0:
        try:
            parent.die_with_parent()
        finally:
            os._exit(0)
    _, status = os.waitpid(rank, 0)
    assert os.waitstatus_to_exitcode(status) == 1


def test_told_to_stop_while_a_machine_is_awaited(tmp_path):
    """By SIGTERM, though it is ignored for the launcher's sake, as in slurm/ddp_2nodes.sh."""
    folder = ignores(signal.SIGTERM, tmp_path, "mnist/ddp_launch.py")
    port = free_port()
    job = ForkedJob(
        f"python {folder}/ddp_launch.py {ENDLESS}",
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


BUILD = "    model = digits.build(args.model).to(world.device)\n"


@pytest.mark.parametrize(
    ("name", "line", "command"),
    [
        ("single", STEP, "python"),
        ("ddp_launch", STEP, TORCHRUN),
        ("ddp_launch", BUILD, TORCHRUN),
        ("ddp_spawn", BUILD, "python"),
    ],
    ids=["python", "torchrun", "torchrun, model", "mp.spawn, model"],
)
def test_told_to_stop_before_the_first_step(name, line, command, tmp_path):
    """SIGTERM ends a rank whose loader hangs, and those that wait for it, as nothing is to save."""
    indent = " " * (len(line) - len(line.lstrip()))
    hangs = f"{indent}if {'True' if name == 'single' else 'world.rank == 1'}:\n"
    hangs += f"{indent}    import time\n{indent}    print('hangs', flush=True)\n"
    hangs += f"{indent}    time.sleep(1000)\n"
    folder = changed_copy(tmp_path, f"mnist/{name}.py", line, hangs + line)
    flags = f"{ENDLESS} -g 2" if name == "ddp_spawn" else ENDLESS
    job = ForkedJob(f"{command} {folder}/{name}.py {flags}", tmp_path)
    job.wait_for("hangs")
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() != 0
    # What torchrun says when it kills a rank that has not ended for 30 s.
    assert "forcefully exiting" not in job.output()
    assert not (tmp_path / "log" / "last.pt").exists()
