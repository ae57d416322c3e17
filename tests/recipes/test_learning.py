"""Each model learns on real images with the defaults."""

import json

import pytest
from forked import compute
from launch import strategies
from recipes import ROOT


def learns(command, epochs, cwd):
    """The validation accuracy after the last epoch of a run with the defaults."""
    compute(f"{command} --epochs {epochs} --log-dir log", cwd=cwd)
    last = json.loads((cwd / "log" / "results.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["epoch"]) == ("evaluation", epochs)
    return last["val/accuracy"]


@pytest.mark.parametrize(("strategy", "model"), [("single", "lenet"), ("ddp_launch", "convnet")])
def test_real_mnist(strategy, model, real_data, tmp_path):
    """Each model learns with the defaults, one on one process and one on four.

    Test_parity.py shows they are equal.
    """
    command = {"single": f"python {ROOT}/mnist/single.py", **strategies(4, ROOT / "mnist")}[
        strategy
    ]
    assert learns(f"{command} --data-dir {real_data('mnist')} --model {model}", 1, tmp_path) >= 0.97


def test_real_cifar10(real_data, tmp_path):
    """The model for users without a GPU learns with the defaults."""
    command = f"python {ROOT}/cifar10/single.py --data-dir {real_data('cifar10')} --model convnet"
    assert learns(command, 1, tmp_path) >= 0.45
