"""Whether all ranks have the same data."""

import pytest
import torch
from torch.utils.data import TensorDataset

from common import ranks


def test_fingerprints_of_data_sets():
    images = torch.arange(24).view(4, 2, 3)
    labels = torch.tensor([0, 1, 0, 1])
    one = ranks.fingerprint(TensorDataset(images, labels))
    assert ranks.fingerprint(TensorDataset(images.clone(), labels)) == one
    assert ranks.fingerprint(TensorDataset(images.flip(0), labels)) != one
    assert ranks.fingerprint(TensorDataset(images, labels.flip(0))) != one
    assert ranks.fingerprint(range(7)) == 7
    assert ranks.fingerprint(iter(())) == 0


@pytest.mark.parametrize(
    ("numbers", "same"), [([5, 5, 5], True), ([4, 5, 6], False), ([0, 0, 1], False)]
)
def test_numbers_of_all_ranks(numbers, same):
    """Also for the rank whose number is the mean of all."""
    cpu = torch.device("cpu")
    totals = iter([torch.tensor([3, sum(numbers)]), torch.tensor(0 if same else 2)])

    def all_reduce(tensor):
        tensor.copy_(next(totals))

    assert ranks.all_same([5], all_reduce, cpu) == same
