"""skypilot.yaml: what it runs, on two nodes of the tests' cluster, as two machines of a cloud."""

import pytest
import yaml
from forked import compute
from launch import assert_same, checkpoint
from recipes import ROOT

FLAGS = "--synthetic 640 --batch-size 32 --arch lenet --epochs 2"
RECIPE = "cifar10/ddp_amp.py --log-dir"


@pytest.fixture
def script(tmp_path):
    """The script that SkyPilot starts on each machine, with a small recipe and folders of here."""
    text = yaml.safe_load((ROOT / "skypilot.yaml").read_text())["run"]
    for old, new in (
        (RECIPE, f"mnist/ddp_launch.py {FLAGS} --log-dir"),
        ('"/runs/', f'"{tmp_path}/runs/'),
        ("~/recipes/bin/", ""),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    # With the variables that SkyPilot sets on each of its machines.
    (tmp_path / "run.sh").write_text(
        "export SKYPILOT_NODE_RANK=$SLURM_PROCID SKYPILOT_NUM_NODES=2\n"
        "export SKYPILOT_NUM_GPUS_PER_NODE=1 SKYPILOT_TASK_ID=sky-managed-1\n"
        'SKYPILOT_NODE_IPS=$(getent ahostsv4 node1 node2 | awk "/STREAM/ {print \\$1}")\n'
        f"export SKYPILOT_NODE_IPS OMP_NUM_THREADS=1\n{text}"
    )
    return tmp_path / "run.sh"


def test_two_machines(cluster, script, tmp_path):
    """They train to the same weights as two local processes, and a second start goes on."""
    log = cluster.run(f"srun --nodes=2 --ntasks-per-node=1 bash {script} 2>&1")
    assert "world size 2" in log
    compute(
        f"torchrun --standalone --nproc-per-node=2 {ROOT}/mnist/ddp_launch.py {FLAGS} --device cpu "
        "--log-dir log",
        tmp_path,
    )
    run = tmp_path / "runs" / "sky-managed-1"
    assert_same(checkpoint(run)["model"], checkpoint(tmp_path / "log")["model"])
    again = cluster.run(f"srun --nodes=2 --ntasks-per-node=1 bash {script} 2>&1")
    assert "resumed from" in again
