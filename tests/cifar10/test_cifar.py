"""CIFAR-10's files, its crops, the same on any number of processes, and its ResNet-18."""

import pickle
import struct

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from cifar10 import cifar
from common.data import EpochSampler
from common.errors import InputError

pytestmark = pytest.mark.check
CPU = torch.device("cpu")


def training(batch_size=8, rank=0, world_size=1, seed=0):
    """(sampler, loader) of generated images, cropped and mirrored, as `rank` reads them."""
    train_set, _ = cifar.load("", 500, seed)
    sampler = EpochSampler(len(train_set), batch_size, rank, world_size, seed=seed)
    return sampler, cifar.CropFlipLoader(train_set, sampler, batch_size, CPU)


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
    """The k-th batches of all ranks together are that of one process, augmentation included."""
    trains = [training(24), *(training(8, rank, 3) for rank in range(3))]
    for start in (0, 96):
        for sampler, _ in trains:
            sampler.set_epoch(3, start)
        for (images, labels), *shares in zip(*(loader for _, loader in trains), strict=True):
            theirs = [
                torch.stack(parts, dim=1).flatten(0, 1) for parts in zip(*shares, strict=True)
            ]
            assert torch.equal(theirs[0], images)
            assert torch.equal(theirs[1], labels)


def test_resnet18():
    """For 32x32 it has half a million parameters fewer than torchvision's for ImageNet."""
    model = cifar.build("resnet18")
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_173_962


def text(content):
    """A text in a pickle."""
    return b"X" + struct.pack("<I", len(content)) + content


def test_a_batch_of_pointers(tmp_path):
    """numpy.ndarray((100,), "O", bytes) is an array of pointers, which the file chooses."""
    pointers = b"c_codecs\nencode\n" + text(b"A" * 800) + text(b"latin1") + b"\x86R"
    labels = b"cnumpy\nndarray\n(Kd\x85" + text(b"O") + pointers + b"tR"
    images = b"cnumpy\nndarray\n(KdM\x00\x0c\x86" + text(b"B") + b"tR"
    batch = b"\x80\x02}(" + text(b"data") + images + text(b"labels") + labels + b"u."
    write_batches(tmp_path, batch)
    with pytest.raises(InputError, match="is damaged"):
        cifar.load(tmp_path, None, 0)


@pytest.mark.parametrize("called", ["os\nsystem", "builtins\neval", "numpy\nload"])
def test_a_batch_that_calls(called, tmp_path):
    write_batches(tmp_path, b"c" + called.encode() + b"\n(S'id'\ntR.")
    with pytest.raises(InputError, match=f"it calls {called.replace(chr(10), '.')}"):
        cifar.load(tmp_path, None, 0)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_batches_of_any_pickle(protocol, tmp_path):
    images = np.random.default_rng(0).integers(256, size=(20, 3072), dtype=np.uint8)
    batch = {"data": images, "labels": [number % 10 for number in range(20)]}
    write_batches(tmp_path, pickle.dumps(batch, protocol))
    train, _ = cifar.load(tmp_path, None, 0)
    read, labels = train.tensors
    assert np.array_equal(read[-20:].numpy().reshape(20, -1), images)
    assert labels[-20:].tolist() == batch["labels"]


def write_batches(folder, content):
    """Write all files of CIFAR-10 with the same content."""
    for name in cifar.TRAIN_FILES + cifar.VAL_FILES:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
