"""All of torchvision's classification models, for ImageNet."""

import argparse
import difflib

import torch
from torchvision import models as torchvision_models

from common import flags
from common.errors import InputError
from images import models

SMALL = {"convnet": models.ConvNet, "lenet": models.LeNet}

# These diverge at a learning rate of 0.1; torchvision's own recipes use 0.01, or another optimizer.
SMALL_RATE = ("alexnet", "convnext", "maxvit", "squeezenet", "swin", "vgg", "vit")
# Learning rates for a batch of 256. ConvNet and LeNet are for trying things out, at any image size.
LRS = {
    "resnet50": 0.1,
    "convnet": 0.02,
    "lenet": 0.02,
    **{
        name: 0.01 if name.startswith(SMALL_RATE) and not name.endswith("_bn") else 0.1
        for name in torchvision_models.list_models(module=torchvision_models)
    },
}


def known(name):
    """An argparse type: a name in LRS; the error for a wrong one suggests the nearest."""
    if name not in LRS:
        near = difflib.get_close_matches(name, LRS) or ["resnet50"]
        raise argparse.ArgumentTypeError(f"there is no {name}; did you mean {' or '.join(near)}?")
    return name


def add_flags(parser):
    """Add the flags for networks and training that only the ImageNet recipes have."""
    add = parser.add_argument
    add("-a", "--model", "--arch", type=known, default="resnet50", help="one of torchvision")
    add(
        "--label-smoothing",
        type=flags.fraction,
        default=0.1,
        help="share of the label for the other classes",
    )
    add = parser.add_run_group()
    add("--accumulate", type=flags.positive_int, default=1, help="batches per step")
    add("--evaluate", action="store_true", help="only evaluate the weights of --resume")
    # Only recipes for several devices have this flag.
    parser.set_defaults(sync_bn=False)


def check(args, device):
    """Raise InputError if these flags conflict with each other or with the device."""
    if args.evaluate and not (args.resume or args.init_from):
        raise InputError(
            "--evaluate needs weights: --resume FILE, --resume auto with the --log-dir of a run, "
            "or --init-from FILE"
        )
    if args.sync_bn and device.type == "cpu":
        raise InputError("--sync-bn: BatchNorm over all processes works on GPUs only")


def build(name, size, classes):
    """The model that --model names, for images [batch, 3, size, size]; raises InputError."""
    if name in SMALL:
        return SMALL[name](3, size, classes)
    return _torchvision_model(name, size, classes)


def _torchvision_model(name, size, classes):
    """Build it, and try it on one image: some need 75 pixels, or a multiple of 16."""
    options = {
        "googlenet": {"aux_logits": False, "init_weights": True},  # one output, also in training
        "inception_v3": {"aux_logits": False, "init_weights": True},
    }.get(name, {})
    if name.startswith("vit_"):
        options["image_size"] = size
    try:
        model = torchvision_models.get_model(name, num_classes=classes, **options)
        with torch.inference_mode():
            model.eval()(torch.zeros(1, 3, size, size))
        return model
    except (RuntimeError, ValueError, AssertionError) as error:
        raise InputError(
            f"{name} takes no images of {size}x{size} ({' '.join(str(error).split())[:160]}): "
            "choose another --image-size"
        ) from error


def decay_groups(model, weight_decay):
    """Return the parameters of `model` in two groups: BatchNorm and biases have no weight decay.

    Source: He et al. 2018, arXiv:1812.01187, section 3.1.
    """
    weights, others = (
        [p for p in model.parameters() if (p.ndim > 1) == decays] for decays in (True, False)
    )
    return [
        {"params": weights, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0},
    ]


def replace_batch_norm(model, kind):
    """Replace each BatchNorm layer of `model`, in place, by one of class `kind` with its state."""
    for name, part in model.named_children():
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
            layer = kind(
                part.num_features, part.eps, part.momentum, part.affine, part.track_running_stats
            )
            layer.load_state_dict(part.state_dict())
            setattr(model, name, layer.to(part.weight.device))
        else:
            replace_batch_norm(part, kind)
    return model
