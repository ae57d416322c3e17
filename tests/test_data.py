"""The data path gives what the usual one gives, each image once, the same on any number of processes."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from torchvision import transforms

from cifar10 import cifar
from common import datasets, flags, models, schedule
from common.data import DataObject, EpochSampler, ImageTensor
from common.metrics import Metrics
from common.run import Run

pytestmark = pytest.mark.check

CPU = torch.device("cpu")


def arguments(*given):
    parser = flags.parser("", dataset="cifar10")
    flags.add_data(parser)
    flags.add_training(parser, lrs={"lenet": 0.1}, epochs=1, batch_size=8)
    flags.add_sgd(parser, weight_decay=0)
    return parser.parse_args(["--synthetic", "500", *given])


def training(args, rank=0, world_size=1):
    """The generated images of CIFAR-10, cropped and mirrored, as `rank` of `world_size` reads them."""
    train_set, _ = cifar.load(args)
    sampler = EpochSampler(len(train_set), args.batch_size, args.seed, rank, world_size)
    return DataObject(train_set, sampler, args.batch_size, CPU)


def read_epoch(train, epoch, start=0):
    train.sampler.set_epoch(epoch, start)
    images, labels = zip(*train, strict=True)
    return torch.cat(images), torch.cat(labels)


def together(shares, batch_size):
    """What several ranks read, in the order of the global batches."""
    steps = [tensor.split(batch_size) for tensor in shares]
    return torch.cat([torch.stack(batches, dim=1).flatten(0, 1) for batches in zip(*steps, strict=True)])


class Pictures(Dataset):
    """uint8 images and their labels, as a user's Dataset returns them."""

    def __init__(self, tensors):
        self.tensors, self.mean_std = tensors, tensors.mean_std

    def __len__(self):
        return len(self.tensors)

    def __getitem__(self, index):
        return self.tensors.images[index], int(self.tensors.labels[index])


@pytest.mark.parametrize("workers", [None, 0, 2], ids=["tensors", "a Dataset", "2 workers"])
def test_normalised_as_torchvision_does(workers):
    _, val_set = cifar.load(arguments())
    dataset = val_set if workers is None else Pictures(val_set)
    val = DataObject(dataset, range(len(val_set)), 30, CPU, workers or 0)
    usual = transforms.Compose([transforms.ToPILImage(), transforms.ToTensor(),
                                transforms.Normalize(*cifar.MEAN_STD)])
    images, labels = (torch.cat(parts) for parts in zip(*val, strict=True))
    assert images.dtype == torch.float32
    assert images.shape == (100, 3, 32, 32)
    torch.testing.assert_close(images, torch.stack([usual(image) for image in val_set.images]), rtol=0, atol=1e-5)
    assert torch.equal(labels, val_set.labels)


def test_every_crop_is_one_of_the_padded_image():
    images = torch.randint(256, (40, 3, 12, 12), dtype=torch.uint8)
    dataset = cifar.RandomCropFlip(images, torch.arange(40), cifar.MEAN_STD, seed=0)
    dataset.to(CPU)
    found = set()
    for epoch in range(20):
        for crops, labels in dataset.batches(torch.arange(39, -1, -1), 15, epoch):
            for crop, label in zip(crops, labels, strict=True):
                padded = F.pad(images[label], (4,) * 4)
                windows = torch.cat((padded.unfold(1, 12, 1).unfold(2, 12, 1).flatten(1, 2),
                                     padded.flip(-1).unfold(1, 12, 1).unfold(2, 12, 1).flatten(1, 2)), dim=1)
                same = (windows == crop.unsqueeze(1)).flatten(2).all(dim=2).all(dim=0).nonzero().flatten().tolist()
                assert len(same) == 1
                found.update(same)
    assert len(found) > 150, "of 162: 9 x 9 offsets, mirrored or not"


def test_batches_do_not_depend_on_the_number_of_processes():
    """The k-th batches of all ranks together are the k-th batch of one process, augmentation included."""
    one, ranks = training(arguments("-b", "24")), [training(arguments("-b", "8"), rank, 3) for rank in range(3)]
    for start in (0, 96):
        whole = read_epoch(one, 3, start)
        shares = zip(*(read_epoch(train, 3, start) for train in ranks), strict=True)
        for expected, parts in zip(whole, shares, strict=True):
            assert torch.equal(together(parts, 8), expected)


def test_an_epoch_reads_each_image_once_and_goes_on_where_it_was():
    train = training(arguments())
    train.sampler.set_epoch(2)
    indices = train.indices()
    assert len(set(indices.tolist())) == len(indices) == 496, "62 batches of 8; 4 of 500 images are left for later"
    assert train.indices().tolist() == indices.tolist()
    images, labels = read_epoch(train, 2)
    rest, their_labels = read_epoch(train, 2, start=80)
    assert torch.equal(rest, images[80:])
    assert torch.equal(their_labels, labels[80:])


@pytest.mark.parametrize("workers", [None, 0], ids=["tensors", "a Dataset"])
def test_empty_share(workers):
    """As after a resume at the end of an epoch, or with fewer validation images than ranks."""
    dataset = cifar.load(arguments())[0] if workers is None else Drawn()
    sampler = EpochSampler(len(dataset), 8, seed=0)
    sampler.set_epoch(2, start=len(dataset) // 8 * 8)
    for share in (sampler, range(1, 1, 2)):
        assert list(DataObject(dataset, share, 8, CPU)) == []


def test_epochs_and_seeds_differ_and_repeat():
    train = training(arguments())
    first, second, again = (read_epoch(train, epoch)[0] for epoch in (0, 1, 0))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    sampler, other = EpochSampler(500, 8, seed=0), EpochSampler(500, 8, seed=1)
    assert sorted(sampler.indices().tolist()) != sampler.indices().tolist() != other.indices().tolist()


def test_validation_shares_cover_the_set_once():
    val_set = cifar.load(arguments())[1]
    shares = [DataObject(val_set, range(rank, 100, 7), 4, CPU) for rank in range(7)]
    assert sorted(index for share in shares for index in share.indices().tolist()) == list(range(100))
    assert [sum(len(labels) for _, labels in share) for share in shares] == [15, 15, 14, 14, 14, 14, 14]


class Drawn(Dataset):
    """Float images [3, 1, 1] of three random numbers; the label is the index."""

    def __len__(self):
        return 50

    def __getitem__(self, index):
        return torch.tensor([torch.rand(()), np.random.rand(), random.random()]).view(3, 1, 1), index


def drawn(epoch, workers=0, world_size=1, seed=0, start=0):
    """What an epoch of Drawn gives in global batches of 8."""
    shares = []
    for rank in range(world_size):
        train = DataObject(Drawn(), EpochSampler(50, 8 // world_size, seed, rank, world_size), 8 // world_size, CPU,
                           workers)
        if workers:
            read_epoch(train, epoch + 5)  # its workers live on
        torch.manual_seed(rank)  # which the draws must not depend on
        shares.append(read_epoch(train, epoch, start))
    return [together(parts, 8 // world_size) for parts in zip(*shares, strict=True)]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_draws_are_a_function_of_seed_epoch_and_index(workers, world_size):
    """For any number of workers and ranks; for torch, numpy and random; also from the middle of an epoch."""
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
        assert label not in kept or not (ours[label] == image).any(), "torch, numpy and random all draw anew"
    for source in range(3):
        assert len(images[:, source].unique()) == len(images), "and no two samples get the same"


@pytest.mark.parametrize("workers", [None, 0, 1])
def test_loading_leaves_the_random_state_of_torch_alone(workers):
    """Dropout draws from it, in the training process."""
    train = training(arguments()) if workers is None else DataObject(Drawn(), EpochSampler(50, 8, 0), 8, CPU, workers)
    before = torch.get_rng_state()
    read_epoch(train, epoch=1)
    assert torch.equal(before, torch.get_rng_state())


class Given(Dataset):
    """The same sample again and again."""

    def __init__(self, sample):
        self.sample = sample

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.sample


IMAGE = torch.linspace(-3, 300, 48).view(3, 4, 4)


@pytest.mark.parametrize("sample", [(IMAGE, 3), [IMAGE.double(), np.int32(3)], (IMAGE, torch.tensor(3))],
                         ids=["int", "numpy", "tensor"])
def test_float_images_are_used_as_they_are(sample):
    (images, labels), = DataObject(Given(sample), range(8), 8, CPU)
    assert torch.equal(images, IMAGE.expand(8, 3, 4, 4))
    assert images.dtype == torch.float32
    assert labels.tolist() == [3] * 8
    F.cross_entropy(images[:, :, 0, 0].repeat(1, 2), labels)


@pytest.mark.parametrize("sample", [
    IMAGE, (IMAGE,), (IMAGE, 1, 2), {"image": IMAGE, "label": 1}, ("picture.png", 1), (IMAGE, 1.0), (IMAGE, "cat"),
    (IMAGE, torch.tensor(1.0)), (IMAGE, None)])
def test_a_dataset_of_something_else_does_not_train(sample):
    with pytest.raises((TypeError, ValueError, RuntimeError, AttributeError)):
        for images, labels in DataObject(Given(sample), range(8), 8, CPU):
            F.cross_entropy(images[:, :, 0, 0].repeat(1, 2), labels)


def test_synthetic_is_the_same_everywhere_and_the_splits_differ():
    (one, val), (again, _), (other, _) = (datasets.synthetic(arguments("--seed", seed), 1, 28, ((0.5,), (0.5,)))
                                          for seed in "334")
    assert torch.equal(one.images, again.images)
    assert torch.equal(one.labels, again.labels)
    assert not torch.equal(one.images, other.images)
    assert not torch.equal(one.images[:100], val.images)
    assert isinstance(one, ImageTensor)


def test_metrics_are_those_of_all_images_at_once():
    logits, labels = torch.randn(1001, 10, generator=torch.Generator().manual_seed(0)), torch.arange(1001) % 10
    shares = []
    for rank in range(3):
        shares.append(Metrics(CPU, top5=True))
        for index in range(rank, 1001, 3):
            image, label = logits[[index]].double(), labels[[index]]
            shares[-1].update(F.cross_entropy(image, label), image, label)
    shares[1].sums = torch.stack([share.sums for share in shares]).sum(dim=0)
    average = shares[1].average(waited=0)
    assert average["loss"] == pytest.approx(F.cross_entropy(logits.double(), labels).item(), rel=0, abs=1e-12)
    assert average["accuracy"] == (logits.argmax(1) == labels).double().mean().item()
    rank_of_label = (logits > logits.gather(1, labels.unsqueeze(1))).sum(1)
    assert average["top5"] == (rank_of_label < 5).double().mean().item()
    assert average["images"] == 1001


def test_random_state_is_a_function_of_position_and_rank():
    """For dropout: each step and rank draws anew, and a resumed run draws what the run would have drawn."""
    def drawn(epoch, samples, rank):
        run = Run(arguments(), "a test", CPU, {}, 0.1, rank, world_size=2)
        run.epoch, run.samples = epoch, samples
        run._seed()
        return torch.rand(1).item()

    places = [(epoch, samples, rank) for epoch in range(3) for samples in (0, 64, 128) for rank in range(2)]
    found = [drawn(*place) for place in places]
    assert len(set(found)) == len(places)
    assert [drawn(*place) for place in places] == found


def test_schedule():
    args = arguments("--epochs", "5", "--warmup-epochs", "2", "--lr", "0.1")
    lr = args.lr * schedule.lr_factor(args, 4)
    rates = [schedule.warmup_cosine(args, lr, epochs_done) for epochs_done in (0, 1, 2, 3.5, 5, 5.1)]
    assert rates == pytest.approx([0.1, 0.25, 0.4, 0.2, 0, 0])
    assert [schedule.lr_factor(arguments("--scale-lr", how), 4) for how in ("linear", "sqrt", "none")] == [4, 2, 1]
    assert schedule.lr_factor(arguments("--global-batch-size", "24"), 4) == 1


@pytest.mark.parametrize(("name", "parameters"), [("convnet", 29_034), ("lenet", 61_706), ("resnet18", 11_173_962)])
def test_models(name, parameters):
    """ConvNet and LeNet-5 for MNIST; ResNet-18 for 32x32 has half a million fewer than torchvision's for ImageNet."""
    channels, size = (3, 32) if name == "resnet18" else (1, 28)
    model = {**models.MODELS, **cifar.MODELS}[name](channels, size)
    assert model(torch.zeros(2, channels, size, size)).shape == (2, 10)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
