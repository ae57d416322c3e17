"""Images in memory: normalised as torchvision does it, and generated."""

import pytest
import torch
from torchvision import transforms

from common.data import TensorLoader
from common.process.workers import data_loader
from images.data import Normalise, generate

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
