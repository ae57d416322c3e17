"""Who this process is among the others, and whether all ranks have the same data."""

import pytest
import torch
from torch.utils.data import TensorDataset

from common import ranks
from common.errors import InputError
from common.process import launch

CPU = torch.device("cpu")


def test_fingerprints_of_data_sets():
    images = torch.arange(24).view(4, 2, 3)
    labels = torch.tensor([0, 1, 0, 1])
    one = ranks.fingerprint(TensorDataset(images, labels))
    assert ranks.fingerprint(TensorDataset(images.clone(), labels)) == one
    assert ranks.fingerprint(TensorDataset(images.flip(0), labels)) != one
    assert ranks.fingerprint(TensorDataset(images, labels.flip(0))) != one
    assert ranks.fingerprint(range(7)) == 7
    assert ranks.fingerprint(iter(())) == 0


def test_fingerprints_of_any_tensors():
    """Types that NumPy lacks, a gradient, a number for each sample, and no samples."""
    labels = torch.tensor([0, 1, 0, 1])
    for samples in (torch.rand(4, 2), torch.rand(4)):
        half = samples.bfloat16()
        changed = half.clone()
        changed[0] += 1
        one = ranks.fingerprint(TensorDataset(half, labels))
        assert ranks.fingerprint(TensorDataset(half.requires_grad_(), labels)) == one
        assert ranks.fingerprint(TensorDataset(changed, labels)) != one
    ranks.fingerprint(TensorDataset(samples.cfloat(), labels.bool()))
    ranks.fingerprint(TensorDataset(torch.empty(0, 3)))


@pytest.mark.parametrize(
    ("numbers", "same"), [([5, 5, 5], True), ([4, 5, 6], False), ([0, 0, 1], False)]
)
def test_numbers_of_all_ranks(numbers, same):
    """Also for the rank whose number is the mean of all."""
    totals = iter([torch.tensor([3, sum(numbers)]), torch.tensor(0 if same else 2)])

    def all_reduce(tensor):
        tensor.copy_(next(totals))

    assert ranks.all_same([5], ranks.World(CPU, 1, 3, all_reduce)) == same


@pytest.mark.parametrize("variable", launch.SIZES)
def test_more_processes_than_train_together(variable, monkeypatch):
    """A launcher of another recipe started them: each would train alone."""
    monkeypatch.setenv(variable, "4")
    ranks.World(CPU, rank=3, size=4)
    with pytest.raises(InputError, match=rf"a launcher started 4 processes \({variable}\)"):
        ranks.World(CPU, rank=0, size=2)
