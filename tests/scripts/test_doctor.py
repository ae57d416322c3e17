"""scripts/doctor.py under each launcher, and the faults that it has to find, produced here."""

import os
import re
import shutil
from pathlib import Path

import pytest
from forked import ForkedJob, compute
from launch import free_port, need, need_horovod
from recipes import ROOT, commands

from benchmarks import jpeg_tree

SCRIPT = ROOT / "scripts" / "doctor.py"
CORES = len(os.sched_getaffinity(0))
WELL = "doctor: all is well( apart from the warnings)?"  # beside other tests a rank can be slow
ACCUMULATED = "--dataset imagenet --image-size 32 --workers 0 --device cpu --accumulate 3"
SHARES = "an epoch trains on {} samples, each once{}, and validates on {}, each once"


def verdict(output):
    """The one line with the result. If it is bad, the launchers print more after it."""
    lines = [line for line in output.splitlines() if line.startswith("doctor: ")]
    assert len(lines) == 1, output
    return lines[0]


@pytest.mark.parametrize("command", [line for line in commands(SCRIPT) if "sbatch" not in line])
def test_docstring_command(command):
    """mpirun starts real processes."""
    if "horovodrun" in command or "mpirun" in command:
        need_horovod(command)
    command = command.replace("horovodrun", "horovodrun --gloo")
    output = compute(command, cwd=ROOT, CUDA_VISIBLE_DEVICES="")
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


def test_descriptions_of_any_length(tmp_path):
    """Many cores and long flags make long ones, and ranks may differ."""
    (tmp_path / "describe.py").write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import torch\n"
        "from scripts.group import join\n"
        "group = join(lambda *_: torch.device('cpu'))\n"
        "values = group.gather_values('x' * (5000 + 5000 * group.rank))\n"
        "print(f'lengths {list(map(len, values))}')\n"
        "group.leave()\n"
    )
    output = compute("torchrun --nproc-per-node=2 describe.py", tmp_path)
    assert output.count("lengths [5000, 10000]") == 2


def test_three_processes_which_do_not_divide_the_images():
    """The share of a step is that of all its passes, and the batch that of one."""
    command = f"torchrun --nproc-per-node=3 {SCRIPT} {ACCUMULATED} --synthetic 1000 -b 10"
    output = compute(f"{command} --scale-lr none", cwd=ROOT)
    shares = SHARES.format("990 of 1,000", " (10 fill no global batch)", "200")
    assert f"imagenet, generated: {shares}" in output
    assert "batch 10 per process x 3 accumulated, 90 global | 11 steps per epoch" in output
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
    assert "doctor: all is well apart from the warnings: " in verdict(output)


def test_wrong_inputs(tmp_path):
    for flags, complaint in (
        ("--dataset imagenet --data-dir none", "none/train is missing"),
        ("--batch-sizes 3", "unrecognized arguments: --batch-sizes"),
        ("--synthetic 100", "do not fill one batch of 128"),
        ("--recipe none.py", "there is no such file"),
        (f"--recipe {ROOT}/mnist/digits.py", "digits.py needs the function parse_args"),
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
    parser = flags.Parser(__doc__, task="mine")
    flags.add_training_flags(parser, epochs=1, batch_size=8, lr=0.5)
    return parser.parse_args()


def load_data(args, world):
    count = 110 if os.environ["RANK"] == os.environ.get("MORE") else 100
    batch_size = schedule.batch_size(args, world.size)
    sampler = EpochSampler(count, batch_size, world.rank, world.size)
    train_set, val_set = (TensorDataset(torch.zeros(n, 3)) for n in (count, 30))
    loader = TensorLoader(train_set, sampler, batch_size, world.device)
    train = DataObject(train_set, sampler, loader)
    # The third is for a loop that reads two data sets.
    return train, DataObject(val_set, range(world.rank, 30, world.size), None), train
"""


def test_own_recipe(tmp_path):
    (tmp_path / "train.py").write_text(MINE.format(root=str(ROOT)))
    mine = f"torchrun --standalone --nproc-per-node=2 {SCRIPT} --recipe train.py"
    output = compute(f"{mine} -b 12", cwd=tmp_path)
    assert f"mine: {SHARES.format('96 of 100', ' (4 fill no global batch)', '30')}" in output
    assert "batch 12 per process, 24 global | 4 steps per epoch" in output
    assert "learning rate 1 (--lr 0.5" in output
    output = compute(mine, cwd=tmp_path, status=1, MORE="1")
    each = "100 and 30 samples on rank 0, 110 and 30 samples on rank 1"
    assert f"the data set is not the same on all ranks ({each})" in verdict(output)


def by_hand(rank, port, flags="", script=SCRIPT, local_rank=0):
    """A command that starts one of two ranks."""
    return (
        f"RANK={rank} WORLD_SIZE=2 LOCAL_RANK={local_rank} LOCAL_WORLD_SIZE=1 "
        f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port} "
        f"python {script} {flags}"
    )


def test_a_slow_rank(tmp_path):
    """Rank 1 gets a twentieth of a core, when it has nothing to do but to measure."""
    group = Path("/sys/fs/cgroup/cpu", f"doctor-{os.getpid()}")
    need(
        os.access(group.parent / "cgroup.procs", os.W_OK),
        "root, and cgroups (version 1), to throttle a process",
    )
    port = free_port()
    flags = "--dataset mnist --synthetic 1000"
    first, second = (
        ForkedJob(by_hand(rank, port, flags, local_rank=rank), tmp_path) for rank in (0, 1)
    )
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(second.process.pid))
        first.wait_for("all-reduce over")
        (group / "cpu.cfs_period_us").write_text("20000")
        (group / "cpu.cfs_quota_us").write_text("1000")
        assert first.finish() == second.finish() == 0
    finally:
        group.rmdir()
    output = first.output()
    for name in ("arithmetic", "memory", "reading data"):
        assert re.search(
            rf"^warning: rank 1 on \S+ takes 1\.\d+ times the median for {name}",
            output,
            re.MULTILINE,
        ), output
    assert "warning: rank 0" not in output


AS_HOST = f"""
import os, runpy, socket
socket.gethostname = lambda: os.environ["HOST"]
runpy.run_path("{SCRIPT}", run_name="__main__")
"""


def test_two_hosts(tmp_path):
    """torchrun waits on a host that does not know its name (pytorch 150532)."""
    (tmp_path / "as_host.py").write_text(AS_HOST)
    port = free_port()
    first, second = (
        ForkedJob(
            by_hand(rank, port, "--dataset none", script="as_host.py"),
            tmp_path,
            HOST=f"node{rank}.invalid",
        )
        for rank in (0, 1)
    )
    assert first.finish() == second.finish() == 0
    output = first.output()
    assert re.match(f"{WELL}: world size 2 on 2 hosts, device cpu", verdict(output))
    assert "the sums are right" in output
    assert "| 1 | node1.invalid | 0 | cpu | " in output
    assert "warning: node1.invalid cannot resolve its own name" in output


def test_ranks_that_differ(tmp_path):
    port = free_port()
    first = ForkedJob(by_hand(0, port), tmp_path)
    second = ForkedJob(by_hand(1, port, "-b 64 --device cpu"), tmp_path)
    assert first.finish() == second.finish() == 1
    said = verdict(first.output())
    assert (
        "--batch-size is 128 on rank 0, 64 on rank 1: start all ranks with the same flags" in said
    )
    assert "--device is auto on rank 0, cpu on rank 1: " in said
    assert "ranks 0 and 1 both have local rank 0 of " in said


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (
            "OMPI_COMM_WORLD_SIZE=2 torchrun --standalone",
            "mpirun started 2 processes, but this one is rank 0 of 1.* torchrun needs --nnodes=2",
        ),
        # Horovod is built with Open MPI: each process is alone.
        ("PMI_SIZE=2 python", "the mpirun of MPICH started 2 processes.* use horovodrun"),
        ("SLURM_STEP_NUM_TASKS=2 python", "srun started 2 processes.* needs srun --mpi=pmix"),
    ],
    ids=["mpirun", "MPICH", "srun"],
)
def test_a_launcher_whose_processes_are_alone(command, says, tmp_path):
    job = ForkedJob(f"{command} {SCRIPT}", tmp_path)
    assert job.finish() == 1
    assert re.match(f"doctor: {says}", verdict(job.output()))


@pytest.mark.parametrize(("size", "fits"), [("2m", False), ("64m", True)])
def test_shared_memory(size, fits, tmp_path):
    """Two workers keep two batches of 8 images of 224x224 each: 5 MB. Docker gives 64 MB."""
    jpeg_tree.make(tmp_path / "tree", images=20)
    flags = "--dataset imagenet --data-dir tree --model lenet -b 8 -j 2"
    command = f"python {SCRIPT} {flags}"
    output = compute(command, tmp_path, status=0 if fits else 1, disk=("/dev/shm", size))
    assert fits != bool(
        re.match("doctor: /dev/shm of .* has 2 MiB left, .* 5 MiB", verdict(output))
    )


@pytest.fixture
def replaced(tmp_path):
    """A function that replaces a line of a file in a copy of the doctor and what it needs."""
    for folder in ("common", "images", "scripts", "cifar10"):
        shutil.copytree(ROOT / folder, tmp_path / folder)

    def in_copy(file, line, replacement):
        text = (tmp_path / file).read_text()
        assert text.count(line) == 1
        (tmp_path / file).write_text(text.replace(line, replacement))

    return in_copy


COPY = "torchrun --standalone --nproc-per-node=2 scripts/doctor.py"


def test_wrong_shards(replaced, tmp_path):
    replaced("common/data.py", "[self.rank :: self.world_size]", "[0 :: self.world_size]")
    replaced(
        "cifar10/ddp_launch.py",
        "range(world.rank, len(val_set), world.size)",
        "range(len(val_set))",
    )
    assert verdict(compute(f"{COPY} --synthetic 1000", cwd=tmp_path, status=1)) == (
        "doctor: the training shards are wrong, "
        "an epoch reads 384 samples more than once and 616 never; "
        "the validation shards are wrong, 200 samples are not read exactly once"
    )


def test_a_wrong_sum(replaced, tmp_path):
    line = "dist.all_reduce(tensor)"
    replaced("scripts/group.py", line, "dist.all_reduce(tensor, dist.ReduceOp.MAX)")
    fault = "the all-reduce of 4 bytes over gloo gives a wrong sum"
    assert fault in compute(COPY, cwd=tmp_path, status=1)


def test_a_rank_that_never_comes(tmp_path):
    output = compute(by_hand(0, free_port(), "--timeout 5"), cwd=tmp_path, status=1)
    assert output.startswith("Timeout (0:00:05)!")
    assert re.search(r'group.py", line \d+ in __init__', output)
