"""The launch files of slurm/ on a cluster of two nodes, with a script in place of a recipe.

What they do is the same whatever they start, and the script imports no torch. Real training is in
test_cluster_faults.py.
"""

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
from cluster import Cluster, SlurmJob, link_repository, need_cluster
from forked import compute
from launch import Job, need, need_horovod, need_mounts, one_line, run
from recipes import ROOT

import archives
from benchmarks import jpeg_tree

JOBS = [file for file in (ROOT / "slurm").glob("*.sh") if "#SBATCH --nodes" in file.read_text()]

# It says how it was started, and waits until it is told to stop, as a recipe is.
STAND_IN = """\
import os
import signal
import socket
import sys
import time

# torchrun and ddp_srun_2nodes.sh set these, or else mpirun, or else srun.
VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
names = next(names for names in VARIABLES if names[0] in os.environ)
rank, size, local_rank = map(os.environ.get, names)
numbers = (signal.SIGUSR1, signal.SIGUSR2)
ignored = all(signal.getsignal(number) is signal.SIG_IGN for number in numbers)


def say(text):
    # In one write: the lines of two ranks would mix.
    os.write(1, f"{text}\\n".encode())


def stop(*_):
    say("stopped")
    sys.exit()


signal.signal(signal.SIGUSR2, lambda *_: say("stack"))
signal.signal(signal.SIGUSR1, stop)
signal.signal(signal.SIGTERM, stop)
say(
    f"rank {rank} of {size} is {local_rank} on {socket.gethostname()}; "
    f"{'ignores' if ignored else 'hears'} signals; "
    f"threads {os.environ.get('OMP_NUM_THREADS')}; "
    f"first {os.environ.get('MASTER_ADDR')}; flags {' '.join(sys.argv[1:])}"
)
while "--dry-run" not in sys.argv and not os.path.exists("go-on"):
    time.sleep(0.05)
"""


@pytest.fixture
def stand_in(tmp_path):
    (tmp_path / "stand_in.py").write_text(STAND_IN)


def said(pattern, log):
    return sorted(re.findall(pattern, log, re.MULTILINE))


# The options of sbatch, the processes, and the threads of each. A job has two tasks on each node,
# also where a script starts one process there.
ONE_NODE = "--ntasks-per-node=2 --cpus-per-task=4"
TWO_NODES = "--nodes=2 --ntasks-per-node=2 --gpus-per-node=2 --cpus-per-task=4"
ONE = ["0 of 1 is 0 on node1"]
FOUR = [
    "0 of 4 is 0 on node1",
    "1 of 4 is 1 on node1",
    "2 of 4 is 0 on node2",
    "3 of 4 is 1 on node2",
]
STARTS = {
    "single": (f"{ONE_NODE} slurm/single.sh", ONE, "4"),
    "array": (f"{ONE_NODE} --array=0-1 slurm/array.sh", [*ONE, "0 of 1 is 0 on node2"], "4"),
    # Without GPUs it starts two processes on each node.
    "ddp": (f"{TWO_NODES} --gpus-per-node=0 slurm/ddp_2nodes.sh", FOUR, "2"),
    "ddp_srun": (f"{TWO_NODES} slurm/ddp_srun_2nodes.sh", FOUR, "4"),
    "ddp_spawn": (
        f"{TWO_NODES} slurm/ddp_spawn_2nodes.sh",
        ["0 of 2 is 0 on node1", "1 of 2 is 0 on node2"],
        "2",
    ),
    "hvd mpirun": (f"{TWO_NODES} slurm/hvd_2nodes.sh", FOUR, "4"),
    "hvd srun": (f"{TWO_NODES} slurm/hvd_2nodes.sh", FOUR, "4"),
}


@pytest.mark.parametrize("name", STARTS)
def test_a_job_starts_and_is_told_to_stop(name, submit, cluster, stand_in):
    if name == "hvd mpirun":
        need(shutil.which("mpirun"), "Open MPI: apt-get install openmpi-bin")
    options, processes, threads = STARTS[name]
    job = submit(f"{options} stand_in.py --epochs 3", LAUNCHER=name.split()[-1])
    job.wait_for("^rank ", count=len(processes))
    log = job.log()
    assert said("^rank (.*?);", log) == processes
    # A recipe ignores them until it has handlers, or they would end it while it loads torch.
    assert log.count("; ignores signals;") == len(processes)
    assert set(said("; threads (.*?);", log)) == {threads}
    if name.startswith("ddp"):
        assert set(said("; first (.*?);", log)) == {"node1"}
    for flags in said("; flags (.*)", log):
        assert re.search(rf"--log-dir runs/\S+-{job.id}", flags)
        assert "--resume auto" in flags
        # The flags of the user come last.
        assert "--checkpoint-every 500 --epochs 3" in flags
    # mpirun is no step of SLURM's: only the batch script can pass it on to mpirun.
    batch = "--batch" if name == "hvd mpirun" else ""
    cluster.run(f"scancel {batch} --signal=USR2 {job.id}")
    job.wait_for("^stack", count=len(processes))
    if name == "ddp":
        # TERM is for the ranks: torchrun would end with status 1, whatever they do. (USR1 under
        # torchrun: test_cluster_faults.py.)
        cluster.run(f"scancel --signal=TERM {job.id}")
        job.finish()
    else:
        cluster.run(f"scancel --batch --signal=USR1 {job.id}")
        job.wait_for("^[a-z_-]+: queued again, 1 of 10", count=2 if name == "array" else 1)
    assert job.log().count("stopped") == len(processes)


@pytest.mark.parametrize("name", ["ddp_srun", "hvd mpirun", "hvd srun"])
def test_a_rank_that_is_killed_ends_the_job(name, submit, stand_in):
    """Even if another rank hears no signal. (Under torchrun: test_staged_environment.)"""
    if name == "hvd mpirun":
        need(shutil.which("mpirun"), "Open MPI: apt-get install openmpi-bin")
    options, processes, _ = STARTS[name]
    job = submit(f"{options} stand_in.py", LAUNCHER=name.split()[-1])
    job.wait_for("^rank ", count=len(processes))
    job.ranks("node1")[-1].send_signal(signal.SIGSTOP)
    job.ranks("node2")[-1].kill()
    job.finish("FAILED")
    assert not job.ranks("node1") + job.ranks("node2")


def test_array(submit, stand_in):
    """Each task has its own seed, or its own rate. (The table of its runs: test_scripts.py.)"""
    array = f"{ONE_NODE} --array=0-1 slurm/array.sh stand_in.py --dry-run"
    log = submit(array).finish()
    assert said(r"flags (--\S+ \S+) ", log) == ["--seed 0", "--seed 1"]
    log = submit(array, RATES="0.01 0.03").finish()
    assert said(r"flags (--\S+ \S+) ", log) == ["--lr 0.01", "--lr 0.03"]
    assert said(r"--log-dir \S+/(\d) ", log) == ["0", "1"]


def test_tasks_whose_number_differs_between_nodes(submit, tmp_path):
    script = (ROOT / "slurm" / "ddp_srun_2nodes.sh").read_text()
    (tmp_path / "copy.sh").write_text(script.replace("#SBATCH --ntasks-per-node=4\n", ""))
    for file in ("slurm/ddp_srun_2nodes.sh", "copy.sh"):
        job = submit(f"--nodes=2 --ntasks=3 --cpus-per-task=1 --gpus-per-node=0 {file} none.py")
        line = one_line(job.finish("FAILED"))
        assert line.startswith("ddp_srun_2nodes.sh: use --ntasks-per-node in place of")


def test_slurm_takes_each_file_as_it_stands(cluster):
    for file in JOBS:
        cluster.run(f"sbatch --test-only slurm/{file.name}")
        text = file.read_text()
        assert not re.search(r"^#\s+SBATCH|^##SBATCH", text, re.MULTILINE), "SLURM ignores it"
        options = set(re.findall(r"^#SBATCH --([\w-]+)", text, re.MULTILINE))
        assert {"time", "output", "open-mode", "requeue", "signal"} <= options


# A job whose command is no step of SLURM's.
REQUEUE = "--open-mode=append --wrap 'exec slurm/requeue.sh python {}'"


def test_signals_to_a_launcher_without_handlers(submit, cluster, tmp_path):
    """They end no launcher that has no handlers yet, or none any more, as mpirun at its end."""
    (tmp_path / "launcher.py").write_text(
        "import os, signal, time\n"
        "print('starts', flush=True)\n"
        "while not os.path.exists('go-on'):\n"
        "    time.sleep(0.1)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
        "signal.sigwait([signal.SIGUSR1])\n"
    )
    job = submit(f"--requeue {REQUEUE.format('launcher.py')}")
    job.wait_for("starts")
    for name in ("USR2", "USR1"):
        cluster.run(f"scancel --batch --signal={name} {job.id}")
    (tmp_path / "go-on").touch()
    job.wait_for("^wrap: queued again, 1 of 10")


def test_a_job_that_may_not_be_queued_again(submit, cluster, stand_in):
    """It says so, and why, and not "queued again"."""
    job = submit(f"--no-requeue {REQUEUE.format('stand_in.py')}")
    job.wait_for("^rank ")
    cluster.run(f"scancel --batch --signal=USR1 {job.id}")
    log = job.finish()
    assert "wrap: not queued again, as scontrol says 'Requested operation is presently" in log
    assert "queued again, 1 of" not in log


def test_as_many_requeues_as_it_says(submit, cluster, stand_in):
    """With MAX_REQUEUES=1 the second warning ends the job."""
    job = submit(f"--requeue {REQUEUE.format('stand_in.py')}", MAX_REQUEUES="1")
    job.wait_for("^rank ")
    cluster.run(f"scancel --batch --signal=USR1 {job.id}")
    job.wait_for("^wrap: queued again, 1 of 1")
    job.wait_for("^rank ", count=2)
    cluster.run(f"scancel --batch --signal=USR1 {job.id}")
    job.wait_for("^wrap: .*queued again", count=2)
    assert "wrap: not queued again after 1 times" in job.log()
    job.finish()


def test_staged_archives(submit, tmp_path, stand_in):
    """A recipe reads the copies, with their indexes. Meanwhile each node measures itself."""
    jpeg_tree.make(tmp_path / "photos", 20)
    (tmp_path / "shared").mkdir()
    for split in ("train", "val"):
        command = ["tar", "-cf", f"shared/{split}.tar", "-C", "photos", split]
        subprocess.run(command, cwd=tmp_path, check=True)
    archives.find(tmp_path / "shared")
    job = submit(
        f"{TWO_NODES} slurm/ddp_srun_2nodes.sh stand_in.py --data-dir=shared",
        STAGE="1",
        SLURM_TMPDIR=str(tmp_path / "disk"),
        USAGE="usage",
    )
    measured = [tmp_path / "usage" / f"{node}.jsonl" for node in ("node1", "node2")]
    job.wait_until(lambda: all(file.exists() for file in measured), "nothing measured")
    (tmp_path / "go-on").touch()
    log = job.finish()
    staged = tmp_path / "disk" / f"staged-{job.id}"
    assert said("flags .* --data-dir (.*)", log) == [str(staged)] * 4
    assert len(said(r"^node[12], mean of 0:\d\d:\d\d: cpu \d+%, [\d.]+ GiB$", log)) == 2
    for file in measured:
        assert 0 < json.loads(file.read_text().splitlines()[0])["cpu/use"] <= 1
    assert not list(staged.glob(".partial*"))
    output = compute(
        f"python {ROOT}/imagenet/single.py --data-dir {staged} --device cpu --arch lenet "
        "--image-size 32 -b 2 -j 0 --dry-run",
        tmp_path,
    )
    assert f"20 images in {staged}/train.tar and 4 images in {staged}/val.tar" in output
    assert "making the index" not in output


def test_staging_without_archives(submit, tmp_path):
    (tmp_path / "shared").mkdir()
    file = "--gpus-per-node=0 --cpus-per-task=1 slurm/single.sh none.py --data-dir=shared"
    job = submit(file, STAGE="1", SLURM_TMPDIR=str(tmp_path / "disk"))
    assert one_line(job.finish("FAILED")).startswith("stage.sh: there is no archive in shared")


WHERE = """
import os
import shutil
import sys
import time

os.write(1, f"{sys.prefix} {shutil.which('torchrun')}\\n".encode())
time.sleep(1000)
"""


def test_staged_environment(submit, tmp_path):
    """torchrun, and the Python of each rank, are those that were unpacked.

    When a rank is killed, the job fails, and torchrun says which rank was the first.
    """
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
    flags = "--nodes=2 --gpus-per-node=2 --cpus-per-task=1 slurm/ddp_2nodes.sh where.py"
    job = submit(flags, STAGE_ENV="env.tar", SLURM_TMPDIR=disk)
    staged = f"{disk}/env-{job.id}"
    job.wait_for(rf"^{staged} {staged}/bin/torchrun$", count=4)
    job.ranks("node2")[-1].kill()
    log = job.finish("FAILED")
    # Each torchrun says what it saw first.
    first = r"host +: node2\n +rank +: [23] .*\n +exitcode +: -9 "
    assert any(re.search(first, cause) for cause in log.split("Root Cause")[1:]), log
    job = submit(flags, STAGE_ENV="none.tar", SLURM_TMPDIR=disk)
    assert "STAGE_ENV=none.tar: there is no such file" in one_line(job.finish("FAILED"))


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
    need_mounts()
    (tmp_path / "disk").mkdir()
    # It would list what is there in another line.
    stage = f"bash {ROOT}/slurm/stage.sh --node shared disk; status=$?; ls -A disk; exit $status"
    command = f"unshare -m bash -c 'mount -t tmpfs -o size=1m tmpfs disk; {stage}'"
    line = one_line(run(command, tmp_path, status=2))
    assert line == f"stage.sh: {socket.gethostname()} has 1.0MB left in disk, and 1.6MB are needed"


def test_a_tilde_in_the_folder_of_archives(tmp_path):
    """A shell leaves it as it is in --data-dir=~/photos, and common/flags.py does not."""
    command = f"bash {ROOT}/slurm/stage.sh true --data-dir=~/photos"
    line = one_line(run(command, tmp_path, status=2, HOME=str(tmp_path)))
    assert line.startswith(f"stage.sh: there is no archive in {tmp_path}/photos ")


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
def test_wrong_host_files(content, what, tmp_path):
    (tmp_path / "hosts").write_text(content)
    output = run(f"{ROOT}/slurm/hosts.sh hosts", tmp_path, status=2)
    assert output == f"hosts: {what}; a line is: node1 slots=4\n"


@pytest.mark.parametrize("launcher", ["horovodrun", "mpirun"])
def test_launchers_by_host_file(launcher, tmp_path):
    """They work from any folder, and end where there is no host file."""
    (tmp_path / "hosts").write_text("node1 slots=2")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / launcher).write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "bin" / launcher).chmod(0o755)
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    words = run(f"{ROOT}/slurm/{launcher}.sh hosts", tmp_path, PATH=path).splitlines()
    assert ROOT / "cifar10" / "hvd.py" in [Path(word).resolve() for word in words]
    for file in ("", ".", "none"):
        line = one_line(run(f"{ROOT}/slurm/{launcher}.sh {file}", tmp_path, status=2))
        assert line.startswith(f"hosts.sh: cannot read the file '{file}': ")


OVER_SSH = {
    "horovodrun.sh": "slurm/horovodrun.sh hosts hvd.py --dry-run",
    "mpirun.sh": "slurm/mpirun.sh hosts hvd.py --dry-run",
    "mpirun.sh, DDP": "slurm/mpirun.sh hosts stand_in.py --dry-run",
    # The README's line for two machines, here with one process on each.
    "torchrun": (
        "torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d "
        "--rdzv-endpoint=node1:29500 stand_in.py --dry-run"
    ),
}


@pytest.mark.parametrize("name", OVER_SSH)
def test_two_machines_without_slurm(name, cluster, tmp_path, stand_in):
    if name == "horovodrun.sh":
        need_horovod("mpi")
    if name.startswith("mpirun.sh"):
        need(shutil.which("mpirun"), "Open MPI: apt-get install openmpi-bin")
    link_repository(tmp_path)
    (tmp_path / "hosts").write_text(HOST_FILE)
    (tmp_path / "hvd.py").write_text(STAND_IN)
    command = OVER_SSH[name]
    if name == "torchrun":
        here = f"cd {tmp_path}; export PATH={cluster.environment['PATH']}; {command}"
        command = f"ssh node1 '{here}' & ssh node2 '{here}' & wait"
    output = cluster.run(command, cwd=tmp_path)
    places = {"rank 0 of 2 is 0 on node1", "rank 1 of 2 is 0 on node2"}
    assert set(re.findall(r"rank \d of 2 is \d on \w+", output)) == places
    if name == "mpirun.sh, DDP":
        assert output.count("; first node1;") == 2


def test_a_cluster_without_gpus(tmp_path, stand_in):
    """SLURM refuses a file as it stands; --gpus-per-node=0 is all that a user changes."""
    need_cluster()
    with Cluster(GPUS="0") as cluster:
        cluster.run("sbatch slurm/single.sh", status=1)
        options = "--gpus-per-node=0 --cpus-per-task=1"
        SlurmJob(cluster, tmp_path, f"{options} slurm/single.sh stand_in.py --dry-run").finish()
