"""What holds for every input: sums over any split of the images, and the place of a sampler in its
epoch.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.data import EpochSampler
from common.errors import RunError
from common.metrics import Sums, require_finite

pytestmark = pytest.mark.check

batches = st.lists(st.integers(1, 50), min_size=1, max_size=12)
seeds = st.integers(0, 2**32 - 1)


def add(sums, sizes, seed):
    """Random batches of these sizes; returns the loss of each sample."""
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for size in sizes:
        loss = torch.rand(size, generator=generator, dtype=torch.float64)
        sums.add(loss=loss.sum(), samples=size)
        losses += loss.tolist()
    return losses


@given(
    st.lists(st.tuples(batches, seeds), min_size=1, max_size=5),
    st.lists(st.tuples(batches, seeds), max_size=5),
)
def test_sums_are_those_of_all_samples(ranks, before):
    """However the samples are split over ranks and batches, and by a resume: each counts once."""

    def run(parts, state=None):
        """The state and the total that `parts`, the batches of each rank, end with."""
        sums = [Sums(torch.device("cpu"), "loss", "samples") for _ in parts]
        for one, part in zip(sums, parts, strict=True):
            if state:
                one.load_state_dict(state)
            losses.extend(add(one, *part))
        # A first total of each rank gives what they would send, a second has the sum of it.
        sent = []
        for one in sums:
            one.total(sent.append)
        of_all = sum(sent)
        totals = [one.total(lambda values: values.copy_(of_all)) for one in sums]
        assert all(total == totals[0] for total in totals)
        return sums[0].state_dict(), totals[0]

    losses = []
    state = run(before)[0] if before else None
    _, total = run(ranks, state)
    assert total["samples"] == len(losses)
    assert total["loss"] == pytest.approx(math.fsum(losses), rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_loss_that_is_not_finite(bad):
    """The sum shows it, whatever batch it was in."""
    sums = Sums(torch.device("cpu"), "loss")
    for loss in (1.0, bad, 1.0):
        sums.add(loss=torch.tensor(loss))
    with pytest.raises(RunError):
        require_finite(sums.total()["loss"])


def samplers(length, batch, seed, world_size, epoch, start=0):
    """The samplers of all ranks."""
    made = [EpochSampler(length, batch, rank, world_size, seed=seed) for rank in range(world_size)]
    for sampler in made:
        sampler.set_epoch(epoch, start)
    return made


def steps(ranks, batch):
    """The global batches that the samplers of all ranks give, each with the samples in the order of
    one process.
    """
    split = [torch.tensor(list(rank)).split(batch) if len(rank) else () for rank in ranks]
    return [torch.stack(parts, dim=1).flatten().tolist() for parts in zip(*split, strict=True)]


shapes = {
    "batch": st.integers(1, 40),
    "world_size": st.integers(1, 8),
    "extra": st.integers(0, 300),
}


@given(**shapes, epoch=st.integers(0, 5), seed=seeds, data=st.data())
def test_sampler_position(batch, world_size, extra, epoch, seed, data):
    """N processes see, step by step, what one process with N times the batch sees.

    After a resume the rest of it.
    """
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


@given(
    length=st.integers(100, 1000),
    epoch=st.integers(0, 5),
    seed=seeds,
    pieces=st.lists(
        st.tuples(st.integers(1, 12), st.integers(1, 8), st.floats(0, 1)), min_size=1, max_size=5
    ),
)
def test_each_sample_once_on_changing_numbers_of_processes(length, epoch, seed, pieces):
    """An epoch that is cut in pieces, each on another number of processes with another batch, uses
    no sample twice.

    Only what does not fill a global batch of the last piece is left out.
    """
    used = []
    for number, (batch, world_size, share) in enumerate(pieces, 1):
        whole = steps(samplers(length, batch, seed, world_size, epoch, len(used)), batch)
        done = len(whole) if number == len(pieces) else int(share * len(whole))
        used += [index for step in whole[:done] for index in step]
    assert len(set(used)) == len(used)
    assert length - len(used) < batch * world_size
    assert used == list(samplers(length, 1, seed, 1, epoch)[0])[: len(used)]


def test_epochs_and_seeds_differ():
    orders = {
        tuple(samplers(50, 1, seed, 1, epoch)[0]) for seed in range(10) for epoch in range(10)
    }
    assert len(orders) == 100
