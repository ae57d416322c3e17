"""Small models: images [batch, channels, size, size] to logits [batch, classes]."""

from torch import nn


class ConvNet(nn.Sequential):
    """Two 5x5 convolutions (16 and 32 channels) with BatchNorm, ReLU, pooling, one linear layer."""

    def __init__(self, channels: int, size: int, classes: int = 10):
        super().__init__(
            nn.Conv2d(channels, 16, kernel_size=5, padding=2),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=5, padding=2),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * (size // 4) ** 2, classes),
        )


class LeNet(nn.Sequential):
    """LeNet-5 (LeCun et al. 1998) with ReLU and max-pooling.

    It has no BatchNorm, so that N processes compute the same as one.
    """

    def __init__(self, channels: int, size: int, classes: int = 10):
        super().__init__(
            nn.Conv2d(channels, 6, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * (size // 4 - 2) ** 2, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, classes),
        )
