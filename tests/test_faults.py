"""What clusters do to a run: it ends with one line and leaves no process, and what was saved stays good."""

import os
import re
import signal
import subprocess
import time

import pytest
from launch import ROOT, Job, changed_copy, checkpoint, need, need_horovod, run, strategies

from common import checkpoint as checkpoints

STEP = "        metrics.update(loss, logits, labels)\n"  # of train_one_epoch; evaluate has none with this name
SHORT = "--synthetic 2560 --model lenet --device cpu"
OURS = re.compile(r'File "\S*/(mnist|cifar10|common)/\w+\.py"')  # in a traceback that is not the launcher's own
RECIPES = {"ddp_spawn": "ddp_spawn", "ddp_launch": "ddp_launch", "hvd_gloo": "hvd", "hvd_mpi": "hvd"}


def with_fault(strategy, fault, folder):
    """The command that starts a copy of a recipe of mnist on two processes, with the line `fault` after each step."""
    if strategy.startswith("hvd"):
        need_horovod(strategy)
    copy = changed_copy(folder, f"mnist/{RECIPES[strategy]}.py", STEP, f"{STEP}        {fault}\n")
    return f"{strategies(2, copy)[strategy]} {SHORT}"


def fails(command, cwd, *says):
    """What a command prints that ends with status 1 within a minute, each part of `says` once and no traceback."""
    job = Job(command, cwd)
    assert job.finish(60) == 1, job.output()
    for part in says:
        assert job.output().count(part) == 1, job.output()
    assert not OURS.search(job.output()), job.output()
    return job.output()


def on_small_disk(command, cwd, size, at):
    """`command` in a mount namespace of its own where `at` is a disk of `size`; what is on it at the end is copied."""
    unshare = subprocess.run(["unshare", "-m", "true"], capture_output=True)
    need(os.geteuid() == 0 and unshare.returncode == 0, "root and unshare, to mount a small disk")
    (cwd / at).mkdir(exist_ok=True)
    (cwd / "command.sh").write_text(f"mount -t tmpfs -o size={size} tmpfs {at}\n{command}\nstatus=$?\n"
                                    f"cp -a {at} copy\nexit $status\n")
    return "unshare -m bash command.sh"


@pytest.mark.parametrize("strategy", ["single", "ddp_spawn"])
def test_disk_full_during_a_save(strategy, tmp_path):
    """There is room for two checkpoints of 0.5 MB, and not for the third, which is written before the first goes."""
    command = {"single": f"python {ROOT}/mnist/single.py", **strategies(2, ROOT / "mnist")}[strategy]
    command += f" {SHORT} --epochs 4 --log-dir log --checkpoint-dir disk"
    command = on_small_disk(command, tmp_path, "1200k", "disk")
    output = fails(command, tmp_path, "cannot save a checkpoint in disk (No space left on device)")
    assert "epoch 3/4" in output
    _, content, broken = checkpoints.find("auto", tmp_path / "copy")
    assert checkpoints.unpack(content)["epoch"] == 2
    assert not broken
    assert not list((tmp_path / "copy").glob(".*")), "no torn file takes the room"


def test_disk_full_of_figures(tmp_path):
    """TensorBoard and results.json cannot be written: training goes on, and there is one warning."""
    command = f"python {ROOT}/mnist/single.py {SHORT} --epochs 3 --log-dir disk --checkpoint-dir checkpoints"
    command = on_small_disk(command, tmp_path, "4k", "disk")
    output = run(command, cwd=tmp_path)
    assert output.count("warning: no figures are written to disk (No space left on device)") == 1
    assert "Traceback" not in output
    assert checkpoint(tmp_path / "checkpoints")["epoch"] == 3


def test_folder_becomes_read_only(tmp_path):
    recipe = f"python {ROOT}/mnist/single.py {SHORT} --epochs 1000 --log-dir log --checkpoint-dir disk"
    remount = "while ! [ -e disk/last.pt ]; do sleep 0.05; done; mount -o remount,ro disk"
    command = on_small_disk(f"({remount}) & {recipe}", tmp_path, "10m", "disk")
    fails(command, tmp_path, "cannot save a checkpoint in disk (Read-only file system)")
    saved, _, broken = checkpoints.find("auto", tmp_path / "copy")
    assert saved
    assert not broken


def loader_workers(job, count):
    """The loader workers of all ranks, once there are `count`: processes whose parent runs the same recipe."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        processes = {process.pid: process for process in job.alive()}
        grandchildren = [process for process in processes.values()
                         if process.ppid() in processes and not process.children()
                         and process.cmdline() == processes[process.ppid()].cmdline()]
        if len(grandchildren) >= count:
            return grandchildren
        time.sleep(0.1)
    raise AssertionError(job.output())


@pytest.mark.parametrize("strategy", ["single", "ddp_launch"])
def test_loader_worker_killed(strategy, tmp_path):
    command = {"single": f"python {ROOT}/mnist/single.py", **strategies(2, ROOT / "mnist")}[strategy]
    job = Job(f"{command} {SHORT} --epochs 1000 --workers 1 --log-dir log", cwd=tmp_path)
    job.wait_for("epoch 1/1000")
    loader_workers(job, 1 if strategy == "single" else 2)[0].kill()
    assert job.finish(60) == 1
    assert job.output().count("it may have met the memory limit") == 1, job.output()
    assert not OURS.search(job.output())


def test_loader_worker_hangs(tmp_path):
    job = Job(f"python {ROOT}/mnist/single.py {SHORT} --epochs 1000 --workers 1 --timeout 8", cwd=tmp_path)
    job.wait_for("epoch 1/1000")
    worker = loader_workers(job, 1)[0]
    worker.send_signal(signal.SIGSTOP)
    assert job.finish(60) == 1
    assert "single.py: no step in 8 s (--timeout): it hangs in __iter__ (data.py:" in job.output()


def test_tiny_shared_memory(tmp_path):
    """Loader workers hand batches over by way of /dev/shm; one of 512 images of CIFAR-10 is 1.5 MB."""
    recipe = f"python {ROOT}/cifar10/ddp_spawn.py -g 2 --synthetic 2560 --model lenet --device cpu -b 512 --workers 2"
    fails(on_small_disk(recipe, tmp_path, "1m", "/dev/shm"), tmp_path, "a loader worker found no room in /dev/shm")


FAULTS = {
    "exit(0)": ("if run.rank == 1 and scheduler.last_epoch == 30: __import__('os')._exit(0)", "another rank is gone"),
    "memory limit": (
        "if run.rank == 1 and scheduler.last_epoch == 30:\n"
        "            import psutil, resource\n"
        "            resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**20,) * 2)\n"
        "            images.repeat(10_000, 1, 1, 1)", "out of memory: take a smaller --batch-size"),
    "loss not finite": ("if run.rank == 1 and scheduler.last_epoch == 33: metrics.update(loss / 0, logits, labels)",
                        "the loss is not finite (rank 1; epoch 2, by step 20)"),
    "hangs": ("if run.rank == 1 and scheduler.last_epoch == 30: __import__('time').sleep(1000)",
              "rank 1: no step in 8 s (--timeout): it hangs in train_one_epoch"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("strategy", RECIPES)
def test_fault_of_one_rank(fault, strategy, tmp_path):
    """In the second epoch: all ranks end, one line says why, and the checkpoint of the first epoch is good."""
    line, says = FAULTS[fault]
    # Eight seconds, as the import of TensorBoard at the end of the first epoch can take some
    command = f"{with_fault(strategy, line, tmp_path)} --epochs 3 --log-dir log --timeout 8"
    if fault == "exit(0)" and strategy == "hvd_mpi":
        says = "exiting improperly"  # mpirun notices first, and says so itself
    output = fails(command, tmp_path, says)
    assert "epoch 1/3" in output
    assert "epoch 2/3" not in output
    assert checkpoint(tmp_path / "log")["epoch"] == 1


def test_slow_download(tmp_path):
    """--timeout is for training: while one process prepares the data the others wait as long as it takes."""
    copy = changed_copy(tmp_path, "mnist/ddp_launch.py", "        files.download(args)  #",
                        "        __import__('time').sleep(6)  #")
    run(f"{strategies(2, copy)['ddp_launch']} {SHORT} --dry-run --timeout 3", cwd=tmp_path)


def test_stack_dump(tmp_path):
    job = Job(f"python {ROOT}/mnist/ddp_spawn.py -g 2 {SHORT} --epochs 30", cwd=tmp_path)
    job.wait_for("epoch 1/30")
    processes = [process for process in job.alive() if re.search("ddp_spawn|spawn_main", " ".join(process.cmdline()))]
    assert len(processes) == 3, "two ranks, and the one that started them"
    for process in processes:
        process.send_signal(signal.SIGUSR2)
    assert job.finish() == 0
    assert job.output().count("Current thread") == 3, job.output()
    assert "ddp_spawn.py\", line" in job.output()


def test_ranks_end_when_one_is_killed(tmp_path):
    job = Job(f"python {ROOT}/mnist/ddp_spawn.py -g 2 {SHORT} --epochs 1000 --log-dir log", cwd=tmp_path)
    job.wait_for("epoch 1/1000")
    rank = next(process for process in job.alive() if "multiprocessing.spawn" in " ".join(process.cmdline()))
    killed = time.monotonic()
    rank.kill()
    assert job.finish(60) == 1
    assert time.monotonic() - killed < 10
    assert "was ended by SIGKILL" in job.output() or "another rank is gone" in job.output()
    assert "Traceback" not in job.output()
