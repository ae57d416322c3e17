"""The position of a run, and what is a function of it."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.data import EpochSampler
from common.position import Position, seed_step

pytestmark = pytest.mark.check
CPU = torch.device("cpu")


def train(position, ends, evaluated, stop_at=None):
    """Train as a recipe does: to the end, or to a save after `stop_at` steps.

    Append the steps after which an epoch ended to `ends`, those with an evaluation to `evaluated`.
    """
    while not position.over:
        left = position.steps_left
        steps = position.steps_to_evaluation
        assert 0 <= steps <= left
        for number in range(1, steps + 1):
            position.advance()
            assert position.samples <= position.sampler.length
            assert position.steps_left == left - number
            if position.steps == stop_at:
                return
        if position.samples + position.sampler.global_batch > position.sampler.length:
            ends.append(position.steps)
        assert position.steps not in evaluated
        evaluated.append(position.steps)
        position.record_evaluation()


@given(
    length=st.integers(100, 300),
    first=st.tuples(st.integers(1, 12), st.integers(1, 8)),
    resumes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 8), st.floats(0, 1)), max_size=3),
    epochs=st.integers(1, 3),
    max_steps=st.none() | st.integers(1, 60),
    eval_every=st.none() | st.integers(1, 30),
)
def test_a_run_in_pieces(length, first, resumes, epochs, max_steps, eval_every):
    """Each piece on other processes with another batch, after a save at any step.

    The run has its length, and each evaluation that is due comes once, also where the save was
    right before it.
    """
    ends, evaluated = [], []
    batch, world_size = first
    sampler = EpochSampler(length, batch, 0, world_size)
    position = Position(sampler, epochs, max_steps, eval_every)
    if not resumes:
        steps_per_epoch = length // (batch * world_size)
        assert position.steps_left == (max_steps or epochs * steps_per_epoch)
    for batch, world_size, share in resumes:
        # With a share of 1 after the last step, right before the last evaluation.
        more = 1 + int(share * (position.steps_left - 1))
        train(position, ends, evaluated, stop_at=position.steps + more)
        saved = position.state_dict()
        sampler = EpochSampler(length, batch, 0, world_size)
        position = Position(sampler, epochs, max_steps, eval_every)
        position.load_state_dict(saved)
        assert position.steps == saved["steps"]
        if position.epoch > saved["epoch"]:
            # The rest of the epoch fills no batch, and was evaluated.
            ends.append(position.steps)
    left = 0 if position.over else position.steps_left
    before = position.steps
    train(position, ends, evaluated)
    assert position.steps - before == left
    if max_steps is not None:
        assert position.steps == max_steps
    else:
        assert position.epoch == epochs
    due = {*ends, position.steps}
    if eval_every is not None:
        due |= set(range(eval_every, position.steps + 1, eval_every))
    assert evaluated == sorted(due)


@pytest.mark.parametrize("length", [{"epochs": 1}, {"epochs": 5, "max_steps": 2}])
def test_a_run_that_was_saved_right_before_its_last_evaluation(length):
    """It was killed in the evaluation: that comes, and no step before it."""
    sampler = EpochSampler(100, 50)
    position = Position(sampler, **length)
    for _ in range(2):
        position.advance()
    resumed = Position(sampler, **length)
    resumed.load_state_dict(position.state_dict())
    assert not resumed.over
    assert (resumed.steps_to_evaluation, resumed.steps_left) == (0, 0)
    resumed.record_evaluation()
    assert resumed.over


def test_random_state_is_a_function_of_position_and_rank():
    """For dropout: each step and rank draws anew, and a resumed run draws what it would have."""

    def drawn(epoch, samples, rank):
        position = Position(EpochSampler(1000, 64), epochs=5)
        position.epoch, position.samples = epoch, samples
        seed_step(0, position, CPU, rank)
        return torch.rand(1).item(), np.random.beta(1, 1), random.random()

    places = [
        (epoch, samples, rank)
        for epoch in range(3)
        for samples in (0, 64, 128)
        for rank in range(2)
    ]
    found = [drawn(*place) for place in places]
    for of_one_library in zip(*found, strict=True):
        assert len(set(of_one_library)) == len(places)
    assert [drawn(*place) for place in places] == found


PIECE = st.tuples(st.integers(1, 40), st.integers(1, 4), st.floats(0, 1))
RUNS = st.sampled_from([{"epochs": 2}, {"epochs": 1, "max_steps": 25}])


def train_in_pieces(pieces, lengths, run, eval_every):
    """Train each piece (batch, processes, share of the steps left) on data of its length.

    Yields (epoch, the indices of a step, over all ranks), until the run is over.
    """
    saved = None
    for (batch, world_size, share), length in zip(pieces, lengths, strict=True):
        batch = min(batch, length // world_size)
        ranks = [EpochSampler(length, batch, rank, world_size) for rank in range(world_size)]
        position = Position(ranks[0], eval_every=eval_every, **run)
        if saved:
            position.load_state_dict(saved)
        stop_at = position.steps + int(share * max(0, position.steps_left))
        while not position.over:
            steps = position.steps_to_evaluation
            for rank in ranks:
                rank.set_epoch(position.epoch, position.samples, steps)
                assert len(rank) == steps * batch
            shares = [torch.tensor(list(rank), dtype=torch.int64).split(batch) for rank in ranks]
            for number in range(steps):
                yield position.epoch, torch.cat([share[number] for share in shares]).tolist()
                position.advance()
                if position.steps == stop_at:
                    break
            if position.steps == stop_at and share < 1:
                break
            position.record_evaluation()
        saved = position.state_dict()


@given(
    length=st.integers(40, 300),
    pieces=st.lists(PIECE, max_size=3),
    run=RUNS,
    eval_every=st.none() | st.integers(1, 30),
)
def test_no_sample_twice_and_none_lost(length, pieces, run, eval_every):
    """Within an epoch of a run that goes on with other batches, on other processes."""
    pieces = [*pieces, (8, 1, 1.0)]
    used = {}
    for epoch, indices in train_in_pieces(pieces, len(pieces) * [length], run, eval_every):
        used.setdefault(epoch, []).extend(indices)
    largest = max(min(batch, length // size) * size for batch, size, _ in pieces)
    for epoch, indices in used.items():
        assert len(set(indices)) == len(indices)
        if epoch < max(used):
            assert len(indices) > length - largest


@given(
    lengths=st.lists(st.integers(4, 300), min_size=3, max_size=3),
    pieces=st.lists(PIECE, min_size=2, max_size=2),
    run=RUNS,
    eval_every=st.none() | st.integers(1, 30),
)
def test_a_data_set_of_another_length(lengths, pieces, run, eval_every):
    """A run goes on, to its end, on data that has become less or more."""
    number = 0
    for epoch, indices in train_in_pieces([*pieces, (4, 1, 1.0)], lengths, run, eval_every):
        number += 1
        assert len(set(indices)) == len(indices)
        assert epoch < 25
    if "max_steps" in run:
        assert number == run["max_steps"]
