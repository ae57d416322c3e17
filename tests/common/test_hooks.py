"""--comm-hook: how many bytes travel, and what training makes of them."""

import math
import pickle

import pytest
from forked import compute, refused
from launch import assert_same, checkpoint, largest_difference, strategies
from recipes import ROOT, STEP, changed_copy

# Write down the collectives up to this step (torch's flight recorder).
DUMP = (
    "            if position.steps in (11, 13):\n"
    "                recorder()\n"
    "                written = Path(args.log_dir, f'collectives-{rank}')\n"
    "                written.rename(f'{position.steps}-{rank}')\n"
)
SIZE = {"Float": 4, "BFloat16": 2, "Half": 2, "Double": 8, "Long": 8}


def all_reduced(path):
    """The bytes that all all-reduces in a file of collectives were given."""
    return sum(
        SIZE[kind] * math.prod(shape)
        for entry in pickle.loads(path.read_bytes())["entries"]
        if "all_reduce" in entry["profiling_name"]
        for shape, kind in zip(entry["input_sizes"], entry["input_dtypes"], strict=True)
    )


@pytest.mark.parametrize(
    ("hook", "megabytes"), [("none", 44.7), ("bf16", 22.3), ("fp16", 22.3), ("powersgd", 0.3)]
)
def test_bytes_of_a_step(hook, megabytes, tmp_path):
    """Of ResNet-18; PowerSGD with rank 2."""
    folder = changed_copy(tmp_path, "cifar10/ddp_launch.py", STEP, DUMP + STEP)
    compute(
        f"{strategies(2, folder)['ddp_launch']} --model resnet18 --synthetic 60 -b 2 --epochs 1 "
        "--device cpu "
        f"--log-interval 100 --comm-hook {hook} --log-dir log",
        cwd=tmp_path,
        TORCH_FR_BUFFER_SIZE="10000",
        CUDA_VISIBLE_DEVICES="",
    )
    for rank in (0, 1):
        sent = (all_reduced(tmp_path / f"13-{rank}") - all_reduced(tmp_path / f"11-{rank}")) / 2
        assert round(sent / 1e6, 1) == megabytes


def train(hook, folder, flags):
    folder.mkdir(exist_ok=True)
    compute(
        f"{strategies(2, ROOT / 'mnist')['ddp_launch']} --model lenet --epochs 3 --device cpu "
        f"--comm-hook {hook} "
        f"--log-dir {hook} {flags}",
        cwd=folder,
        CUDA_VISIBLE_DEVICES="",
    )
    return checkpoint(folder / hook)


def test_what_compression_changes(tmp_path):
    """16 bits round each gradient.

    PowerSGD changes nothing in the first ten steps, and then more, but learns.
    """
    short = {
        hook: train(hook, tmp_path / "short", "--synthetic 384")["model"]
        for hook in ("none", "bf16", "fp16", "powersgd")
    }
    assert_same(short["powersgd"], short["none"])
    for hook in ("bf16", "fp16"):
        assert 0 < largest_difference(short[hook], short["none"]) < 0.01
    none, powersgd = (
        train(hook, tmp_path / "long", "--synthetic 5000") for hook in ("none", "powersgd")
    )
    assert largest_difference(powersgd["model"], none["model"]) > 0
    assert powersgd["best"]["value"] > 0.95


@pytest.mark.parametrize(
    ("command", "cure"),
    [
        ("ddp_launch.py --compile", "leave out --compile"),
        ("ddp_amp.py --amp-dtype fp16", "use --amp-dtype bf16"),
    ],
)
def test_what_powersgd_refuses(command, cure, tmp_path):
    line = refused(
        f"torchrun --standalone --nproc-per-node=1 {ROOT}/mnist/{command} --synthetic --device cpu "
        "--comm-hook powersgd --log-dir log",
        tmp_path,
    )
    assert f"--comm-hook powersgd: {cure}" in line
