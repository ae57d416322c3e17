"""The same seed and global batch give the same training, whatever the strategy and the number of
processes.
"""

import json
import shutil

import pytest
import torch
from forked import compute
from launch import TOLERANCE, checkpoint, largest_difference, need, need_horovod, strategies
from recipes import ROOT, in_float64, small

from mnist import digits

GLOBAL_BATCH, LR = 32, 0.04
# Two epochs of ten steps, so that set_epoch counts; weight decay and momentum, as a recipe may
# lose either; LeNet has neither BatchNorm, whose statistics are each process's own, nor dropout.
TRAINING = (
    "--synthetic 320 --epochs 2 --model lenet --momentum 0.9 --wd 5e-4 --warmup-epochs 0 "
    "--device cpu"
)


def train(command, processes, folder, log_dir, dataset="mnist", flags=""):
    """The weights after 20 steps."""
    compute(
        f"{command} {TRAINING} {small(dataset)} {flags} --batch-size {GLOBAL_BATCH // processes} "
        f"--lr {LR / processes} --log-dir {log_dir}",
        cwd=folder,
    )  # --compile takes a minute
    return checkpoint(log_dir)["model"]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A function: (the folder of a data set's recipes, the weights of its single.py)."""
    done = {}

    def of(dataset):
        if dataset not in done:
            to = tmp_path_factory.mktemp("single")
            folder = in_float64(to, dataset)
            done[dataset] = folder, train(f"python {folder}/single.py", 1, to, to / "log", dataset)
        return done[dataset]

    return of


@pytest.mark.parametrize(
    "case",
    [
        "mnist dp 1",  # only to run its code: on the CPU it is the bare model, on one process
        *(f"mnist {name} 2" for name in strategies(1, "")),
        "mnist ddp_launch 4",
        "mnist hvd_gloo 4",
        # test_siblings.py shows that the others differ from these only in what is specific to a
        # data set
        "cifar10 ddp_spawn 2",
        "imagenet hvd_gloo 2",
        "mnist fsdp 4",
        "cifar10 fsdp 2",
        "cifar10 fsdp 4",
        "imagenet fsdp 2",
        "imagenet fsdp 4",
        # the flags for speed
        "cifar10 ddp_launch 2 --channels-last",
        "mnist hvd_gloo 2 --channels-last",
        "mnist ddp_spawn 2 --compile",
        "mnist fsdp 2 --channels-last",
        "mnist fsdp 2 --compile",
        "mnist fsdp 2 --no-reshard-after-forward",
    ],
)
def test_parity(case, single, tmp_path):
    dataset, name, processes, *more = case.split()
    if name.startswith("hvd"):
        need_horovod(name)
    folder, expected = single(dataset)
    command = {"dp": f"python {folder}/dp.py", **strategies(processes, folder)}[name]
    if "--compile" in more:
        need(shutil.which("g++"), "g++, which torch.compile needs on the CPU")
    weights = train(command, int(processes), tmp_path, tmp_path / "log", dataset, " ".join(more))
    assert largest_difference(weights, expected) < TOLERANCE


@pytest.mark.parametrize("strategy", ["ddp_launch", "hvd_gloo"])
def test_all_begin_with_the_weights_of_rank_0(strategy, single, tmp_path):
    """Whatever the others have made: the broadcast counts, and not that all have the same seed."""
    if strategy.startswith("hvd"):
        need_horovod(strategy)
    seed = "torch.manual_seed(args.seed)"
    name = f"{strategy.removesuffix('_gloo')}.py"
    rank = "hvd.rank()" if strategy.startswith("hvd") else "dist.get_rank()"
    another = f"torch.manual_seed(args.seed + {rank})"
    folder = in_float64(tmp_path, "mnist", name, seed, another)
    weights = train(strategies(2, folder)[strategy], 2, tmp_path, tmp_path / "log")
    assert largest_difference(weights, single("mnist")[1]) < TOLERANCE


def test_parity_of_resnet(tmp_path):
    """FSDP computes what DDP does, also for layers that are in no block.

    (One process computes something else: the statistics of BatchNorm are those of a process.)
    """
    folder, flags = in_float64(tmp_path, "cifar10"), "--model resnet18 --synthetic 60 --epochs 1"
    fsdp, ddp = (
        train(strategies(2, folder)[name], 2, tmp_path, tmp_path / name, "cifar10", flags)
        for name in ("fsdp", "ddp_launch")
    )
    assert largest_difference(fsdp, ddp) < TOLERANCE


# By how much the change of the weights in 20 steps may differ from another run's, relative to it.
# bf16 rounds to 8 bits and fp16 to 11. With two processes it is 0.07 and 0.02, and 1e-6 in fp32.
SLACK = {"bf16": 0.15, "fp16": 0.05}


@pytest.mark.parametrize("dtype", SLACK)
def test_horovod_in_16_bits(dtype, tmp_path):
    """Two processes do what one does, and that is not what fp32 does."""
    need_horovod("gloo")
    torch.manual_seed(0)
    start = digits.build("lenet").state_dict()
    changes = []
    for processes, flags in ((1, ""), (1, f"--amp-dtype {dtype}"), (2, f"--amp-dtype {dtype}")):
        log_dir = tmp_path / str(len(changes))
        command = strategies(processes, ROOT / "mnist")["hvd_gloo"]
        weights = train(command, processes, tmp_path, log_dir, flags=flags)
        changes.append(torch.cat([(weights[name] - start[name]).flatten() for name in start]))
    in_fp32, one, two = changes
    assert (two - one).norm() < SLACK[dtype] * one.norm()
    assert (one - in_fp32).norm() > 0.005 * one.norm()


# A rate too small to change any weight, so that all see the same model. 4,608 of the images to
# train on fill nine batches of one process, and three of three processes.
EVALUATION = "--synthetic 5005 --epochs 1 --model lenet --lr 1e-30 -b 512 --device cpu"


def figures(command, folder):
    """The loss and the accuracy of training and of validation."""
    compute(f"{command} {EVALUATION} --log-dir log", cwd=folder)
    lines = map(json.loads, (folder / "log" / "results.jsonl").read_text().splitlines())
    (evaluation,) = (line for line in lines if line["event"] == "evaluation")
    return [
        evaluation[f"{split}/{name}"] for split in ("train", "val") for name in ("loss", "accuracy")
    ]


@pytest.fixture(scope="module")
def exact(single, tmp_path_factory):
    folder, _ = single("mnist")
    return figures(f"python {folder}/single.py", tmp_path_factory.mktemp("exact"))


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_launch", "fsdp", "hvd_gloo"])
def test_exact_evaluation(strategy, single, exact, tmp_path):
    """1,001 images on 3 processes: the loss and the accuracy of one process, though 3 does not
    divide 1,001.
    """
    if strategy.startswith("hvd"):
        need_horovod(strategy)
    folder, _ = single("mnist")
    assert figures(strategies(3, folder)[strategy], tmp_path) == pytest.approx(
        exact, rel=1e-12, abs=0
    )
