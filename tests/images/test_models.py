"""The small models."""

import pytest
import torch

from images import models

pytestmark = pytest.mark.check


@pytest.mark.parametrize(("kind", "parameters"), [(models.ConvNet, 29_034), (models.LeNet, 61_706)])
def test_models(kind, parameters):
    """With the size of those for MNIST."""
    model = kind(channels=1, size=28)
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
