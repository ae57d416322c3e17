"""Start recipes as a user does, in a shell, and check that they leave no process behind."""

import contextlib
import faulthandler
import io
import itertools
import json
import os
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
from recipes import ROOT

HOROVOD = "Horovod: scripts/install_horovod.sh"
MARK = "RECIPE_TEST"  # in the environment of all that a test starts, to find what it leaves behind
ENVIRONMENT = {  # for what a test starts: MPI may run as root; the same Python
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}


def setting():
    """The environment of what a test starts, beside that of the test."""
    # Tests run side by side, and OpenMP waits by spinning: one thread each.
    variables = {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    # Most tests start two processes, and each would want a GPU.
    if torch.cuda.device_count() < 2:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    return variables


def need(there, what):
    """Skip where a component is missing, and say how to get it.

    Fail where nothing may be missing (CI).
    """
    if not there:
        pytest.fail(f"missing: {what}") if os.environ.get("REQUIRE_ALL") else pytest.skip(what)


def need_horovod(*launchers):
    try:
        import horovod.torch as hvd
    except (ImportError, OSError):  # the second without the MPI that it was built with
        need(False, HOROVOD)
    if any("mpi" in launcher for launcher in launchers):
        need(
            shutil.which("mpirun") and hvd.mpi_built(),
            f"Open MPI: apt-get install openmpi-bin libopenmpi-dev, and then again {HOROVOD}",
        )


# Each worker of pytest-xdist has a range of its own, and begins where another session did not.
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
# Seconds after which a process counts as one that hangs: less than the recipes' --timeout, and far
# more than any takes, as no test is about speed.
PATIENCE = 590
PORTS = itertools.count(20_000 + 1000 * WORKER + os.getpid() % 500)


def free_port():
    """A port that no other test uses. (From 32768 on, Linux assigns them by itself.)"""
    for port in PORTS:
        with socket.socket() as server, contextlib.suppress(OSError):
            server.bind(("", port))
            return port


def strategies(processes, folder):
    """{name: command} of each recipe of `folder` that averages gradients.

    (benchmarks/runs.py has the same, but imports common/, and forked.py forks from a process that
    has imported this file: a script that a test has copied would get the repository's common/ and
    not its own.)
    """
    return {
        "ddp_spawn": f"python {folder}/ddp_spawn.py -g {processes}",
        "ddp_launch": f"torchrun --standalone --nproc-per-node={processes} {folder}/ddp_launch.py",
        "fsdp": f"torchrun --standalone --nproc-per-node={processes} {folder}/fsdp.py",
        "hvd_gloo": f"horovodrun --gloo -np {processes} python {folder}/hvd.py",
        "hvd_mpi": f"mpirun --oversubscribe --bind-to none -np {processes} python {folder}/hvd.py",
    }


def wait_until(happened, job):
    """Return once `happened()`. Fail if the job ends before, or after PATIENCE seconds."""
    end = time.monotonic() + PATIENCE
    while not happened():
        # Once more, as it may have happened just before the end.
        assert job.running() or happened(), f"{job.command} ended:\n{job.output()}"
        assert time.monotonic() < end, f"{job.command} hangs:\n{job.output()}"
        time.sleep(0.02)


class Job:
    """A shell command in a session of its own. All that it starts has a mark, to be found."""

    def __init__(self, command, cwd, **environment):
        self.command = command
        self.printed = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115 - it is read as long as the job is known
        self.process = self.start(cwd, environment)

    def start(self, cwd, environment):
        """Start the command in `cwd`, and return its process."""
        self.mark = uuid.uuid4().hex
        return subprocess.Popen(
            ["bash", "-c", self.command],
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=self.printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **setting(), MARK: self.mark, **environment},
            # A background job ignores it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def owns(self, process):
        """Whether this job has started a process of psutil, itself or through another."""
        return process.environ().get(MARK) == self.mark

    def output(self):
        """All that it printed, without the rank that horovodrun puts before each line."""
        return re.sub(r"\[\d+(,\d+)?\]<std(out|err)>:", "", Path(self.printed.name).read_text())

    def alive(self):
        """The processes that it started and that still run, anywhere in the process tree."""
        found = []
        for process in psutil.process_iter():
            try:
                if self.owns(process) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                pass
        return found

    def wait_for(self, text):
        """Return once it has printed `text`."""
        wait_until(lambda: text in self.output(), self)

    def running(self):
        return self.process.poll() is None

    def signal(self, number, everyone=False):
        """Send a signal to the process group, as a terminal does; or to each process of the job."""
        if everyone:
            for process in self.alive():
                with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
                    process.send_signal(number)
        else:
            os.killpg(self.process.pid, number)

    def kill(self):
        """SIGKILL to all its processes, and wait until they have closed their files.

        One that frees its memory has no environment any more, by which alive() finds it.
        """
        others = [process for process in self.alive() if process.pid != self.process.pid]
        # First the launcher and its process group: ranks end with their launcher.
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.signal(signal.SIGKILL, everyone=True)
        end = time.monotonic() + PATIENCE
        while not all(map(has_ended, others)):
            assert time.monotonic() < end, f"{self.command} still runs after SIGKILL: {others}"
            time.sleep(0.1)

    def finish(self):
        """Wait for the end, and that of all that it started, and return the exit status."""
        try:
            status = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL, everyone=True)
            pytest.fail(f"{self.command} still ran after {PATIENCE} s:\n{self.output()}")
        end = time.monotonic() + PATIENCE
        while self.alive() and time.monotonic() < end:
            time.sleep(0.1)
        left = self.alive()
        self.signal(signal.SIGKILL, everyone=True)
        assert not left, f"{self.command} left {left} behind"
        return status


def has_ended(process):
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def run(command, cwd, status=0, **environment):
    """Run a command to its end and return what it printed.

    Fail if its exit status is not `status`.
    """
    job = Job(command, cwd, **environment)
    ended_with = job.finish()
    assert ended_with == status, f"{command} ended with {ended_with}, not {status}:\n{job.output()}"
    # What a thread of Gloo prints when it aborts its process.
    assert "terminate called" not in job.output(), job.output()
    return job.output()


def random_seed():
    """A seed for a random test; the test prints it, and SEED in the environment repeats it."""
    seed = int(os.environ.get("SEED", random.randrange(2**32)))
    print(f"SEED={seed}")
    return seed


def checkpoint(folder, name="last.pt"):
    return torch.load(Path(folder) / name, weights_only=True)


def place(saved):
    """(epoch, samples) of the position in a checkpoint."""
    return saved["position"]["epoch"], saved["position"]["samples"]


def evaluations(folder):
    """The lines of results.jsonl about evaluations."""
    lines = map(json.loads, (Path(folder) / "results.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == "evaluation"]


# For `largest_difference` of two runs in float64 (recipes.in_float64). Sums in another order
# differ in their last bits, and the difference grows with each step, by an amount that depends on
# the CPU. After the twenty steps of these tests it is below 1e-15 in float64, and 3e-7 in
# float32.
TOLERANCE = 1e-12


def largest_difference(a, b):
    """The largest difference between dicts of tensors, relative to each tensor's largest value."""
    assert a.keys() == b.keys()
    assert all(torch.isfinite(tensor).all() for tensor in (*a.values(), *b.values()))
    return max(((a[name] - b[name]).abs().max() / b[name].abs().max()).item() for name in a)


def assert_same(a, b):
    """Bit by bit, through dicts and lists."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    else:
        assert a == b


def everything(folder):
    """All files in a folder, with their bytes, but that of common/lease.py."""
    return sorted(
        (path, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".in-use"
    )


def need_mounts():
    unshare = subprocess.run(["unshare", "-m", "true"], capture_output=True)
    need(os.geteuid() == 0 and unshare.returncode == 0, "root and unshare, to mount a small disk")


def as_nobody(folder, function, *arguments):
    """function(*arguments) as another user, in `folder`; return what it raises, as text."""
    need(os.geteuid() == 0, "root, to become another user")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        os.setgid(65534)
        os.setuid(65534)
        try:
            function(*arguments)
        except Exception as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as said:
        return said.read()


def one_line(shown):
    lines = shown.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def refused_here(command, cwd):
    """The one line that "mnist/single.py --flags" prints before it ends with status 2.

    It runs in this process.
    """
    name, *flags = command.split()
    before, shown = everything(cwd), io.StringIO()
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
    }
    try:
        with (
            mock.patch.object(sys, "argv", [name, *flags]),
            # It would be held until the end of all tests.
            mock.patch("common.lease.hold"),
            contextlib.chdir(cwd),
            mock.patch.object(sys, "path", [str((ROOT / name).parent), *sys.path]),
            contextlib.redirect_stdout(shown),
            contextlib.redirect_stderr(shown),
            pytest.raises(SystemExit, match="2"),
        ):
            runpy.run_path(str(ROOT / name), run_name="__main__")
    finally:
        faulthandler.cancel_dump_traceback_later()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    line = one_line(shown.getvalue())
    assert line.startswith(f"{Path(name).name}: ")
    assert everything(cwd) == before, "a refused run leaves nothing behind"
    return line
