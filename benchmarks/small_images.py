"""MNIST and CIFAR-10 as torchvision's documentation loads them, for with_lightning.py and
with_accelerate.py.
"""

from torchvision import datasets, transforms


class CIFAR10(datasets.CIFAR10):
    """torchvision's class without its checksums: our files may come from elsewhere."""

    train_list = [[name, None] for name, _ in datasets.CIFAR10.train_list]  # noqa: RUF012
    test_list = [[name, None] for name, _ in datasets.CIFAR10.test_list]  # noqa: RUF012
    meta = {**datasets.CIFAR10.meta, "md5": None}  # noqa: RUF012


def load(name, folder):
    """The datasets for training and validation, and the channels and size of an image.

    The normalisation is that of our recipes, and so is the augmentation of CIFAR-10.
    """
    if name == "mnist":
        dataset = datasets.MNIST
        shape = {"channels": 1, "size": 28}
        augment = []
        normalise = [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
    else:
        dataset = CIFAR10
        shape = {"channels": 3, "size": 32}
        augment = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
        mean = (0.4914, 0.4822, 0.4465)
        deviation = (0.2470, 0.2435, 0.2616)
        normalise = [transforms.ToTensor(), transforms.Normalize(mean, deviation)]
    train_transform = transforms.Compose(augment + normalise)
    val_transform = transforms.Compose(normalise)
    train_set = dataset(folder, train=True, transform=train_transform, download=True)
    val_set = dataset(folder, train=False, transform=val_transform)
    return train_set, val_set, shape
