"""The command line of the recipes, in groups: a copied recipe drops those that it does not need."""

import argparse
import ctypes
import math
import os
import re
import shutil
import sys

import torch

from common.processes import fail


class Parser(argparse.ArgumentParser):
    """Accepts --batch_size for --batch-size, and reports an error in one line."""

    def __init__(self, doc: str):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
        self.lrs = None  # the default of --lr for each --model

    def parse_known_args(self, args=None, namespace=None):
        args = sys.argv[1:] if args is None else args
        dashed = [re.sub(r"^--[^=]+", lambda flag: flag[0].replace("_", "-"), arg) for arg in args]
        namespace, others = super().parse_known_args(dashed, namespace)
        if self.lrs and namespace.lr is None:
            namespace.lr = self.lrs[namespace.model]
        return namespace, others

    def error(self, message):
        fail(f"{message} (--help lists the flags)")


def number(kind: type, low: float, above: bool = False, high: float = math.inf):
    """An argparse type: a finite `kind` (int or float), at least (or `above`) `low` and at most `high`."""
    def convert(text):
        value = kind(text)
        if not (low < value if above else low <= value) or not value <= high or math.isinf(value):
            raise argparse.ArgumentTypeError(f"{text} is not {'above' if above else 'at least'} {low}"
                                             + f" and at most {high}" * (high < math.inf))
        return value

    convert.__name__ = "whole number" if kind is int else "number"
    return convert


COUNT, POSITIVE, SHARE = number(int, 1), number(float, 0, above=True), number(float, 0)
DEFAULT = " (default: %(default)s)"


def parser(doc: str, dataset: str) -> Parser:
    """The parser of a recipe with docstring `doc`: the flags for the device and the output."""
    p = Parser(doc)
    p.set_defaults(dataset=dataset)
    add = p.add_argument_group("device").add_argument
    add("--device", default="auto", metavar="NAME", help="cuda, xpu, mps, cpu; auto: what torch.accelerator finds")
    add("--timeout", type=COUNT, default=600, metavar="SECONDS", help="end a rank whose step takes longer" + DEFAULT)
    add = p.add_argument_group("output").add_argument
    add("--log-interval", type=COUNT, default=10, metavar="STEPS", help="check loss and signals this often" + DEFAULT)
    add("--log-dir", metavar="DIR", help="for TensorBoard events and results.json (default: a new folder in runs/)")
    add("--checkpoint-dir", metavar="DIR", help="for last.pt, previous.pt and best.pt (default: --log-dir)")
    add("--checkpoint-every", type=COUNT, metavar="STEPS", help="also save within an epoch, this often")
    add("--resume", metavar="FILE", help="the checkpoint to continue from; auto: the newest good one, if there is one")
    add("--profile", action="store_true", help="trace ten steps of rank 0, for https://ui.perfetto.dev")
    add("--dry-run", action="store_true", help="one step of training and of evaluation, without files")
    return p


def add_data(p: Parser) -> None:
    """The flags of the data sets of this repository."""
    add = p.add_argument_group("data").add_argument
    add("--data-dir", default="data", metavar="DIR", help="folder of the data set" + DEFAULT)
    add("--synthetic", nargs="?", type=COUNT, const=10_000, metavar="N", help="N generated images (10000 if not given)")


def add_training(p: Parser, lrs: dict, epochs: int, batch_size: int, test_batch_size=1000, model=str):
    """The flags of training; `lrs` maps each model, the default first, to its --lr; `model` is the type of --model."""
    p.lrs, names, few = lrs, list(lrs), ", ".join(f"{lr:g} for {name}" for name, lr in list(lrs.items())[:4])
    add = p.add_argument_group("training").add_argument
    add("-a", "--model", "--arch", type=model, choices=lrs, default=names[0], metavar="NAME", help=", ".join(names))
    add("--epochs", type=COUNT, default=epochs, metavar="N", help="passes over the data" + DEFAULT)
    add("-b", "--batch-size", type=COUNT, default=batch_size, metavar="N", help="images per process" + DEFAULT)
    add("-G", "--global-batch-size", type=COUNT, metavar="N",
        help="images per step, which the processes share; replaces --batch-size, and --lr is then for this batch")
    add("--test-batch-size", type=COUNT, default=test_batch_size, metavar="N", help="in evaluation" + DEFAULT)
    add("--lr", type=POSITIVE, help=f"learning rate of one process (default: {few}{', ...' * (len(lrs) > 4)})")
    add("--scale-lr", choices=("linear", "sqrt", "none"), default="linear",
        help="multiply --lr by the number of processes, its square root, or 1" + DEFAULT)
    add("--channels-last", action="store_true", help="NHWC images and weights, which tensor cores are made for")
    add("--compile", action="store_true", help="torch.compile the model, on CUDA with CUDA graphs if it is small")
    add("--seed", type=number(int, 0, high=2**32 - 1), default=0, help="for weights, data and dropout" + DEFAULT)


def add_sgd(p: Parser, weight_decay: float, warmup_epochs: float = 1) -> None:
    """The flags of SGD and its schedule; a copied recipe may have others."""
    add = p.add_argument_group("SGD").add_argument
    add("--warmup-epochs", type=SHARE, default=warmup_epochs, metavar="N", help="to reach the scaled --lr" + DEFAULT)
    add("--momentum", type=SHARE, default=0.9, help=DEFAULT)
    add("--weight-decay", "--wd", type=SHARE, default=weight_decay, metavar="WD", help=DEFAULT)


def pick_device(args, local_rank: int = 0, local_world_size: int = 1) -> torch.device:
    """The torch.device for process `local_rank` of `local_world_size` on this machine; fails with too few GPUs."""
    found = getattr(torch.accelerator.current_accelerator(check_available=True), "type", "cpu")
    name = found if args.device == "auto" else args.device
    count = torch.accelerator.device_count() if name == found else 0
    if name != "cpu" and count < local_world_size:
        fail(f"torch sees {count} {name} devices for {local_world_size} processes: start fewer, or use --device cpu")
    return torch.device(name, local_rank) if name != "cpu" else torch.device("cpu")


def tune_cpu(device: torch.device) -> None:
    """On a CPU: let glibc keep freed memory, and let no thread interrupt another when it wakes up (docs/cpu.md)."""
    if device.type == "cpu" and hasattr(libc := ctypes.CDLL(None), "mallopt"):  # with glibc
        libc.mallopt(-4, 0), libc.mallopt(-1, -1)  # else page faults fetch it again in each step
        for thread in os.listdir("/proc/self/task"):
            libc.sched_setscheduler(int(thread), os.SCHED_BATCH, bytes(4))


def to_device(model: torch.nn.Module, args, device: torch.device) -> torch.nn.Module:
    """Move `model` to `device`, and set what makes it fast there: --channels-last, --compile, cuDNN's search, TF32."""
    torch.backends.cudnn.benchmark = True  # tries the algorithms for each convolution once, and keeps the fastest
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else "highest")  # high: TF32, as in convolutions
    tune_cpu(device)
    if args.channels_last:
        model.to(memory_format=torch.channels_last)
        model.register_forward_pre_hook(lambda _, images: images[0].contiguous(memory_format=torch.channels_last))
    if getattr(args, "comm_hook", "") == "powersgd" and (args.compile or getattr(args, "amp_dtype", "") == "fp16"):
        fail("--comm-hook powersgd: leave out --compile, and use --amp-dtype bf16")  # it would keep fp16's overflows
    if args.compile:
        if not shutil.which(os.environ.get("CXX", "g++")):
            fail("--compile needs a C++ compiler: apt-get install g++, or set CXX")
        # CUDA graphs for a small model, as a GPU would wait for Python; but they overwrite gradients that accumulate
        small = sum(p.numel() for p in model.parameters()) < 2e7 and getattr(args, "accumulate", 1) == 1
        model.compile(mode="reduce-overhead" if small else "default")  # in place: a checkpoint keeps its names
    return model.to(device)
