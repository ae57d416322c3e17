"""The flags that all recipes share, and their types. A recipe adds its own."""

import argparse
import math
import os
import re
from pathlib import Path

from common.errors import InputError


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the defaults of flags with a value, and the docstring of the recipe as it is."""

    def _get_help_string(self, action):
        if action.default is None or isinstance(action.default, bool):
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises InputError, which ends the recipe in one line.

    `task` names what is trained. A resumed run must have the same flags, except for those that
    add_run_group() adds. A path may start with ~; a URL or an empty path is an error.
    """

    def __init__(self, doc: str, task: str = ""):
        super().__init__(description=doc, formatter_class=HelpFormatter, allow_abbrev=False)
        self.run_groups = {}
        self.may_change = set()
        # Defaults for recipes without these flags. `forms` says how the log prints a figure (Log).
        self.set_defaults(
            accumulate=1, channels_last=False, cuda_graph=False, evaluate=False, forms={}
        )
        if task:
            self.set_defaults(task=task)

    def add_run_group(self, title: str = "run"):
        """Return add_argument() of a group of flags that may differ when a run resumes."""
        if title not in self.run_groups:
            about = "may differ when a run resumes"
            self.run_groups[title] = self.add_argument_group(title, about)

        def add_argument(*names, **options):
            action = self.run_groups[title].add_argument(*names, **options)
            self.may_change.add(action.dest)

        return add_argument

    def _get_value(self, action, arg_string):
        """Convert a flag's text: check paths, and expand ~. argparse calls it for each value."""
        if takes_path(action):
            name = "/".join(action.option_strings) or action.dest
            # A default may be empty.
            if not arg_string and action.default != "":
                self.error(f"{name} is empty: give a path, or set the variable that has it")
            if is_url(arg_string):
                self.error(f"{name} {arg_string}: give a local path, as no URL is read or written")
            # A shell leaves ~ as it is in --flag=~/folder and in quotes.
            arg_string = os.path.expanduser(arg_string)
        return super()._get_value(action, arg_string)

    def parse_known_args(self, args=None, namespace=None):
        parsed, rest = super().parse_known_args(args, namespace)
        # As a list: the order of a set differs between processes.
        parsed.may_change = sorted(self.may_change)
        return parsed, rest

    def error(self, message: str):
        raise InputError(f"{message} (--help lists the flags)")


def takes_path(action: argparse.Action) -> bool:
    """Whether the flag takes a path: type Path, metavar FILE or DIR, or a name ending in -dir."""
    is_path = action.type is Path or action.metavar in ("FILE", "DIR")
    return is_path or action.dest.endswith("_dir")


def is_url(text: str) -> bool:
    """Whether `text` is like s3://bucket/run, which would become a local folder s3:."""
    return re.match(r"[A-Za-z][\w.+-]+:/", text) is not None


def whole_number(text: str, low: int, high: int = 2**31 - 1) -> int:
    """The number in `text`, within limits: a timer, for one, overflows above 31 or 63 bits."""
    value = int(text)
    if value < low:
        raise argparse.ArgumentTypeError(f"{text} is not at least {low}")
    if value > high:
        raise argparse.ArgumentTypeError(f"{text} is above {high}")
    return value


def positive_int(text: str) -> int:
    return whole_number(text, 1)


def non_negative_int(text: str) -> int:
    return whole_number(text, 0)


def seed(text: str) -> int:
    return whole_number(text, 0, 2**32 - 1)


def image_size(text: str) -> int:
    return whole_number(text, 32)


def non_negative_float(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a finite number of at least 0")
    return value


def positive_float(text: str) -> float:
    value = non_negative_float(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def fraction(text: str) -> float:
    value = non_negative_float(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text} is not in the range from 0 to 1")
    return value


def add_training_flags(
    parser: Parser,
    epochs: int,
    batch_size: int,
    lr: float | None,
    test_batch_size: int = 1000,
    warmup_epochs: float = 1,
    momentum: float | None = 0.9,
    weight_decay: float | None = 0,
    scale_lr: str = "linear",
) -> None:
    """Add the flags for training, checkpoints and output, with these defaults.

    devices, schedule, weights and run.Run read them. With lr=None the recipe sets the rate itself.
    With momentum=None or weight_decay=None there is no such flag.
    """
    add = parser.add_argument
    add(
        "--warmup-epochs",
        type=non_negative_float,
        default=warmup_epochs,
        help="epochs in which the rate rises",
    )
    if momentum is not None:
        add("--momentum", type=fraction, default=momentum, help="momentum of SGD")
    if weight_decay is not None:
        add(
            "--weight-decay",
            "--wd",
            type=non_negative_float,
            default=weight_decay,
            help="weight decay",
        )
    add("--seed", type=seed, default=0, help="seed of weights, order of data, and dropout")
    add = parser.add_run_group()
    add("--epochs", type=positive_int, default=epochs, help="passes over the training data")
    add("--max-steps", type=positive_int, help="end the run after this many steps, not --epochs")
    add("-b", "--batch-size", type=positive_int, default=batch_size, help="samples per process")
    add(
        "-G",
        "--global-batch-size",
        type=positive_int,
        help="samples of all processes together; --lr is then the rate for this batch",
    )
    add(
        "--test-batch-size",
        type=positive_int,
        default=test_batch_size,
        help="batch size of evaluation",
    )
    by_model = "" if lr else "; by default, depends on the model"
    add(
        "--lr",
        type=positive_float,
        default=lr,
        help=f"peak learning rate of one process{by_model}",
    )
    add(
        "--scale-lr",
        choices=("linear", "sqrt", "none"),
        default=scale_lr,
        help="how --lr grows with the number of processes",
    )
    add("--device", default="auto", help="cuda, xpu, mps, cpu; auto: what torch.accelerator finds")
    add("--compile", action="store_true", help="compile the model with torch.compile")
    add("--eval-every", type=positive_int, metavar="STEPS", help="also evaluate within an epoch")
    add(
        "--timeout",
        type=positive_int,
        default=600,
        help="seconds until a step counts as hung: its process ends",
    )
    add(
        "--dry-run",
        action="store_true",
        help="try one step and one batch of evaluation; write nothing",
    )
    add(
        "--deterministic",
        action="store_true",
        help="compute the same bits each time; slower on a GPU",
    )
    add("--profile", action="store_true", help="trace ten steps of rank 0, for ui.perfetto.dev")
    # torch.distributed.launch passes it.
    add("--local-rank", type=int, help=argparse.SUPPRESS)
    add = parser.add_run_group("checkpoints")
    add("--init-from", metavar="FILE", help="start from weights: state_dict, safetensors, .pt")
    add("--init-partial", action="store_true", help="let --init-from skip weights that do not fit")
    add("--resume", metavar="FILE", help="resume from a checkpoint; auto: the newest in --log-dir")
    add("--checkpoint-every", type=positive_int, metavar="STEPS", help="also save within an epoch")
    add = parser.add_run_group("output")
    add("--log-dir", metavar="DIR", help="folder of the run; by default a new one in runs/")
    add("--log-interval", type=positive_int, metavar="STEPS", help="print a line every N steps")
    add(
        "--log-seconds",
        type=non_negative_float,
        metavar="SECONDS",
        help="print at most one line every N seconds; 10, or 0 with --log-interval",
    )
