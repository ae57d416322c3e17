"""The learning rate and the batch, on any number of processes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.data import EpochSampler
from common.errors import InputError
from common.position import Position
from common.schedule import WarmupCosine, lr_factor, per_process

pytestmark = pytest.mark.check


def test_schedule():
    lr = 0.1 * lr_factor("linear", 4)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr)
    rates = WarmupCosine(optimizer, warmup_epochs=2, start_lr=0.1)
    position = Position(EpochSampler(100, 10), epochs=5)
    found = []
    for place in ((0, 0), (1, 0), (2, 0), (3, 50), (5, 0)):
        position.epoch, position.samples = place
        rates.set(position)
        found.append(rates.current)
    assert found == pytest.approx([0.1, 0.25, 0.4, 0.2, 0])
    assert [lr_factor(how, 4) for how in ("linear", "sqrt", "none")] == [4, 2, 1]
    assert lr_factor("linear", 4, global_batch_size=24) == 1


def test_each_group_keeps_its_own_rate():
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    groups = [{"params": [weights[0]], "lr": 0.1}, {"params": [weights[1]], "lr": 0.001}]
    optimizer = torch.optim.SGD(groups)
    rates = WarmupCosine(optimizer, warmup_epochs=2, start_lr=0.025)
    position = Position(EpochSampler(100, 10), epochs=10)
    for place in ((0, 0), (1, 0), (5, 0), (9, 50)):
        position.epoch, position.samples = place
        rates.set(position)
        backbone, head = (group["lr"] for group in optimizer.param_groups)
        assert backbone == pytest.approx(100 * head)


def test_a_global_batch_is_shared():
    assert per_process(64, None, 4) == 64
    assert per_process(64, 24, 4) == 6
    with pytest.raises(InputError, match="multiple of 5"):
        per_process(64, 24, 5)


@given(
    length=st.integers(100, 300),
    pieces=st.lists(st.tuples(st.integers(1, 25), st.integers(1, 4), st.integers(1, 40))),
    warmup_epochs=st.sampled_from([0, 0.3, 1, 2.5]),
    run=st.sampled_from([{"epochs": 3}, {"epochs": 1, "max_steps": 30}]),
)
def test_the_rate_of_a_run_in_pieces(length, pieces, warmup_epochs, run):
    """On any processes and batches: it rises with the samples, and then falls to 0 at the end.

    Each piece is (batch, processes, steps). OneTrainer 1604: it rose again after a resume;
    diffusers 8312: the warm-up depended on the processes; mmdetection 3800: from 2 to 4 GPUs.
    """
    weight = torch.nn.Parameter(torch.ones(1))
    saved = None
    rises, falls = [], []
    for batch, world_size, steps in [*pieces, (8, 1, 10_000)]:
        position = Position(EpochSampler(length, batch, 0, world_size), **run)
        if saved:
            position.load_state_dict(saved)
        rates = WarmupCosine(torch.optim.SGD([weight], 0.4), warmup_epochs, start_lr=0.1)
        for _ in range(steps):
            if position.over:
                break
            if position.steps_to_evaluation == 0:
                position.record_evaluation()
                continue
            rates.set(position)
            if position.epochs_done < warmup_epochs:
                rises.append(rates.current)
                assert rates.current == pytest.approx(
                    0.1 + 0.3 * position.epochs_done / warmup_epochs
                )
            else:
                falls.append(rates.current)
            position.advance()
        saved = position.state_dict()
    assert position.over
    assert falls == sorted(falls, reverse=True)
    if falls:
        # The next step would have the rate 0.
        rates.set(position)
        assert rates.current == pytest.approx(0, abs=1e-9)


def test_a_run_that_ends_before_the_rate_falls():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    sampler = EpochSampler(100, 10)
    rates = WarmupCosine(optimizer, warmup_epochs=2, start_lr=0.1)
    (line,) = rates.warn_if_short(Position(sampler, epochs=2))
    assert line == "the rate only rises: --warmup-epochs 2 is not less than the 2 epochs of the run"
    assert rates.warn_if_short(Position(sampler, epochs=1, max_steps=15))
    assert not rates.warn_if_short(Position(sampler, epochs=3))
