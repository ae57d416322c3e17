"""Images in memory: normalised as torchvision does it, and generated."""

import hashlib
import shutil

import pytest
import torch
from forked import compute
from recipes import ROOT
from torchvision import transforms

from common.data import TensorLoader
from common.errors import InputError
from common.process.workers import data_loader
from common.ranks import World
from images.data import Normalise, generate, say_what_differs

pytestmark = pytest.mark.check
CPU = torch.device("cpu")


@pytest.mark.parametrize("workers", [None, 0, 2], ids=["in memory", "DataLoader", "2 workers"])
def test_normalised_as_torchvision_does(workers):
    _, val_set = generate(500, 3, 32, seed=0)
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)
    shares = range(len(val_set))
    if workers is None:
        loader = TensorLoader(val_set, shares, 30, CPU)
    else:
        loader = data_loader(val_set, shares, 30, workers)
    usual = transforms.Compose(
        [
            transforms.ToPILImage(),
            transforms.ToTensor(),
            transforms.Normalize(mean, std),
        ]
    )
    images, labels = (torch.cat(parts) for parts in zip(*loader, strict=True))
    images = Normalise(mean, std)(images)
    assert images.dtype == torch.float32
    assert images.shape == (100, 3, 32, 32)
    expected = torch.stack([usual(image) for image, _ in val_set])
    torch.testing.assert_close(images, expected, rtol=0, atol=1e-5)
    assert torch.equal(labels, val_set.tensors[1])


def test_generated_images_are_the_same_everywhere_and_the_splits_differ():
    (one, val), (again, _), (other, _) = (generate(500, 1, 28, seed) for seed in (3, 3, 4))
    for tensor, same in zip(one.tensors, again.tensors, strict=True):
        assert torch.equal(tensor, same)
    assert not torch.equal(one.tensors[0], other.tensors[0])
    assert not torch.equal(one.tensors[0][:100], val.tensors[0])


def test_files_that_are_not_those_of_the_data_set(tmp_path, capsys):
    """A test set in the place of training images is named, on rank 0, and one's own files are."""
    contents = {"train": b"test", "more": b"mine", "test": b"test", "right": b"right"}
    files = {name: hashlib.md5(name.encode()).hexdigest() for name in contents}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    say_what_differs(World(CPU, rank=1, size=2), "DIGITS", tmp_path, files)
    say_what_differs(None, "DIGITS", tmp_path, files)
    assert not capsys.readouterr().out
    say_what_differs(World(CPU), "DIGITS", tmp_path, files)
    assert capsys.readouterr().out == (
        "warning: by their MD5s, these are not the files of DIGITS: "
        f"{tmp_path}/train (the same as test), {tmp_path}/more\n"
    )
    (tmp_path / "right").unlink()
    with pytest.raises(InputError, match="right: No such file or directory"):
        say_what_differs(World(CPU), "DIGITS", tmp_path, files)


@pytest.mark.parametrize("dataset", ["mnist", "cifar10"])
def test_a_recipe_says_so(dataset, real_data, tmp_path):
    """Of MNIST with own labels of the test images; the tests' CIFAR-10 is decoded from JPEGs."""
    name = {"mnist": "MNIST", "cifar10": "cifar-10-batches-py"}[dataset]
    shutil.copytree(real_data(dataset) / name, tmp_path / "data" / name)
    if dataset == "mnist":
        labels = tmp_path / "data" / "MNIST" / "raw" / "t10k-labels-idx1-ubyte"
        content = labels.read_bytes()
        labels.write_bytes(content[:8] + content[:7:-1])
    command = f"python {ROOT}/{dataset}/single.py --device cpu --model lenet --dry-run"
    said = compute(f"{command} --data-dir data", tmp_path)
    (warning,) = [line for line in said.splitlines() if line.startswith("warning: by their MD5s")]
    assert warning.count("data/") == {"mnist": 1, "cifar10": 6}[dataset]
