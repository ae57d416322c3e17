"""A SLURM cluster of two nodes (cluster.sh), and jobs on it."""

import os
import re
import shutil
import subprocess
import time
import uuid
from pathlib import Path

import psutil
import pytest
from launch import ENVIRONMENT, MARK, PATIENCE, need
from recipes import DATASETS, ROOT

# For a test that starts MPI with srun: about once in 130 times MPI_Init crashes on overloaded
# cores (docs/clusters.md)
MPI_INIT_CAN_CRASH = pytest.mark.flaky(reruns=2, only_rerun="Segmentation fault")

# States of a job that has ended for good. Others can be there for a moment, such as SIGNALING.
ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
    *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"),
}


def need_cluster():
    need(
        all(map(shutil.which, ("slurmctld", "slurmd", "munged", "ip", "sshd"))),
        "apt-get install slurm-wlm munge iproute2 openssh-server, for a SLURM cluster",
    )
    unshare = subprocess.run(
        ["unshare", "--fork", "--pid", "--mount", "--net", "--uts", "true"], capture_output=True
    )
    need(
        os.geteuid() == 0 and unshare.returncode == 0,
        "root, and namespaces (unshare), for a SLURM cluster",
    )


def link_repository(folder):
    """Link the repository's folders into `folder`, so that jobs write there."""
    for name in ("slurm", "scripts", "common", *(dataset.name for dataset in DATASETS)):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)


class Cluster:
    """cluster.sh, running until it is closed, and a user's commands on its login node."""

    def __init__(self, **environment):
        self.mark = uuid.uuid4().hex
        self.environment = {
            **os.environ,
            **ENVIRONMENT,
            **environment,
            MARK: self.mark,
            "CUDA_VISIBLE_DEVICES": "",
        }
        self.process = subprocess.Popen(
            [Path(__file__).with_name("cluster.sh"), "sh", "-c", "echo ready; exec cat"],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self.environment,
        )
        assert self.process.stdout.readline() == "ready\n", "tests/helpers/cluster.sh did not start"
        self.init = psutil.Process(self.process.pid).children()[0].pid

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait(60)

    def command(self, command):
        """The arguments that run a shell command on the login node."""
        namespaces = ["--mount", "--net", "--uts", "--pid"]
        return ["nsenter", f"--target={self.init}", *namespaces, "bash", "-c", command]

    def run(self, command, cwd=ROOT, status=0, **environment):
        """The output of a command that has to end with `status`."""
        done = subprocess.run(
            self.command(f"cd {cwd}; {command}"),
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == status, (
            f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
        return done.stdout


class SlurmJob:
    """A job, submitted from a folder that links to what the repository has."""

    def __init__(self, cluster, folder, arguments, **environment):
        link_repository(folder)
        self.cluster = cluster
        self.folder = folder
        self.id = cluster.run(f"sbatch --parsable {arguments}", folder, **environment).strip()

    def shown(self, name):
        """The values of a field of `scontrol show job`, of each task of an array."""
        return set(re.findall(rf"\b{name}=(\S+)", self.cluster.run(f"scontrol show job {self.id}")))

    def log(self):
        return "".join(file.read_text() for file in self.folder.glob(f"*-{self.id}*.out"))

    def wait_for(self, text, count=1):
        """Return once its log has the regular expression `text`, `count` times."""

        def printed():
            return len(re.findall(text, self.log(), re.MULTILINE)) >= count

        self.wait_until(printed, f"no '{text}'")

    def wait_until(self, happened, what):
        """Return once `happened()`. Fail, and say `what`, if the job ends before."""
        end = time.monotonic() + PATIENCE
        while True:
            # Asked before the last look, by when a job that has ended has written everything.
            state = self.shown("JobState")
            # To ask SLURM takes a hundred times as long as a look at a file.
            for _ in range(20):
                if happened():
                    return
                time.sleep(0.1)
            assert not state <= ENDED, f"{what}, and it is {state}:\n{self.log()}"
            assert time.monotonic() < end, f"{what} in {PATIENCE} s:\n{self.log()}"

    def finish(self, state="COMPLETED"):
        """Wait until it, or each task of it, has ended with `state`; returns its log."""
        end = time.monotonic() + PATIENCE
        while not (now := self.shown("JobState")) <= ENDED:
            if time.monotonic() > end:
                self.cluster.run(f"scancel {self.id}")
                pytest.fail(f"it is still {now} after {PATIENCE} s:\n{self.log()}")
            time.sleep(1)
        assert now == {state}, f"{now}:\n{self.log()}"
        return self.log()

    def runs(self):
        """The folder of the run, which has one results.jsonl and the two newest checkpoints."""
        found = list((self.folder / "runs").iterdir())
        assert len(found) == 1
        return found[0]

    def ranks(self, node):
        """The processes of the script itself on a node, without those that started them."""
        found = []
        for process in psutil.process_iter():
            try:
                environment = process.environ()
                where = [
                    environment.get(name) for name in (MARK, "SLURM_JOB_ID", "SLURMD_NODENAME")
                ]
                words = " ".join(process.cmdline())
                is_script = re.match(r"\S*python\S*( -u)? \S+\.py\b", words)
                if where == [self.cluster.mark, self.id, node] and is_script:
                    found.append(process)
            except psutil.Error:
                pass
        return found
