"""The flags of every run, and the types of flags. A recipe adds those of its training."""

import argparse
import math
import os
import re
import sys
from pathlib import Path

from common.errors import InputError

# The flags that a run that goes on may change, under another launcher, too. run.Run compares all
# others with those of the checkpoint.
MAY_CHANGE = frozenset(
    {
        "accumulate",
        "amp_dtype",
        "batch_size",
        "channels_last",
        "checkpoint_every",
        "comm_hook",
        "compile",
        "cuda_graph",
        "data_dir",
        "deterministic",
        "device",
        "dry_run",
        "epochs",
        "eval_every",
        "evaluate",
        "fp16_allreduce",
        "global_batch_size",
        "gpus",
        "init_from",
        "init_partial",
        "loader",
        "local_rank",
        "log_dir",
        "log_interval",
        "log_seconds",
        "lr",
        "max_steps",
        "nodes",
        "nr",
        "opt_level",
        "param_dtype",
        "profile",
        "reshard",
        "resume",
        "saved_by",
        "sharded_checkpoint",
        "sync_bn",
        "test_batch_size",
        "timeout",
        "use_adasum",
        "workers",
    }
)

# The flags of ddp_spawn.py, and of tutorials, that say which processes to start.
OF_DDP_SPAWN = frozenset({"-n", "--nodes", "-g", "--gpus", "-nr", "--nr"})


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the defaults of flags that have one, and the docstring of the recipe as it is."""

    def _get_help_string(self, action):
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises InputError, which ends the recipe in one line.

    A flag that takes a path refuses a URL.
    """

    def __init__(self, doc: str):
        super().__init__(description=doc, formatter_class=HelpFormatter, allow_abbrev=False)

    def parse_known_args(self, args=None, namespace=None):
        words = sys.argv[1:] if args is None else args
        parsed, rest = super().parse_known_args([with_home(word) for word in words], namespace)
        for action in self._actions:
            value = vars(parsed).get(action.dest)
            if takes_path(action) and is_url(value):
                name = "/".join(action.option_strings) or action.dest
                self.error(f"{name} {value}: give a local path, as no URL is read or written")
        return parsed, rest

    def error(self, message: str):
        hint = "--help lists the flags"
        if message.startswith("unrecognized") and OF_DDP_SPAWN & set(re.split("[ =]", message)):
            hint = (
                "ddp_spawn.py has them; for other recipes torchrun has --nnodes, "
                "--nproc-per-node and --node-rank, and horovodrun -np"
            )
        raise InputError(f"{message} ({hint})")


def with_home(word: str) -> str:
    """A shell leaves ~ as it is in --flag=~/folder."""
    flag, _, value = word.partition("=")
    if flag.startswith("--") and value.startswith("~"):
        return f"{flag}={os.path.expanduser(value)}"
    return word


def takes_path(action: argparse.Action) -> bool:
    """Whether its value is a path: a Path, a FILE, a DIR, or the value of --...-dir."""
    is_path = action.type is Path or action.metavar in ("FILE", "DIR")
    return is_path or action.dest.endswith("_dir")


def is_url(value) -> bool:
    """Such as s3://bucket/run, which would become a local folder s3:; a Path drops the second /."""
    return re.match(r"[A-Za-z][\w.+-]+:/", str(value)) is not None


def whole_number(text: str, low: int, high: float = math.inf) -> int:
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


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the device, the length of a run, its checkpoints and its output.

    run.Run reads them.
    """
    add = parser.add_argument_group("run").add_argument
    add("--device", default="auto", help="cuda, xpu, mps, cpu; auto: what torch.accelerator finds")
    add("--max-steps", type=positive_int, help="end the run after so many steps, not --epochs")
    add("--eval-every", type=positive_int, metavar="STEPS", help="also evaluate within an epoch")
    add("--timeout", type=positive_int, default=600, help="end a step that takes so many seconds")
    add(
        "--dry-run", action="store_true", help="try a step and a batch of evaluation; write nothing"
    )
    add("--deterministic", action="store_true", help="compute the same bits again; slower on a GPU")
    add("--profile", action="store_true", help="trace ten steps of rank 0, for ui.perfetto.dev")
    add = parser.add_argument_group("checkpoints").add_argument
    add("--init-from", metavar="FILE", help="begin with weights: state_dict, safetensors, .pt")
    add("--init-partial", action="store_true", help="let --init-from leave out what does not fit")
    add("--resume", metavar="FILE", help="go on from a checkpoint; auto: the newest in --log-dir")
    add("--checkpoint-every", type=positive_int, metavar="STEPS", help="also save within an epoch")
    add = parser.add_argument_group("output").add_argument
    add("--log-dir", metavar="DIR", help="folder of the run; if not given, a new one in runs/")
    add("--log-interval", type=positive_int, metavar="STEPS", help="print a line every N steps")
    add(
        "--log-seconds",
        type=non_negative_float,
        metavar="SECONDS",
        help="print no more than a line in N seconds; 10, or 0 with --log-interval",
    )
