"""What holds for every input: sums over any split of the images, and the place of a sampler in its epoch."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.data import EpochSampler
from common.metrics import Metrics

pytestmark = pytest.mark.check

batches = st.lists(st.integers(1, 50), min_size=1, max_size=12)
seeds = st.integers(0, 2**32 - 1)


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


@given(st.lists(st.tuples(batches, seeds), min_size=1, max_size=5), st.lists(st.tuples(batches, seeds), max_size=5))
def test_metrics_are_those_of_all_images(ranks, before):
    """However the images are split over ranks and batches, and by a resume: the mean over all images."""
    earlier, later = [Metrics(torch.device("cpu")) for _ in before], None
    seen = [update(one, *rank) for one, rank in zip(earlier, before, strict=True)]
    sums = sum(one.sums for one in earlier).tolist() if earlier else None
    later = [Metrics(torch.device("cpu"), before=sums) for _ in ranks]
    seen += [update(one, *rank) for one, rank in zip(later, ranks, strict=True)]
    total = sum(one.sums for one in later)
    losses, right = ([value for rank in seen for value in rank[k]] for k in (0, 1))
    for one in later:
        one.sums = total  # as an all-reduce leaves them
        result = one.average(waited=0)
        assert result["images"] == len(losses)
        assert result["loss"] == pytest.approx(math.fsum(losses) / len(losses), rel=1e-12)
        assert result["accuracy"] == sum(right) / len(right)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_loss_that_is_not_finite(bad):
    """The sum over the ranks shows it, whatever rank and batch it was in."""
    ranks, labels = [Metrics(torch.device("cpu")) for _ in range(3)], torch.zeros(2, dtype=torch.int64)
    for loss in (1.0, bad, 1.0):
        ranks[1].update(torch.tensor(loss), torch.zeros(2, 10), labels)
    ranks[0].update(torch.tensor(1.0), torch.zeros(2, 10), labels)
    assert not math.isfinite(sum(one.sums for one in ranks)[0])


def samplers(length, batch, seed, world_size, epoch, start=0):
    """The samplers of all ranks."""
    made = [EpochSampler(length, batch, seed, rank, world_size) for rank in range(world_size)]
    for sampler in made:
        sampler.set_epoch(epoch, start)
    return made


def steps(ranks, batch):
    """The global batches that the samplers of all ranks give, each with the samples in the order of one process."""
    split = [rank.indices().split(batch) if len(rank) else () for rank in ranks]
    return [torch.stack(parts, dim=1).flatten().tolist() for parts in zip(*split, strict=True)]


shapes = {"batch": st.integers(1, 40), "world_size": st.integers(1, 8), "extra": st.integers(0, 300)}


@given(**shapes, epoch=st.integers(0, 5), seed=seeds, data=st.data())
def test_sampler_position(batch, world_size, extra, epoch, seed, data):
    """N processes see, step by step, what one process with N times the batch sees; after a resume the rest of it."""
    length = batch * world_size + extra
    one = steps(samplers(length, batch * world_size, seed, 1, epoch), batch * world_size)
    assert steps(samplers(length, batch, seed, world_size, epoch), batch) == one
    used = sorted(index for step in one for index in step)
    assert len(one) == length // (batch * world_size)
    assert len(set(used)) == len(used)
    assert set(used) <= set(range(length))
    done = data.draw(st.integers(0, len(one)))
    resumed = samplers(length, batch, seed, world_size, epoch, done * batch * world_size)
    assert steps(resumed, batch) == one[done:]
    assert {len(sampler) for sampler in resumed} == {(len(one) - done) * batch}


@given(length=st.integers(100, 1000), epoch=st.integers(0, 5), seed=seeds,
       pieces=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 8), st.floats(0, 1)), min_size=1, max_size=5))
def test_each_sample_once_on_changing_numbers_of_processes(length, epoch, seed, pieces):
    """An epoch that is cut in pieces, each on another number of processes with another batch, uses no sample twice.

    Only what does not fill a global batch of the last piece is left out.
    """
    used = []
    for number, (batch, world_size, share) in enumerate(pieces, 1):
        whole = steps(samplers(length, batch, seed, world_size, epoch, len(used)), batch)
        done = len(whole) if number == len(pieces) else int(share * len(whole))
        used += [index for step in whole[:done] for index in step]
    assert len(set(used)) == len(used)
    assert length - len(used) < batch * world_size
    assert used == samplers(length, 1, seed, 1, epoch)[0].indices().tolist()[:len(used)]


def test_epochs_and_seeds_differ():
    orders = {tuple(samplers(50, 1, seed, 1, epoch)[0].indices().tolist()) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100
