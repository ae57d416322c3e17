"""Processes that end before their first step: their launcher is killed, or they are told to."""

import signal
import time

import psutil
import pytest
from launch import Job, free_port, need_horovod
from recipes import ROOT, changed_copy

FLAGS = "--synthetic 320 --model lenet --device cpu --epochs 100000 --log-dir log"
TORCHRUN = "torchrun --standalone --nproc-per-node=2"
MPIRUN = "mpirun --oversubscribe --bind-to none -np 2 python"


def ranks_of(launcher):
    """The processes in Python that a launcher has started."""
    children = psutil.Process(launcher.pid).children()
    return [child for child in children if "python" in child.name()]


@pytest.mark.parametrize(
    "command",
    [
        f"{TORCHRUN} {ROOT}/mnist/ddp_launch.py {FLAGS}",
        f"python {ROOT}/mnist/ddp_spawn.py -g 2 {FLAGS}",
        f"{MPIRUN} {ROOT}/mnist/hvd.py {FLAGS}",
        f"{TORCHRUN} {ROOT}/scripts/doctor.py",
    ],
    ids=["torchrun", "mp.spawn", "mpirun", "doctor"],
)
def test_ranks_end_with_a_launcher_that_is_killed_while_they_start(command, tmp_path):
    """While they import torch, as when a memory limit takes the launcher."""
    if "hvd" in command:
        need_horovod("mpi")
    job = Job(f"exec {command}", tmp_path)
    while len(ranks_of(job.process)) < 2:
        assert job.running()
    job.process.kill()
    # It checks that no process is left. A rank needs some seconds to import torch.
    job.finish()


@pytest.mark.parametrize("traps", ["", "trap '' TERM; "])
def test_told_to_stop_while_a_machine_is_awaited(traps, tmp_path):
    """SIGTERM, also if it is ignored for the launcher's sake, as in slurm/ddp_2nodes.sh."""
    port = free_port()
    job = Job(
        f"{traps}exec python {ROOT}/mnist/ddp_launch.py {FLAGS}",
        tmp_path,
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    process = psutil.Process(job.process.pid)
    while not any(known.laddr.port == port for known in process.net_connections()):
        assert job.running(), job.output()
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert job.finish() == -signal.SIGTERM


@pytest.mark.parametrize(
    ("name", "line", "command"),
    [
        ("single", "            images, labels = to_device(batch, device)\n", "python"),
        ("ddp_launch", "            images, labels = to_device(batch, device)\n", TORCHRUN),
        ("ddp_launch", "    torch.manual_seed(args.seed)\n", TORCHRUN),
        ("hvd", "    torch.manual_seed(args.seed)\n", MPIRUN),
        ("ddp_spawn", "    torch.manual_seed(args.seed)\n", "python"),
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
    flags = f"{FLAGS} -g 2" if name == "ddp_spawn" else FLAGS
    job = Job(f"exec {command} {folder}/{name}.py {flags}", tmp_path)
    job.wait_for("hangs")
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() != 0
    # What torchrun says when it kills a rank that has not ended for 30 s.
    assert "forcefully exiting" not in job.output()
    assert not (tmp_path / "log" / "last.pt").exists()
