"""The models that a laptop trains begin to learn on real images with the defaults."""

import math

from forked import compute
from launch import evaluations, strategies
from recipes import ROOT

# The loss of a model that knows nothing of the ten classes
CHANCE = math.log(10)


def loss(command, steps, cwd):
    """The validation loss after the first steps of a run with the defaults."""
    compute(f"{command} --max-steps {steps} --log-dir log", cwd=cwd)
    *_, last = evaluations(cwd / "log")
    return last["val/loss"]


def test_real_mnist(real_data, tmp_path):
    """The default model learns on two processes. (test_parity.py: one computes the same.)"""
    command = f"{strategies(2, ROOT / 'mnist')['ddp_launch']} --data-dir {real_data('mnist')}"
    assert loss(command, 40, tmp_path) < 0.5 * CHANCE


def test_real_cifar10(real_data, tmp_path):
    """The model for users without a GPU learns with the defaults."""
    command = f"python {ROOT}/cifar10/single.py --data-dir {real_data('cifar10')} --model convnet"
    assert loss(command, 60, tmp_path) < 0.9 * CHANCE
