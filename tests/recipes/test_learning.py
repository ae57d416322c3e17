"""The models that a laptop trains learn on real images with the defaults."""

import json

from forked import compute
from launch import strategies
from recipes import ROOT


def learns(command, epochs, cwd):
    """The validation accuracy after the last epoch of a run with the defaults."""
    compute(f"{command} --epochs {epochs} --log-dir log", cwd=cwd)
    last = json.loads((cwd / "log" / "results.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["epoch"]) == ("evaluation", epochs)
    return last["val/accuracy"]


def test_real_mnist(real_data, tmp_path):
    """The default model learns on four processes. (test_parity.py: one computes the same.)"""
    command = f"{strategies(4, ROOT / 'mnist')['ddp_launch']} --data-dir {real_data('mnist')}"
    assert learns(command, 1, tmp_path) >= 0.97


def test_real_cifar10(real_data, tmp_path):
    """The model for users without a GPU learns with the defaults."""
    command = f"python {ROOT}/cifar10/single.py --data-dir {real_data('cifar10')} --model convnet"
    assert learns(command, 1, tmp_path) >= 0.45
