"""The data of a run: each sample once, the same on any number of processes and loader workers."""

import collections
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset, TensorDataset, random_split

from common.data import EpochSampler, Seeded, TensorLoader, to_device
from common.errors import InputError
from common.process.workers import data_loader

pytestmark = pytest.mark.check
CPU = torch.device("cpu")
seeds = st.integers(0, 2**32 - 1)


def samplers(length, batch, seed, world_size, epoch, start=0):
    """The samplers of all ranks."""
    made = [EpochSampler(length, batch, rank, world_size, seed=seed) for rank in range(world_size)]
    for sampler in made:
        sampler.set_epoch(epoch, start)
    return made


def steps(ranks, batch):
    """The global batches that the samplers of all ranks give, in the order of one process."""
    split = [torch.tensor(list(rank)).split(batch) if len(rank) else () for rank in ranks]
    return [torch.stack(parts, dim=1).flatten().tolist() for parts in zip(*split, strict=True)]


shapes = {
    "batch": st.integers(1, 40),
    "world_size": st.integers(1, 8),
    "extra": st.integers(0, 300),
}


@given(**shapes, epoch=st.integers(0, 5), seed=seeds, data=st.data())
def test_sampler_position(batch, world_size, extra, epoch, seed, data):
    """N processes see in each step what one sees with N times the batch, also after a resume."""
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


def test_sampler_without_shuffling():
    """Two ranks together read the data set in its order, in each epoch and after a resume."""
    ranks = [EpochSampler(11, 2, rank, 2, shuffle=False) for rank in range(2)]
    for epoch, start in ((0, 0), (1, 0), (1, 4)):
        for rank in ranks:
            rank.set_epoch(epoch, start)
        assert steps(ranks, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]][start // 4 :]


@given(**shapes, seed=seeds, data=st.data())
def test_an_epoch_up_to_a_step(batch, world_size, extra, seed, data):
    """Two parts of an epoch, of which the first has so many steps, are together the whole."""
    length = batch * world_size + extra
    ranks = samplers(length, batch, seed, world_size, epoch=2)
    whole = steps(ranks, batch)
    first = data.draw(st.integers(0, len(whole)))
    parts = []
    for start, many in ((0, first), (first, len(whole) - first)):
        for sampler in ranks:
            sampler.set_epoch(2, start * batch * world_size, many)
        assert {len(sampler) for sampler in ranks} == {many * batch}
        parts += steps(ranks, batch)
    assert parts == whole


def test_epochs_and_seeds_differ():
    orders = {
        tuple(samplers(50, 1, seed, 1, epoch)[0]) for seed in range(10) for epoch in range(10)
    }
    assert len(orders) == 100


def test_too_few_samples_raise():
    with pytest.raises(InputError, match="do not fill one batch"):
        EpochSampler(10, 64)


@pytest.mark.parametrize("part", [0, 1, 2])
def test_subsets_are_loaded_from_memory(part):
    dataset = TensorDataset(torch.arange(10), torch.arange(10) * 2)
    odd = Subset(dataset, [9, 7, 3, 1])
    subsets = [odd, Subset(odd, range(1, 4)), random_split(dataset, [4, 6])[0]]
    loader = TensorLoader(subsets[part], range(len(subsets[part])), 2, CPU)
    batches = list(loader)
    assert len(batches) == len(loader) == 2
    values, doubled = (torch.cat(column) for column in zip(*batches, strict=True))
    assert values.tolist() == [subsets[part][i][0] for i in range(len(values))]
    assert values.dtype == torch.int64
    assert torch.equal(doubled, values * 2)


@pytest.mark.parametrize("workers", [None, 0], ids=["in memory", "DataLoader"])
def test_empty_share(workers):
    """As after a resume at the end of an epoch, or with fewer validation images than ranks."""
    dataset = TensorDataset(torch.arange(50)) if workers is None else Drawn()
    sampler = EpochSampler(len(dataset), 8, seed=0)
    sampler.set_epoch(2, start=len(dataset) // 8 * 8)
    for share in (sampler, range(1, 1, 2)):
        if workers is None:
            loader = TensorLoader(dataset, share, 8, CPU)
        else:
            loader = data_loader(dataset, share, 8, workers)
        assert list(loader) == []


class Drawn(Dataset):
    """Three random numbers, from torch, numpy and random; the label is the index."""

    def __len__(self):
        return 50

    def __getitem__(self, index):
        return torch.tensor([torch.rand(()), np.random.rand(), random.random()]), index


def read_epoch(train, epoch, start=0):
    sampler, loader = train
    sampler.set_epoch(epoch, start)
    draws, labels = zip(*loader, strict=True)
    return torch.cat(draws), torch.cat(labels)


def together(shares, batch_size):
    """What several ranks read, in the order of the global batches."""
    steps = [tensor.split(batch_size) for tensor in shares]
    return torch.cat(
        [torch.stack(batches, dim=1).flatten(0, 1) for batches in zip(*steps, strict=True)]
    )


def drawn(epoch, workers=0, world_size=1, seed=0, start=0):
    """What an epoch of Drawn gives in global batches of 8."""
    shares = []
    for rank in range(world_size):
        sampler = EpochSampler(50, 8 // world_size, rank, world_size, seed=seed)
        dataset = Seeded(Drawn(), sampler)
        train = sampler, data_loader(dataset, sampler, 8 // world_size, workers)
        if workers:
            read_epoch(train, epoch + 5)  # its workers live on
        torch.manual_seed(rank)  # which the draws must not depend on
        shares.append(read_epoch(train, epoch, start))
    return [together(parts, 8 // world_size) for parts in zip(*shares, strict=True)]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_draws_are_a_function_of_seed_epoch_and_index(workers, world_size):
    """On any number of ranks and workers, and from the middle of an epoch."""
    draws, labels = drawn(epoch=1)
    for start in (0, 16):
        ours, ours_labels = drawn(1, workers, world_size, start=start)
        assert torch.equal(ours, draws[start:])
        assert torch.equal(ours_labels, labels[start:])


@pytest.mark.parametrize("other", [{"epoch": 0}, {"epoch": 1, "seed": 1}])
def test_draws_differ_between_epochs_and_seeds(other):
    draws, labels = drawn(epoch=1)
    others, their_labels = drawn(**other)
    ours = dict(zip(labels.tolist(), draws, strict=True))
    theirs = dict(zip(their_labels.tolist(), others, strict=True))
    in_both = ours.keys() & theirs.keys()
    assert len(in_both) > 40
    for label in in_both:
        assert not (ours[label] == theirs[label]).any(), "torch, numpy and random all draw anew"
    for source in range(3):
        assert len(draws[:, source].unique()) == len(draws), "and no two samples get the same"


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_leaves_the_random_states_alone(workers):
    """Dropout draws from that of torch, in the training process; a user's code from any."""
    sampler = EpochSampler(50, 8)
    train = sampler, data_loader(Seeded(Drawn(), sampler), sampler, 8, workers)

    def next_draws():
        return torch.rand(1).item(), np.random.rand(), random.random()

    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(1)
    expected = next_draws()
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(1)
    read_epoch(train, epoch=1)
    assert next_draws() == expected


def test_a_validation_set_draws_the_same_each_time():
    seeded = Seeded(Drawn())
    first, again = ([seeded[index][0].tolist() for index in range(50)] for _ in range(2))
    assert first == again
    with pytest.raises(TypeError, match="an EpochSampler, or none"):
        Seeded(Drawn(), range(50))


def test_any_batch_moves_as_it_is():
    Pair = collections.namedtuple("Pair", "tokens rest")
    batch = {"pair": Pair(torch.tensor([1, 2]), [torch.ones(1), "name"]), "count": 3}
    moved = to_device(batch, torch.device("meta"))
    assert moved["pair"].tokens.dtype == torch.int64
    assert moved["pair"].tokens.is_meta
    assert moved["pair"].rest[0].is_meta
    assert moved["pair"].rest[1] == "name"
    assert moved["count"] == 3


def test_copies_that_do_not_wait(monkeypatch):
    """Only where it is safe: to Apple's GPUs memory may change before it is read."""
    copies = []
    monkeypatch.setattr(
        torch.Tensor, "to", lambda _, device, non_blocking: copies.append((device, non_blocking))
    )
    for device in ("cuda", "mps", "cpu"):
        to_device(torch.ones(1), torch.device(device))
    assert [non_blocking for _, non_blocking in copies] == [True, False, False]
