"""Faults that end a run: its status is not 0, no process stays, and its checkpoints stay good."""

import contextlib
import re
import signal

import numpy as np
import psutil
import pytest
import torch
from forked import ForkedJob, compute
from launch import (
    Job,
    checkpoint,
    need,
    need_horovod,
    on_small_disk,
    place,
    run,
    strategies,
    wait_until,
)
from PIL import Image
from recipes import ROOT, STEP, changed_copy

from common import checkpoint as checkpoints

SHORT = "--synthetic 2560 --model lenet --device cpu"
RECIPES = {
    "ddp_spawn": "ddp_spawn",
    "ddp_launch": "ddp_launch",
    "hvd_gloo": "hvd",
    "hvd_mpi": "hvd",
}


def fails(command, cwd, start=Job):
    """The output of a command that has to fail."""
    job = start(command, cwd)
    assert job.finish() != 0, job.output()
    return job.output()


def good(folder):
    """The checkpoint that --resume auto would take; nothing in the folder may be damaged."""
    found = checkpoints.find("auto", folder)
    assert found.path
    assert not found.damaged
    return found.saved


FAULTS = {
    "exit(0)": "__import__('os')._exit(0)",
    "memory limit": "import psutil, resource\n"
    "            limit = psutil.Process().memory_info().vms + 2**20\n"
    "            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
    "            images.repeat(10_000, 1, 1, 1)",
    "hangs": "__import__('time').sleep(1000)",
}


# Whether the others notice that a rank vanished depends on the launcher; a rank that hangs ends
# by its own watchdog (test_cluster_faults.py stops ranks of each launcher)
@pytest.mark.parametrize(
    ("strategy", "fault"),
    [
        *((strategy, "exit(0)") for strategy in RECIPES),
        ("ddp_launch", "hangs"),
        ("ddp_spawn", "memory limit"),
    ],
)
def test_fault_of_one_rank(fault, strategy, tmp_path):
    """In the second epoch: all ranks end, and the checkpoint of the first epoch is good."""
    if strategy.startswith("hvd"):
        need_horovod(strategy)
    samples = (
        0 if (strategy, fault) == ("ddp_launch", "hangs") else 1280
    )  # the watchdog also sees the first step
    line = (
        f"        if rank == 1 and (position.epoch, position.samples) == (1, {samples}):\n"
        f"            {FAULTS[fault]}\n"
    )
    copy = changed_copy(tmp_path, f"mnist/{RECIPES[strategy]}.py", STEP, line + STEP)
    output = fails(
        f"{strategies(2, copy)[strategy]} {SHORT} --epochs 3 --log-dir log "
        f"--timeout {30 if fault == 'hangs' else 600}",
        tmp_path,
        ForkedJob if fault == "hangs" else Job,
    )
    assert "epoch 1/3" in output
    assert "epoch 2/3" not in output
    assert place(good(tmp_path / "log"))[0] == 1
    if fault == "hangs":
        assert "Timeout (0:00:30)!" in output, output
        assert " in train_to_evaluation" in output, (
            output
        )  # ranks that write at once mix their words, not the letters


def test_a_rank_skips_a_collective(tmp_path):
    """The watchdog ends both ranks; torchfrtrace names the one for which the other waited."""
    old = torch.__version__.startswith("2.11.")
    need(not old, "a newer torch: torchfrtrace of 2.11 does not read what ranks of Gloo write")
    line = (
        "        if rank == 1 and position.steps == 14:\n"
        "            __import__('time').sleep(1000)\n"
    )
    copy = changed_copy(tmp_path, "mnist/ddp_launch.py", STEP, line + STEP)
    command = f"{strategies(2, copy)['ddp_launch']} {SHORT} --log-dir log --timeout 30"
    fails(f"TORCH_FR_BUFFER_SIZE=2000 {command}", tmp_path)
    output = run("torchfrtrace --prefix collectives- log", cwd=tmp_path)
    assert (
        output.count("Not all ranks joining collective") == output.count("missing ranks: {1}") == 1
    ), output


@pytest.mark.parametrize("strategy", ["ddp_launch", "hvd_gloo"])
def test_loss_of_one_rank_is_not_finite(strategy, tmp_path):
    """All ranks end in the same step and say why, and the checkpoint from before is good."""
    if strategy.startswith("hvd"):
        need_horovod(strategy)
    line = (
        "        if rank == 1 and position.epoch == 1:\n            sums.add(loss=float('nan'))\n"
    )
    copy = changed_copy(tmp_path, f"mnist/{RECIPES[strategy]}.py", STEP, line + STEP)
    output = compute(
        f"{strategies(2, copy)[strategy]} {SHORT} --epochs 3 --log-dir log", tmp_path, status=1
    )
    assert output.count("the loss is not finite") == 2, output
    assert "Traceback" not in output
    assert place(good(tmp_path / "log"))[0] == 1


@pytest.mark.parametrize("strategy", ["single", "ddp_spawn"])
def test_disk_full_during_a_save(strategy, tmp_path):
    """There is room for two checkpoints of 0.5 MB, and not for a third."""
    command = {"single": f"python {ROOT}/mnist/single.py", **strategies(2, ROOT / "mnist")}[
        strategy
    ]
    command += f" {SHORT} --epochs 4 --log-dir disk"
    output = fails(on_small_disk(command, tmp_path, "1200k", "disk"), tmp_path)
    assert output.count("cannot save in disk (No space left on device)") == 1, output
    assert "Traceback" not in output
    whole_epochs = len(re.findall(r"^epoch \d/4: ", output, re.MULTILINE))
    assert whole_epochs == 1
    assert place(good(tmp_path / "copy")) == (1, 0), "the one behind the evaluation"
    assert not list((tmp_path / "copy").glob(".*.partial")), "no partial file takes up space"


def test_disk_full_for_results(tmp_path):
    """TensorBoard and results.jsonl cannot be written: training goes on, and says so."""
    # The checkpoints lie elsewhere: only results fill the disk.
    copy = changed_copy(
        tmp_path,
        "mnist/single.py",
        "    while not position.over:\n",
        "    run.folder = Path('.')\n    while not position.over:\n",
    )
    command = f"python {copy}/single.py {SHORT} --epochs 3 --log-dir disk"
    output = run(on_small_disk(command, tmp_path, "8k", "disk"), cwd=tmp_path)
    assert "warning: no results are written to disk (No space left on device)" in output
    assert place(checkpoint(tmp_path)) == (3, 0)


def test_folder_becomes_read_only(tmp_path):
    recipe = f"python {ROOT}/mnist/single.py {SHORT} --epochs 1000 --log-dir disk"
    # A second mount, in front of the first, which has a file open.
    remount = (
        "until [ -e disk/previous.pt ]; do sleep 0.05; done; "
        "mount --bind disk disk; mount -o remount,bind,ro disk"
    )
    output = fails(on_small_disk(f"({remount}) & {recipe}", tmp_path, "10m", "disk"), tmp_path)
    assert output.count("cannot save in disk (Read-only file system)") == 1
    assert "Traceback" not in output
    assert place(good(tmp_path / "copy"))[0] > 0


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """The flags with which a recipe of imagenet trains on 160 images, read by workers."""
    folder = tmp_path_factory.mktemp("tree")
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    for split, count in (("train", 64), ("val", 16)):
        for label in "ab":
            (folder / split / label).mkdir(parents=True)
            for number in range(count):
                Image.fromarray(pixels).save(folder / split / label / f"{number}.JPEG")
    return (
        f"--data-dir {folder} --model lenet --lr 0.001 --device cpu --log-dir log -b 16 "
        "--image-size 32"
    )


def loader_workers(job, count):
    """The loader workers of all ranks, once there are `count`."""
    found = []

    def all_there():
        found.clear()
        with contextlib.suppress(psutil.NoSuchProcess):  # one that ends meanwhile
            processes = {process.pid: process for process in job.alive()}
            found.extend(
                process
                for process in processes.values()
                if process.ppid() in processes
                and not process.children()
                and process.cmdline() == processes[process.ppid()].cmdline()
            )
        return len(found) >= count

    wait_until(all_there, job)
    return found


@pytest.mark.parametrize(
    ("strategy", "number"),
    [("single", signal.SIGKILL), ("ddp_launch", signal.SIGKILL), ("single", signal.SIGSTOP)],
)
def test_loader_worker(strategy, number, tree, tmp_path):
    """The run ends if a loader worker is killed (as by a memory limit), or hangs for --timeout."""
    command = {"single": f"python {ROOT}/imagenet/single.py", **strategies(2, ROOT / "imagenet")}[
        strategy
    ]
    stops = number == signal.SIGSTOP
    job = Job(
        f"{command} {tree} --epochs 1000 --workers 1 {'--timeout 30' if stops else ''}",
        cwd=tmp_path,
    )
    job.wait_for("epoch 2/1000")
    loader_workers(job, 1 if strategy == "single" else 2)[0].send_signal(number)
    assert job.finish() != 0
    assert place(good(tmp_path / "log"))[0] > 0
    if stops:
        assert "Timeout (0:00:30)!" in job.output()
        assert "loader.py" in job.output() or "dataloader.py" in job.output()


def test_sigterm_to_loader_workers(tree, tmp_path):
    """SLURM sends it to all processes: the run saves and stops; it needs its workers until then."""
    job = Job(
        f"exec python {ROOT}/imagenet/single.py {tree} --epochs 1000 --workers 1", cwd=tmp_path
    )
    job.wait_for("epoch 2/1000")
    loader_workers(job, 1)
    job.signal(signal.SIGTERM, everyone=True)
    assert job.finish() == 0, job.output()
    assert "stopped after a signal" in job.output()


def test_tiny_shared_memory(tree, tmp_path):
    """Loader workers pass batches through /dev/shm; one of 32 images of 128x128 is 1.5 MB."""
    command = (
        f"{strategies(2, ROOT / 'imagenet')['ddp_launch']} {tree} -b 32 --image-size 128 "
        "--epochs 1 --workers 2"
    )
    output = fails(on_small_disk(command, tmp_path, "1m", "/dev/shm"), tmp_path)
    assert "ddp_launch.py: a loader worker found no room in /dev/shm" in output
    # torchrun prints one of its own.
    assert output.count("Traceback") == 1
    assert not list((tmp_path / "log").glob("*.pt"))


def test_stack_dump(tmp_path):
    """SIGUSR2 to all processes of a job shows where each rank is, and training goes on."""
    job = Job(f"python {ROOT}/mnist/ddp_spawn.py -g 2 {SHORT} --epochs 2000", cwd=tmp_path)
    job.wait_for("epoch 1/2000")
    processes = [
        process
        for process, words in job.command_lines()
        if re.search("ddp_spawn|spawn_main", " ".join(words))
    ]
    assert len(processes) == 3, "two ranks, and the one that started them"
    for process in processes:
        process.send_signal(signal.SIGUSR2)
    job.wait_for("ddp_spawn.py")
    epochs = job.output().count("epoch ")
    job.wait_for(f"epoch {epochs + 2}/2000")
    job.signal(signal.SIGINT)
    assert job.finish() == 130
    assert job.output().count("Current thread") >= 2, job.output()


def test_stack_dump_of_a_loader_worker(tree, tmp_path):
    job = Job(
        f"exec python {ROOT}/imagenet/single.py {tree} --epochs 1000 --workers 1", cwd=tmp_path
    )
    job.wait_for("epoch 1/1000")
    for worker in loader_workers(job, 1):
        worker.send_signal(signal.SIGUSR2)
    job.wait_for("in _worker_loop")
    job.wait_for("epoch 3/1000")
    job.signal(signal.SIGTERM)
    assert job.finish() == 0


def test_ranks_end_when_one_is_killed(tmp_path):
    job = Job(
        f"python {ROOT}/mnist/ddp_spawn.py -g 2 {SHORT} --epochs 1000 --log-dir log", cwd=tmp_path
    )
    job.wait_for("epoch 2/1000")
    rank = next(
        process
        for process, words in job.command_lines()
        if "multiprocessing.spawn" in " ".join(words)
    )
    rank.kill()
    assert job.finish() != 0
    assert good(tmp_path / "log")
