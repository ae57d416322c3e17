"""skypilot.yaml: what it runs, as two machines of a cloud start it."""

import subprocess

import yaml
from forked import ForkedJob, compute
from launch import assert_same, checkpoint, free_port
from recipes import ROOT

FLAGS = "--device cpu --synthetic 640 --batch-size 32 --arch lenet --epochs 2"
RECIPE = "cifar10/ddp_amp.py"
TORCHRUN = "~/recipes/bin/torchrun"


def commands(tmp_path):
    """The command of each machine: the file's own, with a small recipe and folders of here."""
    script = yaml.safe_load((ROOT / "skypilot.yaml").read_text())["run"]
    for old, new in (
        (TORCHRUN, "echo torchrun"),
        (RECIPE, f"{ROOT}/mnist/ddp_launch.py {FLAGS}"),
        ('"/runs/', f'"{tmp_path}/runs/'),
        ("29500", str(free_port())),
    ):
        assert script.count(old) == 1
        script = script.replace(old, new)
    return [
        subprocess.run(
            ["bash", "-c", script],
            # What SkyPilot sets on each of its machines.
            env={
                "SKYPILOT_NODE_RANK": str(rank),
                "SKYPILOT_NUM_NODES": "2",
                "SKYPILOT_NUM_GPUS_PER_NODE": "1",
                "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
                "SKYPILOT_TASK_ID": "sky-managed-1",
            },
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for rank in range(2)
    ]


def run(machines, cwd):
    """Run the command of each machine to its end; return what all printed."""
    jobs = [ForkedJob(command, cwd) for command in machines]
    assert [job.finish() for job in jobs] == [0, 0], [job.output() for job in jobs]
    return "".join(job.output() for job in jobs)


def test_two_machines(tmp_path):
    """They train to the same weights as two local processes, and a second start resumes."""
    machines = commands(tmp_path)
    assert "world size 2" in run(machines, tmp_path)
    recipe = f"{ROOT}/mnist/ddp_launch.py {FLAGS} --log-dir log"
    compute(f"torchrun --standalone --nproc-per-node=2 {recipe}", tmp_path)
    trained = tmp_path / "runs" / "sky-managed-1"
    assert_same(checkpoint(trained)["model"], checkpoint(tmp_path / "log")["model"])
    assert "resumed from" in run(machines, tmp_path)
