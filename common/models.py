"""The models of the small recipes: images in, logits [batch, classes] out."""

import torch
from torch import nn


class ConvNet(nn.Sequential):
    """Two 5x5 convolutions (16 and 32 channels) with BatchNorm, ReLU and max-pooling, then one linear layer."""

    def __init__(self, channels, size, classes=10):
        super().__init__(
            nn.Conv2d(channels, 16, kernel_size=5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * (size // 4) ** 2, classes),
        )


class LeNet(nn.Sequential):
    """LeNet-5 (LeCun et al. 1998) with ReLU and max-pooling: neither BatchNorm nor dropout.

    A step on N processes is then the step of one process on the same images, up to rounding.
    """

    def __init__(self, channels, size, classes=10):
        super().__init__(
            nn.Conv2d(channels, 6, kernel_size=5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, kernel_size=5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(16 * (size // 4 - 2) ** 2, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes),
        )


def resnet18(channels, size, classes=10):
    """torchvision's ResNet-18 with the stem for small images (He et al. 2015, section 4.2): 3x3, no max-pooling."""
    from torchvision.models import resnet18  # here: the other models do without the time that torchvision takes

    model = resnet18(num_classes=classes)
    model.conv1 = nn.Conv2d(channels, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


MODELS = {"convnet": ConvNet, "lenet": LeNet, "resnet18": resnet18}


def build(args, channels, size):
    """The model that --model names, for images [batch, channels, size, size]; its weights follow from --seed."""
    torch.manual_seed(args.seed)
    return MODELS[args.model](channels, size)
