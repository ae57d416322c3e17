"""Start recipes as a user does, in a shell, and see that they leave no process behind."""

import ast
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
DATASETS = sorted(path.parent for path in ROOT.glob("*/single.py"))
# A recipe has its name in every folder; the other modules of a folder are what its recipes import.
NAMES = set.intersection(*({path.name for path in folder.glob("*.py")} for folder in DATASETS))
RECIPES = sorted(folder / name for folder in DATASETS for name in NAMES)
HOROVOD = "Horovod: scripts/install_horovod.sh"
STEP = "        metrics.update(loss, logits, labels)\n"  # of train_one_epoch in each recipe; run.step comes next
MARK = "RECIPE_TEST"  # in the environment of all that a test starts, so that what it leaves behind is found
ENVIRONMENT = {  # of what a test starts: MPI runs as root, and yields its core where it waits; this very Python
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_mpi_yield_when_idle": "1",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def need(there, what):
    """Skip where a component is missing, and say how to get it; fail where nothing may be missing (CI)."""
    if not there:
        pytest.fail(f"missing: {what}") if os.environ.get("REQUIRE_ALL") else pytest.skip(what)


@functools.cache
def horovod_build():
    """What Horovod's build has, in its own words."""
    check = [sys.executable, "-m", "horovod.runner.launch", "--check-build"]
    return subprocess.run(check, capture_output=True, text=True).stdout


def need_horovod(*launchers):
    need("[X] PyTorch" in horovod_build(), HOROVOD)
    if any("mpi" in launcher for launcher in launchers):
        need(shutil.which("mpirun") and "[X] MPI" in horovod_build(),
             f"Open MPI: apt-get install openmpi-bin libopenmpi-dev, and then again {HOROVOD}")


def small(dataset):
    """The flags with which a test on the CPU starts a recipe of `dataset`: small images, where their size is free."""
    return "--image-size 32" if dataset == "imagenet" else ""


def name_of(path):
    return f"{path.parent.name}/{path.name}"


def commands(recipe):
    """The commands in the docstring of a recipe, each an indented line of its own."""
    docstring = ast.get_docstring(ast.parse(recipe.read_text()), clean=False)
    return re.findall(r"^    (\S.*)$", docstring, flags=re.MULTILINE)


def strategies(processes, folder):
    """How to start each recipe of `folder` that averages gradients: {name: command}, for that many processes."""
    return {
        "ddp_spawn": f"python {folder}/ddp_spawn.py -g {processes}",
        "ddp_launch": f"torchrun --standalone --nproc-per-node={processes} {folder}/ddp_launch.py",
        "hvd_gloo": f"horovodrun --gloo -np {processes} python {folder}/hvd.py",
        "hvd_mpi": f"mpirun --oversubscribe --bind-to none -np {processes} python {folder}/hvd.py",
    }


class Job:
    """A shell command in a process group of its own, whose descendants are known by a mark in their environment."""

    def __init__(self, command, cwd, **environment):
        self.command, self.mark = command, uuid.uuid4().hex
        self.printed = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115 - it is read as long as the job is known
        # Tests run side by side, and OpenMP waits by spinning: one thread each.
        setting = {**ENVIRONMENT, "OMP_NUM_THREADS": "1", MARK: self.mark}
        if torch.cuda.device_count() < 2:  # most tests start two processes, and each would want a GPU
            setting["CUDA_VISIBLE_DEVICES"] = ""
        self.process = subprocess.Popen(
            ["bash", "-c", command], cwd=cwd, stdin=subprocess.DEVNULL, stdout=self.printed, stderr=subprocess.STDOUT,
            start_new_session=True, env={**os.environ, **setting, **environment},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # a background job ignores it

    def output(self):
        """All that it printed, without the rank that horovodrun puts before each line."""
        return re.sub(r"\[\d+(,\d+)?\]<std(out|err)>:", "", Path(self.printed.name).read_text())

    def alive(self):
        """What it started and what still runs, wherever in the process tree."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                pass
        return found

    def wait_for(self, text, timeout=90):
        """Return once it has printed `text`; fail if it ends before, or takes longer than `timeout` seconds."""
        end = time.monotonic() + timeout
        while text not in self.output():
            assert self.process.poll() is None, f"{self.command} ended without '{text}':\n{self.output()}"
            assert time.monotonic() < end, f"{self.command}: no '{text}' in {timeout} s:\n{self.output()}"
            time.sleep(0.05)

    def signal(self, number, everyone=False):
        """Send a signal to what a terminal would: the process group; or to each process that there is."""
        if everyone:
            for process in self.alive():
                process.send_signal(number)
        else:
            os.killpg(self.process.pid, number)

    def finish(self, timeout=150):
        """Wait for the end, check that nothing is left 5 s later, and return the exit status."""
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL, everyone=True)
            pytest.fail(f"{self.command} still ran after {timeout} s:\n{self.output()}")
        end = time.monotonic() + 5
        while self.alive() and time.monotonic() < end:
            time.sleep(0.1)
        left = self.alive()
        for process in left:
            process.kill()
        assert not left, f"{self.command} left {left} behind"
        return status


def run(command, cwd, status=0, timeout=150, **environment):
    """Run a command to its end and return what it printed; fail if its exit status is not `status`."""
    job = Job(command, cwd, **environment)
    ended_with = job.finish(timeout)
    assert ended_with == status, f"{command} ended with {ended_with}, not {status}:\n{job.output()}"
    return job.output()


def changed_copy(to, recipe, line, replacement):
    """Copy the recipes of a data set and common/ to the folder `to`, with one line of `recipe` replaced."""
    dataset, name = recipe.split("/")
    for folder in ("common", dataset):
        shutil.copytree(ROOT / folder, to / folder)
    path = to / dataset / name
    text = path.read_text()
    assert text.count(line) == 1
    path.write_text(text.replace(line, replacement))
    return to / dataset


def checkpoint(folder):
    return torch.load(Path(folder) / "last.pt", weights_only=True)


def largest_difference(a, b):
    """The largest difference between two dicts of tensors, relative to the largest value of each tensor."""
    assert a.keys() == b.keys()
    assert all(torch.isfinite(tensor).all() for tensor in (*a.values(), *b.values()))
    return max(((a[name] - b[name]).abs().max() / b[name].abs().max()).item() for name in a)
