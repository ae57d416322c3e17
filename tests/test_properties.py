"""What holds for every input: sums over any split of the images, and the place of a sampler in its epoch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.data import EpochSampler
from common.metrics import Metrics

batches = st.lists(st.integers(1, 50), min_size=1, max_size=12)
seeds = st.integers(0, 2**32 - 1)


class Ranks:
    """Stands for all ranks in one process: its `all_reduce` gives each of their tensors the sum of all."""

    def __init__(self):
        self.tensors = []

    def metrics(self):
        return Metrics("cpu", self.tensors.append)

    def average(self, metrics):
        total = sum(one.sums for one in metrics)
        for one in metrics:
            one.all_reduce = lambda sums: sums.copy_(total)
        return [one.average() for one in metrics]


def update(metrics, sizes, seed):
    """Random batches of these sizes; returns each image's loss and whether it is right."""
    generator = torch.Generator().manual_seed(seed)
    losses, right = [], []
    for size in sizes:
        loss, logits = torch.rand(size, generator=generator), torch.rand(size, 10, generator=generator)
        labels = torch.randint(10, (size,), generator=generator)
        metrics.update(loss.double().mean(), logits, labels)
        losses += loss.double().tolist()
        right += (logits.argmax(1) == labels).tolist()
    return losses, right


@settings(deadline=None)
@given(st.lists(st.tuples(batches, seeds), min_size=1, max_size=5))
def test_metrics_are_those_of_all_images(ranks):
    """However the images fall into ranks and batches: the mean over the images, the same on each rank."""
    world = Ranks()
    metrics = [world.metrics() for _ in ranks]
    seen = [update(one, *rank) for one, rank in zip(metrics, ranks, strict=True)]
    losses, right = ([value for rank in seen for value in rank[k]] for k in (0, 1))
    for result in world.average(metrics):
        assert result["images"] == len(losses)
        assert result["loss"] == pytest.approx(math.fsum(losses) / len(losses), rel=1e-12)
        assert result["accuracy"] == sum(right) / len(right)


@settings(deadline=None)
@given(batches, batches, seeds)
def test_metrics_go_on(before, after, seed):
    """A state that is loaded elsewhere and goes on gives the very sums of one that was never interrupted."""
    world = Ranks()
    whole, first, second = (world.metrics() for _ in range(3))
    update(whole, before, seed)
    update(whole, after, seed + 1)
    update(first, before, seed)
    first.waited = 1.5
    second.load_state(first.state())
    update(second, after, seed + 1)
    assert torch.equal(whole.sums, second.sums)
    assert second.waited == 1.5
    assert second.start <= first.start + 10


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_loss_that_is_not_finite(bad):
    metrics = Ranks().metrics()
    logits, labels = torch.zeros(2, 10), torch.zeros(2, dtype=torch.int64)
    metrics.update(torch.tensor(1.0), logits, labels)
    assert metrics.finite()
    metrics.update(torch.tensor(bad), logits, labels)
    metrics.update(torch.tensor(1.0), logits, labels)
    assert not metrics.finite()


@settings(deadline=None)
@given(length=st.integers(1, 300), world_size=st.integers(1, 8), batch=st.integers(1, 40), epoch=st.integers(0, 5),
       seed=seeds, data=st.data())
def test_sampler_position(length, world_size, batch, epoch, seed, data):
    """An epoch from step k on is what is left of the whole one; the next epoch is whole again; ranks do not overlap."""
    if length < world_size:
        length = world_size
    samplers = [EpochSampler(range(length), world_size, rank, seed=seed, drop_last=True) for rank in range(world_size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    whole = [list(sampler) for sampler in samplers]
    steps = len(whole[0]) // batch
    step = data.draw(st.integers(0, steps))
    for sampler, indices in zip(samplers, whole, strict=True):
        sampler.start = step * batch
        assert list(sampler) == indices[step * batch:]
        assert list(sampler) == indices
        assert len(sampler) == len(indices)
    seen = [index for indices in whole for index in indices]
    assert len(seen) == len(set(seen)) == length - length % world_size
