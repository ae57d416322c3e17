"""The launch files of slurm/ as they stand, on a cluster of two nodes."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import psutil
import pytest
from cluster import MPI_INIT_CAN_CRASH, Cluster, SlurmJob, link_repository, need_cluster
from forked import compute
from launch import (
    PATIENCE,
    Job,
    checkpoint,
    largest_difference,
    need_horovod,
    on_small_disk,
    one_line,
    place,
    run,
)
from recipes import ROOT

from benchmarks import jpeg_tree

FILES = sorted((ROOT / "slurm").glob("*.sh"))
JOBS = [file for file in FILES if "#SBATCH --nodes" in file.read_text()]
# Two epochs of two steps of 32 images: rounding grows from step to step, and after few steps the
# bound can be tight
TRAINING = "--synthetic 64 --epochs 2 --model lenet --wd 5e-4 --warmup-epochs 0 --device cpu"
SIZE = f"{TRAINING} --batch-size 8 --lr 0.01"  # on four processes
TWO_BY_TWO = "--nodes=2 --gpus-per-node=2 --cpus-per-task=2"
# A task for each process. With torchrun a task is one torchrun, for all processes of a node.
FOUR_TASKS = f"{TWO_BY_TWO} --ntasks-per-node=2 --cpus-per-task=1"
LAUNCHES = {
    "ddp srun": f"{FOUR_TASKS} slurm/ddp_srun_2nodes.sh mnist/ddp_launch.py {SIZE}",
    "hvd mpirun": f"{FOUR_TASKS} slurm/hvd_2nodes.sh mnist/hvd.py {SIZE}",
    "hvd srun": f"{FOUR_TASKS} slurm/hvd_2nodes.sh mnist/hvd.py {SIZE}",
    # More tasks than a script starts processes.
    "single of two tasks": (
        "--ntasks-per-node=2 --cpus-per-task=1 slurm/single.sh mnist/single.py "
        f"{TRAINING} --batch-size 32 --lr 0.04"
    ),
    "ddp of two tasks": (
        "--nodes=2 --gpus-per-node=2 --ntasks-per-node=2 --cpus-per-task=1 slurm/ddp_2nodes.sh "
        f"mnist/ddp_launch.py {SIZE}"
    ),
    "ddp_spawn of two tasks": (
        "--nodes=2 --gpus-per-node=2 --ntasks-per-node=2 --cpus-per-task=1 "
        f"slurm/ddp_spawn_2nodes.sh mnist/ddp_spawn.py {SIZE}"
    ),
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """The weights of mnist/single.py with the global batch of LAUNCHES."""
    folder = tmp_path_factory.mktemp("one")
    run(
        f"python {ROOT}/mnist/single.py {TRAINING} --batch-size 32 --lr 0.04 --log-dir log",
        cwd=folder,
    )
    return checkpoint(folder / "log")["model"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=MPI_INIT_CAN_CRASH if name == "hvd srun" else ())
        for name in LAUNCHES
    ],
)
def test_launch(name, cluster, one_process, tmp_path):
    if "hvd" in name:
        need_horovod("mpi")
    job = SlurmJob(cluster, tmp_path, LAUNCHES[name], LAUNCHER=name.split()[-1])
    log = job.finish()
    world_size = 1 if name == "single of two tasks" else 4
    assert len(re.findall(rf"^mnist: .* world size {world_size} \|", log, re.MULTILINE)) == 1
    assert log.count("epoch 2/2: ") == 1
    assert f"world size {world_size}" in checkpoint(job.runs())["config"]["saved_by"]
    assert place(checkpoint(job.runs())) == (2, 0)
    assert largest_difference(checkpoint(job.runs())["model"], one_process) < 1e-6


STAGED = (
    f"{TWO_BY_TWO} slurm/ddp_2nodes.sh imagenet/ddp_launch.py --data-dir=shared --device cpu "
    "--arch lenet --image-size 32 -b 2 -j 0 --epochs 1"
)


def test_staged_archives(cluster, tmp_path):
    """Each rank reads the copies, with their indexes. Meanwhile each node measures itself."""
    jpeg_tree.make(tmp_path / "photos", 20)
    compute(f"python {ROOT}/scripts/pack.py photos shared", tmp_path)
    disk = str(tmp_path / "disk")
    job = SlurmJob(cluster, tmp_path, STAGED, STAGE="1", SLURM_TMPDIR=disk, USAGE="usage")
    log = job.finish()
    for node in ("node1", "node2"):
        assert re.search(rf"^{node}, mean of 0:\d\d:\d\d: cpu \d+%, [\d.]+ GiB$", log, re.M)
        lines = (tmp_path / "usage" / f"{node}.jsonl").read_text().splitlines()
        assert 0 < json.loads(lines[0])["cpu/use"] <= 1
        assert list((tmp_path / "usage" / node).glob("events.*"))
    staged = tmp_path / "disk" / f"staged-{job.id}"
    assert f"20 images in {staged}/train.tar and 4 images in {staged}/val.tar" in log
    assert "making the index" not in log
    assert log.count("epoch 1/1: ") == 1
    assert not list(staged.glob(".partial*"))


WHERE = """
import shutil
import sys

print(sys.prefix, shutil.which("torchrun"))
"""


def test_staged_environment(cluster, tmp_path):
    """torchrun, and the Python of each rank, are those that were unpacked. They import torch."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    # All packages would take 5 GB.
    (packages / "all.pth").write_text(sysconfig.get_paths()["purelib"])
    torchrun = Path(sys.executable).with_name("torchrun").read_text()
    (tmp_path / "env" / "bin" / "torchrun").write_text(
        torchrun.replace(torchrun.splitlines()[0], f"#!{tmp_path}/env/bin/python3")
    )
    (tmp_path / "env" / "bin" / "torchrun").chmod(0o755)
    subprocess.run(["tar", "-cf", "env.tar", "-C", "env", "."], cwd=tmp_path, check=True)
    shutil.rmtree(tmp_path / "env")
    (tmp_path / "where.py").write_text(WHERE)
    disk = str(tmp_path / "disk")
    flags = "--nodes=2 --gpus-per-node=1 --cpus-per-task=1 slurm/ddp_2nodes.sh where.py"
    job = SlurmJob(cluster, tmp_path, flags, STAGE_ENV="env.tar", SLURM_TMPDIR=disk)
    log = job.finish()
    staged = f"{disk}/env-{job.id}"
    assert log.count(f"{staged} {staged}/bin/torchrun\n") == 2
    job = SlurmJob(cluster, tmp_path, flags, STAGE_ENV="none.tar", SLURM_TMPDIR=disk)
    assert "STAGE_ENV=none.tar: there is no such file" in one_line(job.finish("FAILED"))


def test_staging_without_archives(cluster, tmp_path):
    (tmp_path / "shared").mkdir()
    job = SlurmJob(cluster, tmp_path, STAGED, STAGE="1", SLURM_TMPDIR=str(tmp_path / "disk"))
    assert one_line(job.finish("FAILED")).startswith("stage.sh: there is no archive in shared")


def test_a_warning_while_archives_are_copied(tmp_path):
    """The copy goes on. Only ranks know what to do at the time limit."""
    (tmp_path / "shared").mkdir()
    os.mkfifo(tmp_path / "shared" / "train.tar")
    job = Job(f"exec bash {ROOT}/slurm/stage.sh --node shared disk", cwd=tmp_path)
    # Opens when cp reads.
    with open(tmp_path / "shared" / "train.tar", "wb") as slow:
        for process in (job.process, *psutil.Process(job.process.pid).children(recursive=True)):
            os.kill(process.pid, signal.SIGUSR1)
        slow.write(b"all of it")
    assert job.finish() == 0
    assert (tmp_path / "disk" / "train.tar").read_bytes() == b"all of it"


def test_a_full_local_disk(tmp_path):
    """What fits is not copied either, and one line names the node."""
    (tmp_path / "shared").mkdir()
    for name in ("train.tar", "val.tar"):
        (tmp_path / "shared" / name).write_bytes(bytes(800 << 10))
    stage = f"bash {ROOT}/slurm/stage.sh --node shared disk"
    line = one_line(run(on_small_disk(stage, tmp_path, "1m", "disk"), tmp_path, status=2))
    assert line == f"stage.sh: {socket.gethostname()} has 1.0MB left in disk, and 1.6MB are needed"
    assert not list((tmp_path / "copy").iterdir())


@pytest.mark.parametrize("number", ["unknown", "uneven"])
def test_tasks_whose_number_differs_between_nodes(number, cluster, tmp_path):
    link_repository(tmp_path)
    file = "slurm/ddp_srun_2nodes.sh"
    if number == "unknown":
        script = (ROOT / file).read_text()
        file = "copy.sh"
        (tmp_path / file).write_text(script.replace("#SBATCH --ntasks-per-node=4\n", ""))
    flags = "--nodes=2 --ntasks=3 --cpus-per-task=1 --gpus-per-node=0"
    log = SlurmJob(cluster, tmp_path, f"{flags} {file} mnist/ddp_launch.py").finish("FAILED")
    assert one_line(log).startswith("ddp_srun_2nodes.sh: use --ntasks-per-node in place of")


# A python for which the host's own name is 127.0.1.1, as Debian's /etc/hosts has it.
AS_ON_DEBIAN = """\
#!/usr/bin/env bash
file=$(mktemp)
sed "s/^.* $(hostname)$/127.0.1.1 $(hostname)/" /etc/hosts > "$file"
exec unshare --mount bash -c 'mount --bind $0 /etc/hosts; exec "$@"' "$file" {python} "$@"
"""


def test_a_host_whose_name_is_a_loopback_address(cluster, tmp_path):
    """The message and the cure of docs/clusters.md."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(AS_ON_DEBIAN.format(python=sys.executable))
    python.chmod(0o755)
    environment = {
        "PATH": f"{python.parent}:{cluster.environment['PATH']}",
        "TMPDIR": str(tmp_path),
    }
    job = f"{FOUR_TASKS} --ntasks-per-node=1 slurm/ddp_srun_2nodes.sh mnist/ddp_launch.py {SIZE}"
    log = SlurmJob(cluster, tmp_path, job, **environment).finish("FAILED")
    assert "Gloo connectFullMesh failed" in log
    assert "remote=[127.0.1.1]" in log
    message = "`Gloo connectFullMesh failed`, with `remote=[127.0.1.1]`"
    assert message in (ROOT / "docs" / "clusters.md").read_text()
    SlurmJob(cluster, tmp_path, job, **environment, GLOO_SOCKET_IFNAME="eth0").finish()


def test_array_and_its_table(cluster, tmp_path):
    flags = (
        "--cpus-per-task=1 --ntasks-per-node=2 --array=0-1 slurm/array.sh mnist/single.py "
        "--synthetic 320 --epochs 2 --model lenet"
    )
    for environment, name, values in (
        ({}, "seed", "01"),
        ({"RATES": "0.01 0.03"}, "lr", ("0.01", "0.03")),
    ):
        job = SlurmJob(cluster, tmp_path, flags, **environment)
        job.finish()
        table = run(
            f"python scripts/summarize_runs.py runs/array-{job.id}", cwd=tmp_path
        ).splitlines()
        assert table[0] == f"| run | {name} | epochs | best val accuracy | last val loss |"
        assert [row.split(" | ")[:3] for row in table[2:]] == [
            [f"| runs/array-{job.id}/{task}", value, "2/2"] for task, value in enumerate(values)
        ]
    # As when its loss is not finite.
    results = tmp_path / "runs" / f"array-{job.id}" / "1" / "results.jsonl"
    lines = results.read_text().splitlines(keepends=True)
    results.write_text("".join(line for line in lines if '"evaluation"' not in line))
    table = run(f"python scripts/summarize_runs.py runs/array-{job.id}", cwd=tmp_path)
    assert table.endswith("| 0/2 | - | - |\n")
    refusal = run("python scripts/summarize_runs.py runs", cwd=tmp_path, status=2)
    assert len(refusal.splitlines()) == 1


def test_a_cluster_without_gpus(tmp_path):
    """SLURM refuses the file as it stands; --gpus-per-node=0 is all that a user changes."""
    need_cluster()
    with Cluster(GPUS="0") as cluster:
        cluster.run("sbatch slurm/ddp_2nodes.sh", status=1)
        job = SlurmJob(
            cluster,
            tmp_path,
            f"--gpus-per-node=0 --cpus-per-task=2 slurm/ddp_2nodes.sh mnist/ddp_launch.py {SIZE}",
        )
        assert "world size 4 |" in job.finish()


@pytest.mark.parametrize("file", JOBS, ids=lambda file: file.name)
def test_slurm_takes_the_file_as_it_stands(file, cluster):
    cluster.run(f"sbatch --test-only slurm/{file.name}")


def test_what_the_files_name_is_there():
    assert len(JOBS) == 7
    for file in FILES:
        text = file.read_text()
        assert not re.search(r"^#\s+SBATCH|^##SBATCH", text, re.MULTILINE), (
            f"{file}: a line that SLURM ignores"
        )
        named = set(
            re.findall(r"\b(?:slurm|scripts|mnist|cifar10|imagenet)/\w+\.(?:py|sh)\b", text)
        )
        assert named, file
        assert not [name for name in named if not (ROOT / name).exists()]
        if file in JOBS:
            options = set(re.findall(r"^#SBATCH --([\w-]+)", text, re.MULTILINE))
            assert {
                "job-name",
                "nodes",
                "ntasks-per-node",
                "gpus-per-node",
                "cpus-per-task",
                "time",
                "output",
                "open-mode",
                "requeue",
                "signal",
            } <= options
            # Else a run that is killed in a long epoch begins it again.
            assert "--checkpoint-every " in text


HOSTS = {
    "horovodrun -H": "horovodrun -np 2 -H node1:1,node2:1 python cifar10/hvd.py",
    "horovodrun.sh": "slurm/horovodrun.sh hosts cifar10/hvd.py",
    "mpirun.sh": "slurm/mpirun.sh hosts cifar10/hvd.py",
    "mpirun.sh, DDP": "slurm/mpirun.sh hosts cifar10/ddp_launch.py",
}


HOST_FILE = """\
# two machines

node1 slots=1 max_slots=2   # the first
node2:1
"""


@pytest.mark.parametrize(
    ("content", "hosts"),
    [
        (HOST_FILE, "node1:1,node2:1"),
        (HOST_FILE.replace("\n", "\r\n"), "node1:1,node2:1"),
        ("\ufeff" + HOST_FILE, "node1:1,node2:1"),
        ("node1\nnode2 slots = 3\nnode1\tslots=02 max-slots=4", "node1:3,node2:3"),
    ],
)
def test_host_files(content, hosts, tmp_path):
    """Horovod 1428, 2090."""
    (tmp_path / "hosts").write_text(content)
    assert run(f"{ROOT}/slurm/hosts.sh hosts", tmp_path) == f"{hosts}\n"


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("node1\nnode2 slots=many", "line 2 has slots=many"),
        ("node1 4", "line 1 has 4"),
        ("node1:", "line 1 has slots="),
        ("\n\n-np 4", "line 3 has -np"),
        ("node1 slots=0", "line 1 has no slot"),
        ("# nothing", "it names no host"),
    ],
)
@pytest.mark.parametrize("launcher", ["horovodrun.sh", "mpirun.sh"])
def test_wrong_host_files(launcher, content, what, tmp_path):
    link_repository(tmp_path)
    (tmp_path / "hosts").write_text(content)
    output = run(f"slurm/{launcher} hosts", tmp_path, status=2)
    assert output == f"hosts: {what}; a line is: node1 slots=4\n"
    for file in ("", ".", "none"):
        line = one_line(run(f"slurm/{launcher} {file}", tmp_path, status=2))
        assert line.startswith(f"hosts.sh: cannot read the file '{file}': ")


@pytest.mark.parametrize("launcher", ["horovodrun", "mpirun"])
def test_launchers_work_from_any_folder(launcher, tmp_path):
    (tmp_path / "hosts").write_text("node1 slots=2")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / launcher).write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "bin" / launcher).chmod(0o755)
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    words = run(f"{ROOT}/slurm/{launcher}.sh hosts", tmp_path, PATH=path).splitlines()
    assert ROOT / "cifar10" / "hvd.py" in [Path(word).resolve() for word in words]


def test_a_tilde_in_the_folder_of_archives(tmp_path):
    """A shell leaves it as it is in --data-dir=~/photos, and common/flags.py does not."""
    command = f"bash {ROOT}/slurm/stage.sh true --data-dir=~/photos"
    line = one_line(run(command, tmp_path, status=2, HOME=str(tmp_path)))
    assert line.startswith(f"stage.sh: there is no archive in {tmp_path}/photos ")


@pytest.mark.parametrize("name", HOSTS)
def test_hosts_reached_by_ssh(name, cluster, tmp_path):
    need_horovod("mpi")
    link_repository(tmp_path)
    (tmp_path / "hosts").write_text(HOST_FILE)
    output = cluster.run(
        f"{HOSTS[name]} --synthetic 320 -b 16 --model lenet --epochs 1 --log-dir log", cwd=tmp_path
    )
    assert len(re.findall(r"cifar10: .* world size 2 \|", output)) == 1
    assert (tmp_path / "log" / "last.pt").exists()


@pytest.mark.parametrize("name", ["torchrun", "ddp_spawn"])
def test_two_machines_without_slurm(name, cluster, tmp_path):
    """The README's lines for two machines, one started on each, here with one process."""
    link_repository(tmp_path)
    lines = {
        "torchrun": "torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d "
        "--rdzv-endpoint=node1:29500 cifar10/ddp_launch.py",
        "ddp_spawn": (
            "MASTER_ADDR=node1 MASTER_PORT=29500 python cifar10/ddp_spawn.py -n 2 -g 1 -nr {}"
        ),
    }
    line = f"{lines[name]} --synthetic 320 -b 16 --model lenet --epochs 1 --log-dir log"
    here = f"cd {tmp_path}; export PATH={cluster.environment['PATH']};"
    output = cluster.run(
        " & ".join(f"ssh node{nr + 1} '{here} {line.format(nr)}'" for nr in (0, 1)) + " & wait"
    )
    assert len(re.findall(r"^cifar10: .* world size 2 \|", output, re.MULTILINE)) == 1
    assert (tmp_path / "log" / "last.pt").exists()


def test_a_cluster_leaves_nothing_behind():
    """Not even when it is killed."""
    need_cluster()

    def here():
        shown = [
            subprocess.run(command, capture_output=True, text=True, shell=True).stdout.splitlines()
            for command in ("ip -o link | cut -d: -f2", "ip netns", "cat /etc/hosts", "mount")
        ]
        # Meanwhile pods of other tests come and go.
        of_pods = re.compile("veth|podman|netns-|/containers/")
        return [line for lines in shown for line in lines if not of_pods.search(line)]

    before = here()
    cluster = Cluster()
    inside = psutil.Process(cluster.init).children(recursive=True)
    names = set()
    for process in inside:
        with contextlib.suppress(psutil.NoSuchProcess):
            names.add(process.name())
    assert {"munged", "slurmctld", "slurmd", "sshd"} <= names
    cluster.process.kill()
    assert not psutil.wait_procs(inside, timeout=PATIENCE)[1]
    assert here() == before
