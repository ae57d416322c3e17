"""The same seed and global batch give the same training, whatever the strategy and the number of
processes.
"""

import shutil

import pytest
import torch
from forked import compute
from launch import (
    TOLERANCE,
    checkpoint,
    evaluations,
    largest_difference,
    need,
    need_horovod,
    strategies,
)
from recipes import ROOT, in_float64, small

from mnist import digits

GLOBAL_BATCH, LR = 32, 0.04
# Two epochs of ten steps, so that set_epoch counts; weight decay and momentum, as a recipe may
# lose either; LeNet has neither BatchNorm, whose statistics are each process's own, nor dropout.
# The 65 images to validate on are shares of different lengths, in batches of different lengths.
TRAINING = (
    "--synthetic 325 --epochs 2 --model lenet --momentum 0.9 --wd 5e-4 --warmup-epochs 0 "
    "--test-batch-size 20 --device cpu"
)


def train(command, processes, folder, log_dir, dataset="mnist", flags=""):
    """The weights after 20 steps."""
    shares = f"--batch-size {GLOBAL_BATCH // processes} --lr {LR / processes}"
    flags = f"{TRAINING} {small(dataset)} {shares} {flags}"
    compute(f"{command} {flags} --log-dir {log_dir}", cwd=folder)
    return checkpoint(log_dir)["model"]


def figures(log_dir):
    """The loss and the accuracy of training and of validation, of both epochs."""
    names = [f"{split}/{name}" for split in ("train", "val") for name in ("loss", "accuracy")]
    return [evaluation[name] for evaluation in evaluations(log_dir) for name in names]


def compile_without_kernels(path):
    """Let Dynamo and Autograd trace the model, but write no C++, which takes a minute.

    test_imagenet.py shows that torch's own kernels do the same.
    """
    text = path.read_text()
    assert text.count("model.compile()") == 1
    path.write_text(text.replace("model.compile()", 'model.compile(backend="aot_eager")'))


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A function: (the recipes of a data set, the weights and the figures of its single.py)."""
    done = {}

    def of(dataset):
        if dataset not in done:
            to = tmp_path_factory.mktemp("single")
            folder = in_float64(to, dataset)
            compile_without_kernels(to / "common" / "devices.py")
            weights = train(f"python {folder}/single.py", 1, to, to / "log", dataset)
            done[dataset] = folder, weights, figures(to / "log")
        return done[dataset]

    return of


@pytest.mark.parametrize(
    "case",
    [
        "mnist ddp_spawn 2",
        "mnist ddp_launch 2",
        "mnist fsdp 2",
        "mnist hvd_gloo 2",
        # Each strategy once more: another data set (test_siblings.py shows that its recipes are
        # the same), more processes, and the flags for speed.
        "imagenet ddp_spawn 2 --channels-last",
        "cifar10 ddp_launch 4 --channels-last",
        "cifar10 fsdp 4 --no-reshard-after-forward",
        "imagenet fsdp 2 --channels-last",
        "imagenet hvd_gloo 4 --channels-last",
        "mnist ddp_spawn 2 --compile",
        "mnist fsdp 2 --compile",
    ],
)
def test_parity(case, single, tmp_path):
    """The weights, and the averages over all images, each of which counts once."""
    dataset, name, processes, *flags = case.split()
    if name.startswith("hvd"):
        need_horovod(name)
    if "--compile" in flags:
        need(shutil.which("g++"), "g++, without which --compile is refused")
    folder, expected, expected_figures = single(dataset)
    command = strategies(processes, folder)[name]
    log_dir = tmp_path / "log"
    weights = train(command, int(processes), tmp_path, log_dir, dataset, " ".join(flags))
    assert largest_difference(weights, expected) < TOLERANCE
    assert figures(log_dir) == pytest.approx(expected_figures, rel=TOLERANCE, abs=0)


@pytest.mark.parametrize("strategy", ["ddp_launch", "hvd_gloo"])
def test_all_begin_with_the_weights_of_rank_0(strategy, single, tmp_path):
    """Whatever the others have made: the broadcast counts, and not that all have the same seed."""
    if strategy.startswith("hvd"):
        need_horovod(strategy)
    seed = "torch.manual_seed(args.seed)"
    name = f"{strategy.removesuffix('_gloo')}.py"
    another = "torch.manual_seed(args.seed + world.rank)"
    folder = in_float64(tmp_path, "mnist", name, seed, another)
    weights = train(strategies(2, folder)[strategy], 2, tmp_path, tmp_path / "log")
    assert largest_difference(weights, single("mnist")[1]) < TOLERANCE


# By how much the change of the weights in 20 steps may differ from another run's, relative to it.
# bf16 rounds to 8 bits and fp16 to 11. With two processes it is 0.07 and 0.02, and 1e-6 in fp32.
SLACK = {"bf16": 0.15, "fp16": 0.05}


def test_horovod_in_16_bits(tmp_path):
    """Two processes do what one does, and that is not what fp32 does."""
    need_horovod("gloo")
    torch.manual_seed(0)
    start = digits.build("lenet").state_dict()

    def change(processes, flags=""):
        log_dir = tmp_path / f"{processes}{flags}".replace(" ", "")
        command = strategies(processes, ROOT / "mnist")["hvd_gloo"]
        weights = train(command, processes, tmp_path, log_dir, flags=flags)
        return torch.cat([(weights[name] - start[name]).flatten() for name in start])

    in_fp32 = change(1)
    for dtype, slack in SLACK.items():
        one, two = (change(processes, f"--amp-dtype {dtype}") for processes in (1, 2))
        assert (two - one).norm() < slack * one.norm()
        assert (one - in_fp32).norm() > 0.005 * one.norm()
