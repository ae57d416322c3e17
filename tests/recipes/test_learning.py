"""The models that a laptop trains learn on real images with the defaults."""

from forked import compute
from launch import evaluations, strategies
from recipes import ROOT


def accuracy(command, steps, cwd):
    """The validation accuracy after the first steps of a run with the defaults."""
    compute(f"{command} --max-steps {steps} --log-dir log", cwd=cwd)
    (evaluation,) = evaluations(cwd / "log")
    return evaluation["val/accuracy"]


def test_real_mnist(real_data, tmp_path):
    """The default model learns on four processes. (test_parity.py: one computes the same.)"""
    command = f"{strategies(4, ROOT / 'mnist')['ddp_launch']} --data-dir {real_data('mnist')}"
    assert accuracy(command, 100, tmp_path) >= 0.96


def test_real_cifar10(real_data, tmp_path):
    """The model for users without a GPU learns with the defaults."""
    command = f"python {ROOT}/cifar10/single.py --data-dir {real_data('cifar10')} --model convnet"
    assert accuracy(command, 300, tmp_path) >= 0.4
