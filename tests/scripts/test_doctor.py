"""scripts/doctor.py under each launcher, and the faults that it has to find, produced here."""

import os
import re
import shutil
import signal
from pathlib import Path

import psutil
import pytest
from cluster import SlurmJob
from forked import compute
from launch import Job, free_port, need, need_horovod, on_small_disk, run, wait_until
from recipes import ROOT, commands

from benchmarks import jpeg_tree

SCRIPT = ROOT / "scripts" / "doctor.py"
CORES = len(os.sched_getaffinity(0))
MPIRUN = "mpirun --oversubscribe --bind-to none"
WELL = "doctor: all is well( but for the warnings)?"  # beside other tests a rank can be slow
SHARES = "an epoch trains on {} samples, each once{}, and validates on {}, each once"


def verdict(output):
    """The one line with the result. If it is bad, the launchers print more after it."""
    lines = [line for line in output.splitlines() if line.startswith("doctor: ")]
    assert len(lines) == 1, output
    return lines[0]


@pytest.mark.parametrize("command", [line for line in commands(SCRIPT) if "sbatch" not in line])
def test_docstring_command(command):
    if "horovodrun" in command or "mpirun" in command:
        need_horovod(command)
    output = run(command, cwd=ROOT, CUDA_VISIBLE_DEVICES="", PET_STANDALONE="1")
    size = 1 if command.startswith("python") else 2
    assert output.rstrip().endswith(verdict(output)), "the verdict is the last line"
    assert re.match(f"{WELL}: world size {size} on 1 host, device cpu", verdict(output))
    assert output.count(" | cpu | ") == size, "a row for each rank"
    assert ("the sums are right" in output) == (size == 2)
    if "mnist" in command:
        assert SHARES.format("59,968 of 60,000", " (32 fill no global batch)", "10,000") in output
        assert "mnist, whose files were not read: " in output
        assert "batch 32 per process, 64 global | 937 steps per epoch" in output
        assert "learning rate 0.04 (--lr 0.02" in output


def test_three_processes_which_do_not_divide_the_images():
    torchrun = "torchrun --standalone --nproc-per-node=3"
    output = compute(f"{torchrun} {SCRIPT} --synthetic 1000 -b 30 --scale-lr none", cwd=ROOT)
    shares = SHARES.format("990 of 1,000", " (10 fill no global batch)", "200")
    assert f"cifar10, generated: {shares}" in output
    assert "batch 30 per process, 90 global | 11 steps per epoch" in output
    assert "learning rate 0.1 (" in output


def test_real_images_and_a_warning(real_data):
    output = compute(
        f"torchrun --nproc-per-node=2 {SCRIPT} --dataset mnist --data-dir {real_data('mnist')}",
        cwd=ROOT,
        OMP_NUM_THREADS=str(CORES),
    )
    assert (
        f"mnist: {SHARES.format('59,904 of 60,000', ' (96 fill no global batch)', '10,000')}"
        in output
    )
    assert f"warning: 2 processes with {2 * CORES} threads share {CORES} cores of " in output
    assert "doctor: all is well but for the warnings: " in verdict(output)


@pytest.mark.parametrize("synthetic", ["", "--synthetic 1000"])
def test_accumulated_passes(synthetic):
    """The share of a step is that of all its passes, and the batch that of one."""
    command = f"torchrun --standalone --nproc-per-node=2 {SCRIPT} --dataset imagenet"
    flags = f"{synthetic} --image-size 32 --workers 0 --device cpu --accumulate 4"
    output = compute(f"{command} -b 16 {flags}", cwd=ROOT)
    assert "batch 16 per process x 4 accumulated, 128 global" in output
    output = compute(f"{command} -G 128 {flags}", cwd=ROOT)
    assert "batch 16 per process x 4 accumulated, 128 global" in output
    if not synthetic:
        shares = SHARES.format("1,281,152 of 1,281,167", " (15 fill no global batch)", "50,000")
        assert shares in output


def test_wrong_inputs(tmp_path):
    for flags, complaint in (
        ("--dataset imagenet --data-dir none", "none/train is missing"),
        ("--batch-sizes 3", "unrecognized arguments: --batch-sizes"),
        ("--synthetic 100", "do not fill one batch of 128"),
        ("--recipe none.py", "there is no such file"),
        (f"--recipe {ROOT}/mnist/single.py", "single.py needs the function load_data"),
    ):
        lines = compute(f"python {SCRIPT} {flags}", cwd=tmp_path, status=2).splitlines()
        assert lines[-1].startswith("doctor.py: ") and complaint in lines[-1]


MINE = """
import os, sys
import torch
from torch.utils.data import TensorDataset

sys.path.insert(1, {root!r})
from common import flags, schedule
from common.data import DataObject, EpochSampler, TensorLoader


def parse_args():
    parser = flags.Parser(__doc__)
    parser.set_defaults(dataset="mine")
    add = parser.add_argument
    add("-b", "--batch-size", type=int, default=8)
    add("-G", "--global-batch-size", type=int)
    add("--scale-lr", default="linear")
    add("--lr", type=float, default=0.5)
    flags.add_run_flags(parser)
    return parser.parse_args()


def load_data(args, device, rank, world_size):
    count = 110 if os.environ["RANK"] == os.environ.get("MORE") else 100
    batch_size = schedule.per_process(args.batch_size, args.global_batch_size, world_size)
    sampler = EpochSampler(count, batch_size, rank, world_size)
    train_set, val_set = (TensorDataset(torch.zeros(n, 3)) for n in (count, 30))
    train = DataObject(train_set, sampler, TensorLoader(train_set, sampler, batch_size, device))
    # The third is for a loop that reads two data sets.
    return train, DataObject(val_set, range(rank, 30, world_size), None), train
"""


def test_own_recipe(tmp_path):
    (tmp_path / "train.py").write_text(MINE.format(root=str(ROOT)))
    mine = f"torchrun --standalone --nproc-per-node=2 {SCRIPT} --recipe train.py"
    output = compute(f"{mine} -b 12", cwd=tmp_path)
    assert f"mine: {SHARES.format('96 of 100', ' (4 fill no global batch)', '30')}" in output
    assert "batch 12 per process, 24 global | 4 steps per epoch" in output
    assert "learning rate 1 (--lr 0.5" in output
    output = compute(f"{mine} --global-batch-size 24", cwd=tmp_path)
    assert "batch 12 per process, 24 global | 4 steps per epoch" in output
    assert "learning rate 0.5 (--lr 0.5" in output
    output = compute(mine, cwd=tmp_path, status=1, MORE="1")
    each = "100 and 30 samples on rank 0, 110 and 30 samples on rank 1"
    assert f"the data set is not the same on all ranks ({each})" in verdict(output)


@pytest.mark.parametrize("name", ["regression", "finetune"])
def test_examples(name):
    """Data in memory, and data that workers read."""
    command = f"torchrun --standalone --nproc-per-node=2 {SCRIPT} --recipe examples/{name}.py"
    output = compute(f"{command} --synthetic 400", cwd=ROOT)
    assert f"{name}, generated: an epoch trains on " in output
    assert re.match(f"{WELL}: world size 2", verdict(output))


def test_no_data_set(tmp_path):
    output = compute(
        f"torchrun --standalone --nproc-per-node=2 {SCRIPT} --dataset none --device cpu",
        cwd=tmp_path,
    )
    assert re.match(f"{WELL}: world size 2", verdict(output)) and "the sums are right" in output


def test_a_slow_rank(real_data, tmp_path):
    """Rank 1 gets a tenth of a core, and rank 0 goes before all other tests."""
    group = Path("/sys/fs/cgroup/cpu", f"doctor-{os.getpid()}")
    need(
        os.access(group.parent / "cgroup.procs", os.W_OK),
        "root, and cgroups (version 1), to throttle a process",
    )
    group.mkdir()
    (group / "cpu.cfs_period_us").write_text("20000")
    try:
        flags = f"--dataset mnist --data-dir {real_data('mnist')}"
        # torchrun starts each rank in a session, where nice has no effect.
        first = "echo -20 > /proc/self/autogroup"
        start = (
            f'if [ "$RANK" = 0 ]; then {first}; else echo $BASHPID > {group}/cgroup.procs; fi; '
            f"exec python {SCRIPT} {flags}"
        )
        job = Job(
            f"torchrun --standalone --nproc-per-node=2 --no-python bash -c '{start}'", cwd=tmp_path
        )
        # Then it reads the images, and measures.
        job.wait_for("all-reduce over")
        (group / "cpu.cfs_quota_us").write_text("2000")
        status = job.finish()
        output = job.output()
        assert status == 0, output
    finally:
        group.rmdir()
    for name in ("arithmetic", "memory", "reading data"):
        assert re.search(
            rf"^warning: rank 1 on \S+ takes 1\.\d+ times the median for {name}",
            output,
            re.MULTILINE,
        ), output
    assert "warning: rank 0" not in output


def by_hand(rank, port, flags=""):
    """A command that starts one of two ranks, each of which has local rank 0."""
    return (
        f"RANK={rank} WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 "
        f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port} "
        f"python {SCRIPT} {flags}"
    )


def test_two_ranks_with_the_same_device(tmp_path):
    port = free_port()
    output = run(
        f"{by_hand(0, port)} & {by_hand(1, port)}; status=$?; wait; exit $status",
        cwd=tmp_path,
        status=1,
    )
    assert "ranks 0 and 1 both have local rank 0 of " in verdict(output)


def test_a_launcher_whose_processes_are_alone(tmp_path):
    need_horovod("mpi")
    output = run(f"{MPIRUN} -np 2 torchrun --standalone {SCRIPT}", cwd=tmp_path, status=1)
    lines = {line for line in output.splitlines() if line.startswith("doctor: ")}
    assert len(lines) == 1, output
    assert "mpirun started 2 of these, and this one is rank 0 of 1" in lines.pop()


def test_under_mpich(tmp_path):
    """Horovod is built with Open MPI: each process is alone."""
    need(shutil.which("mpirun.mpich"), "apt-get install mpich")
    output = run(f"mpirun.mpich -np 2 python {SCRIPT}", cwd=tmp_path, status=1)
    assert "the mpirun of MPICH started 2 of these, and this one is rank 0 of 1" in output


def test_a_host_that_does_not_know_its_name(tmp_path):
    """torchrun waits there (pytorch 150532), and horovodrun's ranks crash."""
    need(os.geteuid() == 0 and shutil.which("unshare"), "root, for another host name")
    command = f"hostname unheard-of; python {SCRIPT} --dataset none"
    output = run(f"unshare --uts bash -c '{command}'", tmp_path)
    assert "warning: unheard-of does not know its own name" in output


@pytest.mark.parametrize(("size", "fits"), [("2m", False), ("64m", True)])
def test_shared_memory(size, fits, tmp_path):
    """Two workers keep two batches of 8 images of 224x224 each: 5 MB. Docker gives 64 MB."""
    jpeg_tree.make(tmp_path / "tree", images=20)
    flags = "--dataset imagenet --data-dir tree --model lenet -b 8 -j 2"
    command = on_small_disk(f"python {SCRIPT} {flags}", tmp_path, size, "/dev/shm")
    output = run(command, tmp_path, status=0 if fits else 1)
    assert fits != bool(
        re.match("doctor: /dev/shm of .* has 2 MiB left, .* 5 MiB", verdict(output))
    )


def test_ranks_that_differ(tmp_path):
    need_horovod("mpi")
    (tmp_path / "torchvision-0.1.dist-info").mkdir()  # shadows the real one on rank 1
    (tmp_path / "torchvision-0.1.dist-info" / "METADATA").write_text(
        "Name: torchvision\nVersion: 0.1\n"
    )
    other = f"env PYTHONPATH={tmp_path} python {SCRIPT} -b 64 --device cpu"
    output = run(f"{MPIRUN} -np 1 python {SCRIPT} : -np 1 {other}", cwd=tmp_path, status=1)
    assert (
        "--batch-size is 128 on rank 0, 64 on rank 1: start all ranks with the same flags"
        in verdict(output)
    )
    assert "--device is auto on rank 0, cpu on rank 1: " in verdict(output)
    assert re.search(r"torchvision is \S+ on rank 0, 0.1 on rank 1: ", verdict(output))


@pytest.mark.parametrize(
    ("file", "line", "replacement", "complaint"),
    [
        (
            "common/data.py",
            "[self.rank :: self.world_size]",
            "[0 :: self.world_size]",
            "doctor: the shards of training are wrong, "
            "an epoch reads 24960 samples more than once and 25040 never",
        ),
        (
            "cifar10/ddp_launch.py",
            "range(rank, len(val_set), world_size)",
            "range(rank, len(val_set))",
            "doctor: the shards of validation are wrong, 199 samples are not read exactly once",
        ),
        (
            "scripts/group.py",
            "dist.all_reduce(tensor)",
            "dist.all_reduce(tensor, dist.ReduceOp.MAX)",
            "the all-reduce of 4 bytes over gloo gives a wrong sum",
        ),
    ],
    ids=["training", "validation", "sum"],
)
def test_a_fault_in_the_code(file, line, replacement, complaint, tmp_path):
    for folder in ("common", "images", "scripts", "cifar10"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    text = (tmp_path / file).read_text()
    assert text.count(line) == 1
    (tmp_path / file).write_text(text.replace(line, replacement))
    command = "torchrun --standalone --nproc-per-node=2 scripts/doctor.py"
    if "ddp_launch" in file:
        command += " --synthetic 1000"
    assert complaint in compute(command, cwd=tmp_path, status=1)


def test_a_rank_that_never_comes(tmp_path):
    output = run(by_hand(0, free_port(), "--timeout 20"), cwd=tmp_path, status=1)
    assert output.startswith("Timeout (0:00:20)!")
    assert re.search(r'group.py", line \d+ in __init__', output)


def test_ctrl_c(tmp_path):
    port = free_port()
    job = Job(f"exec env {by_hand(0, port)}", cwd=tmp_path)
    wait_until(lambda: port in {known.laddr.port for known in psutil.net_connections()}, job)
    job.signal(signal.SIGINT)
    assert job.finish() == -signal.SIGINT
    assert job.output() == ""


def test_on_a_cluster(cluster, tmp_path):
    for name in ("scripts", "mnist", "common", "images"):
        (tmp_path / name).symlink_to(ROOT / name)
    job = SlurmJob(
        cluster,
        tmp_path,
        "--nodes=2 --gpus-per-node=2 --cpus-per-task=2 slurm/ddp_2nodes.sh "
        "scripts/doctor.py --dataset mnist",
    )
    log = job.finish()
    assert re.match(f"{WELL}: world size 4 on 2 hosts, device cpu", verdict(log))
    assert "| 3 | node2 | 1 | cpu | " in log
    alone = cluster.run(f"srun --nodes=2 python {SCRIPT}", status=1)
    assert "doctor: srun started 2 of these, and this one is rank 0 of 1" in alone
