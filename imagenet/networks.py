"""Any of torchvision's models for classification, and the flags of the recipes that train them."""

import argparse
import difflib

import torch
from torchvision import models as torchvision_models

from common import flags
from common.metrics import format_metrics
from common.models import MODELS as SMALL
from common.processes import fail

# Without BatchNorm a rate of 0.1 diverges; torchvision's own recipes train these with 0.01, or with another optimizer
WITHOUT_BATCH_NORM = ("alexnet", "convnext", "maxvit", "squeezenet", "swin", "vgg", "vit")
# For a batch of 256. ConvNet and LeNet are to try things out, on images of any size
LRS = {"resnet50": 0.1, "convnet": 0.02, "lenet": 0.02, **{
    name: 0.01 if name.startswith(WITHOUT_BATCH_NORM) and not name.endswith("_bn") else 0.1
    for name in torchvision_models.list_models(module=torchvision_models)}}


def known(name):
    """An argparse type: a name in LRS; a wrong one is answered with the nearest."""
    if name not in LRS:
        near = difflib.get_close_matches(name, LRS) or ["resnet50"]
        raise argparse.ArgumentTypeError(f"there is no {name}; did you mean {' or '.join(near)}?")
    return name


def add_flags(p):
    """Give the parser `p` what the recipes of ImageNet have beside the others' flags, and other defaults."""
    flags.add_training(p, LRS, epochs=90, batch_size=256, test_batch_size=256, model=known)
    flags.add_sgd(p, weight_decay=1e-4, warmup_epochs=5)
    add = p.add_argument_group("ImageNet").add_argument
    add("--label-smoothing", type=flags.number(float, 0, high=1), default=0.1, metavar="SHARE",
        help="the share of the target that all classes have in common")
    add("--accumulate", type=flags.COUNT, default=1, metavar="N",
        help="batches in a step: -b 64 --accumulate 4 trains as -b 256, in less memory")
    add("--channels-last", action="store_true", help="NHWC in memory, which tensor cores want")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--evaluate", action="store_true", help="only evaluate what --resume names")


def build(args, device, classes):
    """The model that --model names on `device`, for images [batch, 3, --image-size, --image-size]."""
    if args.evaluate and not args.resume:
        fail("--evaluate: of which checkpoint? --resume FILE, or --resume auto with --log-dir of a run")
    if getattr(args, "sync_bn", False) and device.type == "cpu":
        fail("--sync-bn: the BatchNorm that adds over processes works on GPUs only")
    if args.model in SMALL:
        model = SMALL[args.model](3, args.image_size, classes)
    else:
        model = _torchvision_model(args.model, args.image_size, classes)
    if args.compile:
        model.compile()  # in place: a checkpoint has the names that it has without
    return model.to(device)


def _torchvision_model(name, size, classes):
    """One that takes images of that size; some want at least 75 pixels, or a multiple of 16."""
    options = {"googlenet": {"aux_logits": False, "init_weights": True},  # one output in training as well
               "inception_v3": {"aux_logits": False, "init_weights": True}}.get(name, {})
    if name.startswith("vit_"):
        options["image_size"] = size
    try:
        model = torchvision_models.get_model(name, num_classes=classes, **options)
        with torch.inference_mode():
            model.eval()(torch.zeros(1, 3, size, size))
        return model
    except (RuntimeError, ValueError, AssertionError) as error:
        return fail(f"{name} takes no images of {size}x{size} ({' '.join(str(error).split())[:160]}): choose another "
                    "--image-size")


def report(run, val):
    """Print, on rank 0, what an evaluation alone (--evaluate) gave: `val` is a result of Metrics.average."""
    if run.rank == 0:
        print(f"{val['images']:,} images of val: {format_metrics(val)} | {val['images_per_sec']:,.0f} images/s")


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
            setattr(model, name, layer.to(part.weight.device))
        else:
            replace_batch_norm(part, kind)
    return model
