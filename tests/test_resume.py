"""A run that was killed and resumed ends with the very weights of one that was not."""

import signal
import time

import pytest
import torch
from launch import ROOT, Job, checkpoint, need_horovod, run, strategies

RUNS = {
    "mnist single": "single", "cifar10 single": "single", "mnist ddp_launch": "ddp_launch",
    "cifar10 ddp_spawn": "ddp_spawn", "cifar10 hvd": "hvd_gloo", "cifar10 hvd --momentum 0": "hvd_gloo",
}


@pytest.mark.parametrize("which", RUNS)
def test_killed_in_the_third_epoch(which, tmp_path):
    dataset, strategy = which.split()[0], RUNS[which]
    if strategy.startswith("hvd"):
        need_horovod(strategy)
    command = {"single": f"python {ROOT}/{dataset}/single.py", **strategies(2, ROOT / dataset)}[strategy]
    command += " --synthetic 8192 --epochs 4 --model convnet --lr 0.02 --wd 5e-4 --device cpu"
    command += which.partition(" --")[1] + which.partition(" --")[2]
    run(f"{command} --log-dir whole", cwd=tmp_path)
    killed = Job(f"{command} --log-dir part", cwd=tmp_path)
    killed.wait_for("epoch 2/4")
    while checkpoint(tmp_path / "part")["epoch"] < 2:  # it is saved just after the line is printed
        time.sleep(0.02)
    killed.signal(signal.SIGKILL, everyone=True)
    assert killed.finish() != 0
    assert "epoch 3/4" not in killed.output()
    assert checkpoint(tmp_path / "part")["epoch"] == 2
    output = run(f"{command} --log-dir part --resume part/last.pt", cwd=tmp_path)
    assert "resumed from part/last.pt after epoch 2" in output
    assert "epoch 3/4" in output
    assert "--epochs asks for no more" in run(f"{command} --log-dir part --resume part/last.pt", cwd=tmp_path)
    whole, resumed = checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "part")
    assert whole["epoch"] == resumed["epoch"] == 4
    assert [epoch["val"]["loss"] for epoch in whole["epochs"]] == [epoch["val"]["loss"] for epoch in resumed["epochs"]]
    for part in ("model", "random_states", "optimizer", "scheduler"):
        assert_same(whole[part], resumed[part])


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
