"""The data path gives what the usual one gives, each image once, the same on any number of
processes.
"""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, TensorDataset
from torchvision import transforms

from cifar10 import cifar
from common.data import EpochSampler, Seeded, TensorLoader
from common.errors import InputError
from common.position import Position, seed_step
from common.schedule import WarmupCosine, lr_factor, per_process
from common.workers import data_loader
from images.data import generate

pytestmark = pytest.mark.check

CPU = torch.device("cpu")


def training(batch_size=8, rank=0, world_size=1, seed=0):
    """(sampler, loader) of generated images, cropped and mirrored, as `rank` reads them."""
    train_set, _ = cifar.load("", 500, seed)
    sampler = EpochSampler(len(train_set), batch_size, rank, world_size, seed=seed)
    return sampler, cifar.CropFlipLoader(train_set, sampler, batch_size, CPU)


def read_epoch(train, epoch, start=0):
    sampler, loader = train
    sampler.set_epoch(epoch, start)
    images, labels = zip(*loader, strict=True)
    return torch.cat(images), torch.cat(labels)


def together(shares, batch_size):
    """What several ranks read, in the order of the global batches."""
    steps = [tensor.split(batch_size) for tensor in shares]
    return torch.cat(
        [torch.stack(batches, dim=1).flatten(0, 1) for batches in zip(*steps, strict=True)]
    )


@pytest.mark.parametrize("workers", [None, 0, 2], ids=["in memory", "DataLoader", "2 workers"])
def test_normalised_as_torchvision_does(workers):
    _, val_set = cifar.load("", 500, 0)
    shares = range(len(val_set))
    if workers is None:
        loader = TensorLoader(val_set, shares, 30, CPU)
    else:
        loader = data_loader(val_set, shares, 30, workers)
    mean_std = cifar.normalise.mean, cifar.normalise.std
    usual = transforms.Compose(
        [transforms.ToPILImage(), transforms.ToTensor(), transforms.Normalize(*mean_std)]
    )
    images, labels = (torch.cat(parts) for parts in zip(*loader, strict=True))
    images = cifar.normalise(images)
    assert images.dtype == torch.float32
    assert images.shape == (100, 3, 32, 32)
    expected = torch.stack([usual(image) for image, _ in val_set])
    torch.testing.assert_close(images, expected, rtol=0, atol=1e-5)
    assert torch.equal(labels, val_set.tensors[1])


def test_every_crop_is_one_of_the_padded_image():
    images = torch.randint(256, (40, 3, 12, 12), dtype=torch.uint8)
    dataset = TensorDataset(images, torch.arange(40))
    sampler = EpochSampler(40, 15, seed=0)
    loader = cifar.CropFlipLoader(dataset, sampler, 15, CPU)
    found = set()
    for epoch in range(20):
        sampler.set_epoch(epoch)
        for crops, labels in loader:
            for crop, label in zip(crops, labels, strict=True):
                padded = F.pad(images[label], (4,) * 4)
                windows = torch.cat(
                    (
                        padded.unfold(1, 12, 1).unfold(2, 12, 1).flatten(1, 2),
                        padded.flip(-1).unfold(1, 12, 1).unfold(2, 12, 1).flatten(1, 2),
                    ),
                    dim=1,
                )
                same = (
                    (windows == crop.unsqueeze(1))
                    .flatten(2)
                    .all(dim=2)
                    .all(dim=0)
                    .nonzero()
                    .flatten()
                    .tolist()
                )
                assert len(same) == 1
                found.update(same)
    assert len(found) > 150, "of 162: 9 x 9 offsets, mirrored or not"


def test_batches_do_not_depend_on_the_number_of_processes():
    """The k-th batches of all ranks together are the k-th batch of one process, augmentation
    included.
    """
    one, ranks = training(24), [training(8, rank, 3) for rank in range(3)]
    for start in (0, 96):
        whole = read_epoch(one, 3, start)
        shares = zip(*(read_epoch(train, 3, start) for train in ranks), strict=True)
        for expected, parts in zip(whole, shares, strict=True):
            assert torch.equal(together(parts, 8), expected)


def test_an_epoch_reads_each_image_once_and_goes_on_where_it_was():
    train = training()
    sampler, _ = train
    sampler.set_epoch(2)
    indices = list(sampler)
    assert len(set(indices)) == len(indices) == 496, "62 batches of 8; 4 of 500 images are left"
    assert list(sampler) == indices
    images, labels = read_epoch(train, 2)
    rest, their_labels = read_epoch(train, 2, start=80)
    assert torch.equal(rest, images[80:])
    assert torch.equal(their_labels, labels[80:])


@pytest.mark.parametrize("workers", [None, 0], ids=["in memory", "DataLoader"])
def test_empty_share(workers):
    """As after a resume at the end of an epoch, or with fewer validation images than ranks."""
    dataset = cifar.load("", 500, 0)[0] if workers is None else Drawn()
    sampler = EpochSampler(len(dataset), 8, seed=0)
    sampler.set_epoch(2, start=len(dataset) // 8 * 8)
    for share in (sampler, range(1, 1, 2)):
        if workers is None:
            loader = TensorLoader(dataset, share, 8, CPU)
        else:
            loader = data_loader(dataset, share, 8, workers)
        assert list(loader) == []


def test_epochs_and_seeds_differ_and_repeat():
    train = training()
    first, second, again = (read_epoch(train, epoch)[0] for epoch in (0, 1, 0))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    sampler, other = EpochSampler(500, 8, seed=0), EpochSampler(500, 8, seed=1)
    assert sorted(sampler) != list(sampler) != list(other)


def test_validation_shares_cover_the_set_once():
    _, val_set = cifar.load("", 500, 0)
    shares = [TensorLoader(val_set, range(rank, 100, 7), 4, CPU) for rank in range(7)]
    assert [sum(len(labels) for _, labels in share) for share in shares] == [
        15,
        15,
        14,
        14,
        14,
        14,
        14,
    ]


class Drawn(Dataset):
    """Float images [3, 1, 1] of three random numbers; the label is the index."""

    def __len__(self):
        return 50

    def __getitem__(self, index):
        return torch.tensor([torch.rand(()), np.random.rand(), random.random()]).view(
            3, 1, 1
        ), index


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
    """For any number of workers and ranks; for torch, numpy and random.

    Also from the middle of an epoch.
    """
    images, labels = drawn(epoch=1)
    for start in (0, 16):
        ours, ours_labels = drawn(1, workers, world_size, start=start)
        assert torch.equal(ours, images[start:])
        assert torch.equal(ours_labels, labels[start:])


@pytest.mark.parametrize("other", [{"epoch": 0}, {"epoch": 1, "seed": 1}])
def test_draws_differ_between_epochs_and_seeds(other):
    images, labels = drawn(epoch=1)
    others, their_labels = drawn(**other)
    order, theirs = labels.argsort(), their_labels.argsort()
    kept = set(labels.tolist()) & set(their_labels.tolist())
    assert len(kept) > 40
    ours = dict(zip(labels[order].tolist(), images[order], strict=True))
    for label, image in zip(their_labels[theirs].tolist(), others[theirs], strict=True):
        assert label not in kept or not (ours[label] == image).any(), (
            "torch, numpy and random all draw anew"
        )
    for source in range(3):
        assert len(images[:, source].unique()) == len(images), "and no two samples get the same"


@pytest.mark.parametrize("workers", [None, 0, 1])
def test_loading_leaves_the_random_state_of_torch_alone(workers):
    """Dropout draws from it, in the training process."""
    train = training()
    if workers is not None:
        sampler = EpochSampler(50, 8)
        train = sampler, data_loader(Seeded(Drawn(), sampler), sampler, 8, workers)
    before = torch.get_rng_state()
    read_epoch(train, epoch=1)
    assert torch.equal(before, torch.get_rng_state())


def test_generated_images_are_the_same_everywhere_and_the_splits_differ():
    (one, val), (again, _), (other, _) = (generate(500, 1, 28, seed) for seed in (3, 3, 4))
    for tensor, same in zip(one.tensors, again.tensors, strict=True):
        assert torch.equal(tensor, same)
    assert not torch.equal(one.tensors[0], other.tensors[0])
    assert not torch.equal(one.tensors[0][:100], val.tensors[0])


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


def test_schedule():
    lr = 0.1 * lr_factor("linear", 4)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr)
    schedule = WarmupCosine(optimizer, epochs=5, warmup_epochs=2, start=0.1 / lr)
    rates = []
    for epochs_done in (0, 1, 2, 3.5, 5, 5.1):
        schedule.set(epochs_done)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.25, 0.4, 0.2, 0, 0])
    assert [lr_factor(how, 4) for how in ("linear", "sqrt", "none")] == [4, 2, 1]
    assert lr_factor("linear", 4, global_batch_size=24) == 1


def test_a_global_batch_is_shared():
    assert per_process(64, None, 4) == 64
    assert per_process(64, 24, 4) == 6
    with pytest.raises(InputError, match="multiple of 5"):
        per_process(64, 24, 5)


@pytest.mark.parametrize(
    ("name", "parameters"), [("convnet", 29_034), ("lenet", 61_706), ("resnet18", 11_173_962)]
)
def test_models(name, parameters):
    """ConvNet and LeNet-5 for MNIST.

    ResNet-18 for 32x32 has half a million fewer than torchvision's for ImageNet.
    """
    channels, size = (3, 32) if name == "resnet18" else (1, 28)
    model = cifar.MODELS[name](channels, size)
    assert model(torch.zeros(2, channels, size, size)).shape == (2, 10)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
