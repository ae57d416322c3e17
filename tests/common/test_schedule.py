"""The learning rate and the batch, on any number of processes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common import flags, schedule
from common.data import EpochSampler
from common.errors import InputError
from common.position import Position

pytestmark = pytest.mark.check


def parsed(words):
    parser = flags.Parser("A script.")
    flags.add_training_flags(parser, epochs=5, batch_size=10, lr=0.1, warmup_epochs=2)
    return parser.parse_args(words.split())


def optimizer_of(lr):
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr)


def steps_of(position, rates, steps=10_000):
    """Yield the rate of each step, at most `steps`, from `position` to the end of the run."""
    for _ in range(steps):
        if position.steps_to_evaluation == 0:
            position.record_evaluation()
        if position.over:
            return
        rates.set(position)
        yield rates.current
        position.advance()


@pytest.mark.parametrize(
    ("words", "processes", "peak"),
    [
        ("", 1, 0.1),
        ("", 4, 0.4),
        ("--scale-lr sqrt", 4, 0.2),
        ("--scale-lr none", 4, 0.1),
        ("-G 40", 4, 0.1),
        ("-G 40", 1, 0.1),
    ],
)
def test_the_rate_of_a_run(words, processes, peak):
    """Step k of W of the warm-up has k/W of the peak; then the rate falls to 0."""
    args = parsed(words)
    sampler = EpochSampler(400, schedule.batch_size(args, processes), 0, processes)
    rates = schedule.WarmupCosine(
        args.warmup_epochs, optimizer_of(schedule.peak_lr(args, processes))
    )
    found = list(steps_of(Position(sampler, args.epochs), rates))
    warm_up = 2 * sampler.steps_per_epoch
    expected = [peak * (step + 1) / warm_up for step in range(warm_up)]
    assert found[:warm_up] == pytest.approx(expected)
    falls = found[warm_up:]
    assert falls == sorted(falls, reverse=True)
    assert falls[0] == pytest.approx(peak)
    assert falls[len(falls) // 2] == pytest.approx(peak / 2)
    assert falls[-1] < 0.01 * peak


def test_a_global_batch_is_shared():
    assert schedule.batch_size(parsed("-b 64"), 4) == 64
    assert schedule.batch_size(parsed("-b 64 -G 24"), 4) == 6
    with pytest.raises(InputError, match="multiple of 5"):
        schedule.batch_size(parsed("-G 24"), 5)
    args = parsed("-G 24")
    args.accumulate = 3
    assert schedule.batch_size(args, 4) == 2


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
    saved = None
    falls = []
    for batch, world_size, steps in [*pieces, (8, 1, 10_000)]:
        position = Position(EpochSampler(length, batch, 0, world_size), **run)
        optimizer = optimizer_of(0.4)
        rates = schedule.WarmupCosine(warmup_epochs, optimizer)
        if saved:
            position.load_state_dict(saved)
            # The rate in a checkpoint is not the peak of the run that resumes.
            optimizer.load_state_dict(optimizer_of(0.03).state_dict())
        for rate in steps_of(position, rates, steps):
            if position.epochs_done < warmup_epochs:
                at_its_end = position.epochs_done + batch * world_size / length
                assert rate == pytest.approx(0.4 * min(1, at_its_end / warmup_epochs))
            else:
                falls.append(rate)
        saved = position.state_dict()
    assert position.over
    assert falls == sorted(falls, reverse=True)
    if falls:
        # The next step would have the rate 0.
        rates.set(position)
        assert rates.current == pytest.approx(0, abs=1e-9)
