"""Steps of fp16 that are skipped are counted, and a run of nothing else ends."""

import sys
from types import SimpleNamespace

import pytest
import torch

from common.errors import RunError
from common.loss_scale import LossScales

pytestmark = pytest.mark.check
CPU = torch.device("cpu")


class Scaler:
    """A part of a state whose step overflows, or does not."""

    def __init__(self):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
        self.weight = torch.zeros(1, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.state = {"model": torch.nn.Linear(1, 1), "any name": self.scaler}

    def step(self, overflows):
        self.weight.grad = torch.full((1,), torch.inf if overflows else 1.0)
        # A GradScaler knows no scale before its first loss.
        self.scaler.scale(torch.ones(()))
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Apex:
    """What apex.amp has for two losses."""

    def __init__(self, monkeypatch):
        self.scale = 2.0**16
        self.state = {"amp": SimpleNamespace(state_dict=self.state_dict)}
        monkeypatch.setitem(sys.modules, "apex.amp", self.state["amp"])

    def state_dict(self):
        return {
            "loss_scaler0": {"loss_scale": self.scale, "unskipped": 0},
            "loss_scaler1": {"loss_scale": 2.0**16, "unskipped": 0},
        }

    def step(self, overflows):
        self.scale *= 0.5 if overflows else 1


@pytest.fixture(params=["GradScaler", "Apex"])
def training(request, monkeypatch):
    return Scaler() if request.param == "GradScaler" else Apex(monkeypatch)


def after(training, overflows):
    """The scales of a run with these steps."""
    scales = LossScales(training.state, CPU)
    scales.begin()
    for overflow in overflows:
        training.step(overflow)
        scales.count()
    return scales


def test_skipped_steps_are_counted(training):
    """Also where the scale grows again in between."""
    scales = after(training, [True, False, False, True, True, False])
    assert scales.figures() == {"skipped": 3}
    scales.require_a_step(6)


def test_a_scale_that_falls_and_falls(training):
    assert after(training, [True] * 20).figures() == {"skipped": 20}
    with pytest.raises(RunError, match="the loss scale has fallen to 3"):
        after(training, [True] * 11).figures()


def test_a_run_of_which_all_steps_were_skipped():
    with pytest.raises(RunError, match="all 3 steps of the run were skipped"):
        after(Scaler(), [True] * 3).require_a_step(3)


def test_without_a_scale():
    """fp32, and bf16, whose scaler is not enabled."""
    state = {"model": torch.nn.Linear(1, 1), "scaler": torch.amp.GradScaler("cpu", enabled=False)}
    scales = LossScales(state, CPU)
    scales.begin()
    scales.count()
    assert scales.figures() == {}
    scales.require_a_step(0)
