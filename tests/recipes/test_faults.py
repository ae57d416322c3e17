"""Faults that end a run: its status is not 0, no process stays, and its checkpoints stay good."""

import re
import signal
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from forked import ForkedJob, compute
from launch import need_horovod, place, strategies, wait_until
from PIL import Image
from recipes import ROOT, STEP, changed_copy

from common import checkpoint as checkpoints

SHORT = "--synthetic 640 --model lenet --device cpu"
RECIPES = {"ddp_spawn": "ddp_spawn", "ddp_launch": "ddp_launch", "hvd_gloo": "hvd"}


def fails(command, cwd, **options):
    """The output of a command that has to fail."""
    job = ForkedJob(command, cwd, **options)
    assert job.finish() != 0, job.output()
    return job.output()


def good(folder):
    """The checkpoint that --resume auto would take; nothing in the folder may be damaged."""
    found = checkpoints.find("auto", folder)
    assert found.path
    assert not found.damaged
    return found.saved


def faulty_copy(to, strategy, condition, fault):
    """Copy a strategy's recipe, in which rank 1 has the fault in the step for which it holds."""
    line = f"            if world.rank == 1 and {condition}:\n                {fault}\n"
    return changed_copy(to, f"mnist/{RECIPES[strategy]}.py", STEP, line + STEP)


MEMORY_LIMIT = (
    "import psutil, resource\n"
    "                limit = psutil.Process().memory_info().vms + 2**20\n"
    "                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
    "                images.repeat(10_000, 1, 1, 1)"
)


# Whether the others notice that a rank vanished depends on the launcher
@pytest.mark.parametrize(
    ("strategy", "fault"),
    [
        *((strategy, "__import__('os')._exit(0)") for strategy in RECIPES),
        ("ddp_spawn", MEMORY_LIMIT),
    ],
    ids=["ddp_spawn ends", "ddp_launch ends", "hvd_gloo ends", "memory limit"],
)
def test_fault_of_one_rank(strategy, fault, tmp_path):
    """In the second epoch: all ranks end, and the checkpoint of the first epoch is good."""
    if strategy.startswith("hvd"):
        need_horovod(strategy)
    step = "(run.position.epoch, run.position.samples) == (1, 256)"
    copy = faulty_copy(tmp_path, strategy, step, fault)
    command = f"{strategies(2, copy)[strategy]} {SHORT} --epochs 3 --log-dir log"
    output = fails(command, tmp_path)
    assert "epoch 1/3" in output
    assert "epoch 2/3" not in output
    assert place(good(tmp_path / "log"))[0] == 1


def test_a_rank_hangs(tmp_path):
    """The watchdogs end both ranks, and torchfrtrace names the one for which the other waited."""
    # The watchdog also sees the first step of an epoch. Within step(), where the other rank waits:
    # whichever of them ends first, its stack has it.
    line = "        optimizer.zero_grad()\n"
    hangs = "if (world.rank, run.position.epoch, run.position.samples) == (1, 1, 0)"
    fault = f"        {hangs}:\n            __import__('time').sleep(1000)\n"
    copy = changed_copy(tmp_path, "mnist/ddp_launch.py", line, fault + line)
    command = f"{strategies(2, copy)['ddp_launch']} {SHORT} --epochs 3 --log-dir log --timeout 30"
    output = fails(command, tmp_path, TORCH_FR_BUFFER_SIZE="2000")
    assert "Timeout (0:00:30)!" in output
    # Ranks that write at the same time mix their words, but not the letters of a word.
    assert " in step" in output
    assert place(good(tmp_path / "log"))[0] == 1
    # That of 2.11 does not read what ranks of Gloo write.
    if not torch.__version__.startswith("2.11."):
        torchfrtrace = Path(sys.executable).parent / "torchfrtrace"
        trace = compute(f"python {torchfrtrace} --prefix collectives- log", tmp_path)
        assert trace.count("Not all ranks joining collective") == 1, trace
        assert trace.count("missing ranks: {1}") == 1, trace


@pytest.mark.parametrize("strategy", ["ddp_launch", "hvd_gloo"])
def test_loss_of_one_rank_is_not_finite(strategy, tmp_path):
    """All ranks end in the same step and say why, and the checkpoint from before is good."""
    if strategy.startswith("hvd"):
        need_horovod(strategy)
    copy = faulty_copy(tmp_path, strategy, "run.position.epoch == 1", "sums.add(loss=float('nan'))")
    command = f"{strategies(2, copy)[strategy]} {SHORT} --epochs 3 --log-dir log"
    output = compute(command, tmp_path, status=1)
    assert output.count("the loss is not finite") == 2, output
    assert "Traceback" not in output
    assert place(good(tmp_path / "log"))[0] == 1


@pytest.mark.parametrize("recipe", ["ddp_amp.py", "hvd.py"])
def test_gradients_that_are_never_finite(recipe, tmp_path):
    """The loss is right, and fp16 skips every step: the run ends, and says why."""
    if recipe == "hvd.py":
        need_horovod("hvd_gloo")
    loss = "            loss = F.cross_entropy(logits, labels)\n        # amp: else"
    infinite = "            loss = loss + 0 * (logits - logits).float().abs().sqrt().sum()\n"
    changed = loss.replace("        # amp", f"{infinite}        # amp")
    copy = changed_copy(tmp_path, f"mnist/{recipe}", loss, changed)
    command = strategies(2, copy)["hvd_gloo" if recipe == "hvd.py" else "ddp_launch"]
    command = command.replace("ddp_launch.py", "ddp_amp.py")
    said = compute(
        f"{command} {SHORT} -b 4 --epochs 3 --amp-dtype fp16 --log-seconds 0", tmp_path, status=1
    )
    assert " skipped 10 lr" in said
    assert "the loss scale has fallen to 6.10352e-05" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("strategy", ["single", "ddp_spawn"])
def test_disk_full_during_a_save(strategy, tmp_path):
    """There is room for two checkpoints of 0.5 MB, and not for a third."""
    commands = {"single": f"python {ROOT}/mnist/single.py", **strategies(2, ROOT / "mnist")}
    command = f"{commands[strategy]} {SHORT} --epochs 4 --log-dir disk"
    output = fails(command, tmp_path, disk=("disk", "1200k"))
    assert output.count("cannot save in disk (No space left on device)") == 1, output
    assert "Traceback" not in output
    whole_epochs = len(re.findall(r"^epoch \d/4: ", output, re.MULTILINE))
    assert whole_epochs == 1
    assert place(good(tmp_path / "copy")) == (1, 0), "the one behind the evaluation"
    assert not list((tmp_path / "copy").glob(".*.partial")), "no partial file takes up space"


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


def run_with_a_loader_worker(flags, cwd):
    """A run in its second epoch, and the loader worker of its training data."""
    job = ForkedJob(f"python {ROOT}/imagenet/single.py {flags} --epochs 1000 --workers 1", cwd)
    job.wait_for("epoch 1/1000")
    worker, _of_validation = psutil.Process(job.process.pid).children()
    return job, worker


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_loader_worker(number, tree, tmp_path):
    """The run ends if a loader worker is killed (as by a memory limit), or hangs for --timeout."""
    job, worker = run_with_a_loader_worker(f"{tree} --timeout 30", tmp_path)
    worker.send_signal(number)
    assert job.finish() != 0
    assert place(good(tmp_path / "log"))[0] > 0
    if number == signal.SIGSTOP:
        assert "Timeout (0:00:30)!" in job.output()
        assert "loader.py" in job.output()


def test_signals_to_loader_workers(tree, tmp_path):
    """SIGUSR2 shows where one is. SLURM sends SIGTERM to all processes: the run saves and stops.

    It needs its workers until then.
    """
    job, worker = run_with_a_loader_worker(tree, tmp_path)
    worker.send_signal(signal.SIGUSR2)
    job.wait_for("in _worker_loop")
    epochs = job.output().count("epoch ")
    job.wait_for(f"epoch {epochs + 2}/1000")
    job.signal(signal.SIGTERM, everyone=True)
    assert job.finish() == 0, job.output()
    assert "stopped after a signal" in job.output()


def test_tiny_shared_memory(tree, tmp_path):
    """Loader workers pass batches through /dev/shm; one of 32 images of 128x128 is 1.5 MB."""
    torchrun = strategies(2, ROOT / "imagenet")["ddp_launch"]
    command = f"{torchrun} {tree} -b 32 --image-size 128 --epochs 1 --workers 2"
    output = fails(command, tmp_path, disk=("/dev/shm", "1m"))
    assert "ddp_launch.py: a loader worker found no room in /dev/shm" in output
    # torchrun prints one of its own.
    assert output.count("Traceback") == 1
    assert not list((tmp_path / "log").glob("*.pt"))


def test_stacks_of_ranks_and_the_death_of_one(tmp_path):
    """SIGUSR2 to all processes of a job shows where each rank is, and training goes on.

    If one is killed, the others end, and the one that saves says how to continue.
    """
    command = f"python {ROOT}/mnist/ddp_spawn.py -g 2 {SHORT} --epochs 2000 --log-dir log"
    job = ForkedJob(command, tmp_path)
    job.wait_for("epoch 1/2000")
    processes = job.alive()
    assert len(processes) == 3, "two ranks, and the one that started them"
    for process in processes:
        process.send_signal(signal.SIGUSR2)
    wait_until(lambda: job.output().count("Current thread") >= len(processes), job)
    epochs = job.output().count("epoch ")
    job.wait_for(f"epoch {epochs + 2}/2000")
    assert "ddp_spawn.py" in job.output()
    _, last_rank = psutil.Process(job.process.pid).children()
    last_rank.kill()
    assert job.finish() == 1
    assert ": continue with --resume log/last.pt\n" in job.output()
    assert good(tmp_path / "log")
