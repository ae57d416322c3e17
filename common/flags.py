"""The command line that all recipes share, and what it asks of the machine."""

import argparse
import contextlib
import difflib
import importlib
import io
import math
import os
import re
import sys

import torch

from common import failures, processes

APEX = ("this recipe needs NVIDIA Apex at tag 25.05, the last with amp and parallel (PyPI's apex is another package): "
        "pip install --no-build-isolation git+https://github.com/NVIDIA/apex@25.05; "
        "or take ddp_amp.py, which needs torch alone")
HOROVOD = f"PYTHON={sys.executable} scripts/install_horovod.sh builds it into this environment"


def require(module, name, hint):
    """Import `module`, which has to have `name`, or end with status 2 and the `hint` that says how to install it."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # Horovod prints what it lacks, and can be imported without it
            found = importlib.import_module(module)
            getattr(found, name)
        return found
    except Exception as error:  # a broken or an unrelated package of that name can raise anything
        failures.fail(f"{module} cannot be imported ({type(error).__name__}: {' '.join(str(error).split())}): {hint}")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The docstring as it stands, and the default of each flag that has one."""

    def _get_help_string(self, action):
        return action.help if action.default is None or action.default is False else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """An argument parser that takes --batch_size for --batch-size, no abbreviations, and complains in one line."""

    def parse_known_args(self, args=None, namespace=None):
        args = sys.argv[1:] if args is None else args
        dashed = [re.sub(r"^--[^=]+", lambda flag: flag[0].replace("_", "-"), arg) for arg in args]
        return super().parse_known_args(dashed, namespace)

    def error(self, message):
        failures.fail(f"{message} (--help lists the flags)")


def number(kind, low, strictly=False, high=math.inf):
    """An argparse type: a finite `kind` (int or float) of at least `low`, or above it if `strictly`, up to `high`."""

    def convert(text):
        value = kind(text)
        if not math.isfinite(value) or value < low or (strictly and value == low):
            raise argparse.ArgumentTypeError(f"{text} is not {'above' if strictly else 'at least'} {low}")
        if value > high:
            raise argparse.ArgumentTypeError(f"{text} is more than {high}")
        return value

    convert.__name__ = "whole number" if kind is int else "number"
    return convert


def one_of(names):
    """An argparse type: one of many `names`; a wrong one is answered with the nearest."""

    def convert(text):
        if text not in names:
            near = difflib.get_close_matches(text, names) or names[:3]
            raise argparse.ArgumentTypeError(f"there is no {text}; did you mean {' or '.join(near)}?")
        return text

    return convert


def export_file(path):
    """An argparse type: where safetensors, which has to be there, can write weights."""
    require("safetensors.torch", "save", "pip install safetensors")
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise argparse.ArgumentTypeError(f"the folder of {path} is not there")
    return path


def parser(doc, dataset, models, epochs, batch_size, lr, weight_decay):
    """The parser of a recipe: `doc` is its docstring, `models` the names --model takes, the rest are defaults."""
    if any(name in os.environ for name in failures.RANK_VARIABLES):
        processes.end_with_parent()
    else:
        processes.exit_on_ctrl_c()
    sys.excepthook = failures.excepthook
    p = Parser(description=doc, formatter_class=HelpFormatter, allow_abbrev=False)
    p.set_defaults(dataset=dataset, accumulate=1, channels_last=False, compile=False, evaluate=False, sync_bn=False,
                   top5=False, image_size=None, label_smoothing=0)  # imagenet has flags for them
    data = p.add_argument_group("data")
    data.add_argument("--data-dir", default="data", metavar="DIR", help="where the data set is, or is downloaded to")
    data.add_argument("--synthetic", nargs="?", type=number(int, 1), const=10_000, metavar="IMAGES",
                      help="train on so many generated images (10000 if no number is given) and a fifth as many for "
                           "validation; needs no data set")
    data.add_argument("-j", "--workers", type=number(int, 0), default=0, metavar="N",
                      help="loader processes per training process; with 0 MNIST, CIFAR-10 and generated images stay on "
                           "the device; without it ImageNet takes as many as there are cores")
    train = p.add_argument_group("training")
    train.add_argument("-a", "--model", "--arch", type=one_of(models), default=models[0], metavar="NAME",
                       help=" or ".join(models) if len(models) < 5 else
                       "any of torchvision's models for classification; to try things out convnet or lenet")
    train.add_argument("--epochs", type=number(int, 1), default=epochs, metavar="N", help="passes over the data")
    train.add_argument("-b", "--batch-size", type=number(int, 1), default=batch_size, metavar="N",
                       help="images per step and process")
    train.add_argument("--test-batch-size", type=number(int, 1), default=1000, metavar="N",
                       help="images per evaluation step and process")
    train.add_argument("--lr", type=number(float, 0, strictly=True), default=lr, help="learning rate of one process")
    train.add_argument("--scale-lr", choices=("linear", "sqrt", "none"), default="linear",
                       help="what the number of processes does to --lr: multiply, multiply by its root, nothing")
    train.add_argument("--warmup-epochs", type=number(float, 0), default=1, metavar="N",
                       help="epochs in which the learning rate grows from --lr to the scaled one")
    train.add_argument("--momentum", type=number(float, 0), default=0.9, help="momentum of SGD")
    train.add_argument("--weight-decay", "--wd", type=number(float, 0), default=weight_decay, metavar="WD",
                       help="weight decay of SGD")
    train.add_argument("--seed", type=number(int, 0, high=2**32 - 1), default=0,
                       help="seed of weights, data order and augmentation")
    machine = p.add_argument_group("device")
    machine.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: a GPU if it has one")
    machine.add_argument("--no-cuda", dest="device", action="store_const", const="cpu", default=argparse.SUPPRESS,
                         help="the same as --device cpu")
    machine.add_argument("--timeout", type=number(int, 1), default=600, metavar="SECONDS",
                         help="end the run when no step is made for so long, as a rank or a loader worker hangs")
    output = p.add_argument_group("output")
    output.add_argument("--log-interval", type=number(int, 1), default=10, metavar="STEPS",
                        help="steps between two updates of the loss in the progress bar")
    output.add_argument("--log-dir", metavar="DIR",
                        help="TensorBoard events and results.json; without it a new folder under runs/")
    output.add_argument("--checkpoint-dir", metavar="DIR",
                        help="where each epoch ends with a checkpoint (last.pt, best.pt); without it the log folder")
    output.add_argument("--checkpoint-every", type=number(int, 1), metavar="STEPS", help="save within an epoch as well")
    output.add_argument("--keep", type=number(int, 1), default=2, metavar="N",
                        help="how many of the newest checkpoints stay, beside the best")
    output.add_argument("--resume", metavar="FILE", help="continue the run that saved this checkpoint; auto takes the "
                                                         "newest good one, and begins where there is none yet")
    output.add_argument("--export", type=export_file, metavar="FILE",
                        help="write the weights of the best epoch at the end, as safetensors")
    output.add_argument("--profile", action="store_true",
                        help="write a trace of ten steps on rank 0 to the log folder, for https://ui.perfetto.dev")
    output.add_argument("--dry-run", action="store_true", help="one step of training and evaluation, no files")
    return p


def add_imagenet(p):
    """Give the parser `p` what the recipes of ImageNet have beside the others' flags, and other defaults."""
    p.set_defaults(workers=None, test_batch_size=256, warmup_epochs=5, top5=True)
    group = p.add_argument_group("ImageNet")
    group.add_argument("--loader", choices=("pillow", "nvimgcodec"), default="pillow",
                       help="what decodes the images: nvimgcodec only the part of each that is used")
    group.add_argument("--image-size", type=number(int, 32), default=224, metavar="PIXELS", help="height and width")
    group.add_argument("--label-smoothing", type=number(float, 0, high=1), default=0.1, metavar="SHARE",
                       help="the share of the target that all classes have in common")
    group.add_argument("--accumulate", type=number(int, 1), default=1, metavar="N",
                       help="batches in a step: -b 64 --accumulate 4 trains as -b 256, in less memory")
    group.add_argument("--channels-last", action="store_true", help="NHWC in memory, which tensor cores want")
    group.add_argument("--compile", action="store_true", help="torch.compile the model")
    group.add_argument("--evaluate", action="store_true", help="only evaluate what --resume names")


def pick_device(args, local_rank=0, local_world_size=1):
    """The torch.device of process `local_rank` of `local_world_size` on this machine, which share its cores.

    Ends with status 2 where --device cuda finds no GPU, where there are fewer GPUs than processes, or where there are
    more than four processes to a CPU core.
    """
    if args.workers is None:
        args.workers = 0 if args.synthetic else max(1, len(os.sched_getaffinity(0)) // local_world_size)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // local_world_size))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if args.device == "cpu" or (args.device == "auto" and gpus == 0):
        if args.sync_bn:
            failures.fail("--sync-bn: the BatchNorm that adds over processes works on GPUs only")
        if local_world_size > 4 * os.cpu_count():
            failures.fail(f"{local_world_size} processes on the CPU: "
                          f"{os.cpu_count()} cores take at most {4 * os.cpu_count()}")
        return torch.device("cpu")
    if gpus == 0:
        failures.fail("--device cuda: torch sees no GPU on this machine; --device cpu runs without one")
    if gpus < local_world_size:
        failures.fail(f"{local_world_size} processes need a GPU each and torch sees {gpus}: start at most {gpus}, "
             "or take --device cpu")
    return torch.device("cuda", local_rank)


def require_gpu(package):
    """End with status 2 where torch sees no GPU and `package` does nothing without one."""
    if not torch.cuda.is_available():
        failures.fail(f"{package} is here, but it needs a GPU and torch sees none: take ddp_amp.py, on any device")
