"""The models: images in, logits [batch, classes] out."""

import torch
from torch import nn

from common import failures


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


SMALL = ("convnet", "lenet")  # to try things out, on images of any size
MODELS = {"convnet": ConvNet, "lenet": LeNet, "resnet18": resnet18}


def classifiers():
    """The names of torchvision's models for classification."""
    from torchvision import models

    return models.list_models(module=models)


def build(args, channels, size, classes=10):
    """The model that --model names, for images [batch, channels, size, size]; its weights follow from --seed."""
    torch.manual_seed(args.seed)
    if args.dataset == "imagenet" and args.model not in SMALL:
        model = _torchvision_model(args.model, size, classes)
    else:
        model = MODELS[args.model](channels, size, classes)
    if args.channels_last:
        model = model.to(memory_format=torch.channels_last)
    if args.compile:
        model.compile()  # in place: a checkpoint has the names that it has without
    return model


def _torchvision_model(name, size, classes):
    """One that takes images of that size, or status 2: some want at least 75 pixels, or a multiple of 16."""
    from torchvision.models import get_model

    options = {"googlenet": {"aux_logits": False, "init_weights": True},  # one output in training as well
               "inception_v3": {"aux_logits": False, "init_weights": True}}.get(name, {})
    if name.startswith("vit_"):
        options["image_size"] = size
    try:
        model = get_model(name, num_classes=classes, **options)
        with torch.inference_mode():
            model.eval()(torch.zeros(1, 3, size, size))
        return model
    except (RuntimeError, ValueError, AssertionError) as error:
        failures.fail(f"{name} takes no images of {size}x{size} ({' '.join(str(error).split())[:160]}): "
                      "choose another --image-size")


def decay_groups(model, weight_decay):
    """The parameters of `model` for an optimizer: weight decay on all but BatchNorm's and biases.

    Source: He et al. 2018, arXiv:1812.01187, section 3.1.
    """
    weights, others = ([p for p in model.parameters() if (p.ndim > 1) == decays] for decays in (True, False))
    return [{"params": weights, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0}]


def replace_batch_norm(model, kind):
    """`model` with each BatchNorm layer replaced by one of class `kind`, which takes the same arguments and weights."""
    for name, part in model.named_children():
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
            layer = kind(part.num_features, part.eps, part.momentum, part.affine, part.track_running_stats)
            layer.load_state_dict(part.state_dict())
            setattr(model, name, layer)
        else:
            replace_batch_norm(part, kind)
    return model
