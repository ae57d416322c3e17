"""The position of a run, and what is a function of it."""

import pytest
import torch

from common.position import Position, seed_step

pytestmark = pytest.mark.check
CPU = torch.device("cpu")


def test_evaluation_is_due_once():
    position = Position()
    for _ in range(4):
        assert not position.evaluation_due(4, None)
        position.advance(8)
    assert position.evaluation_due(4, None)
    position.end_interval(epoch_over=False)
    assert not position.evaluation_due(4, None)
    assert (position.epoch, position.samples) == (0, 32)


def test_random_state_is_a_function_of_position_and_rank():
    """For dropout: each step and rank draws anew, and a resumed run draws what it would have."""

    def drawn(epoch, samples, rank):
        position = Position()
        position.epoch, position.samples = epoch, samples
        seed_step(0, position, CPU, rank)
        return torch.rand(1).item()

    places = [
        (epoch, samples, rank)
        for epoch in range(3)
        for samples in (0, 64, 128)
        for rank in range(2)
    ]
    found = [drawn(*place) for place in places]
    assert len(set(found)) == len(places)
    assert [drawn(*place) for place in places] == found
