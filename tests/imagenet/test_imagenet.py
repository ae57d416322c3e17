"""What only ImageNet's recipes have: --evaluate, --accumulate, and their own flags."""

import argparse
import math
import runpy
import shutil

import pytest
import torch
import torch._inductor.config
from forked import compute
from launch import (
    TOLERANCE,
    assert_same,
    checkpoint,
    evaluations,
    largest_difference,
    need,
    need_horovod,
    refused_here,
    strategies,
)
from PIL import Image
from recipes import ROOT, in_float64, keep_checkpoints, small

from cifar10 import cifar
from common import devices
from common.errors import InputError
from common.metrics import Sums
from imagenet import networks


@pytest.fixture(scope="session")
def cifar_tree(real_data, tmp_path_factory):
    """A part of CIFAR-10 as an ImageNet tree: ten classes, 640 images, and 200 to validate."""
    folder = tmp_path_factory.mktemp("cifar")
    datasets = cifar.load(real_data("cifar10"), None, 0)
    for split, dataset, images in zip(("train", "val"), datasets, (64, 20), strict=True):
        pictures, labels = dataset.tensors
        for label in range(10):
            path = folder / split / f"class{label}"
            path.mkdir(parents=True)
            for number, picture in enumerate(pictures[labels == label][:images]):
                image = Image.fromarray(picture.permute(1, 2, 0).numpy())
                image.save(path / f"{number:05}.JPEG", quality=95)
    return folder


CIFAR = "--arch convnet --image-size 32 --device cpu -j 1"
TRAINING = "-b 32 --accumulate 3 --lr 0.02 --epochs 3 --warmup-epochs 0 --checkpoint-every 14"


@pytest.fixture(scope="session")
def learned(cifar_tree, tmp_path_factory):
    """Recipes in float64, and the log folder of a run on that tree, of 18 steps."""
    folder = tmp_path_factory.mktemp("learned")
    recipes = in_float64(folder, "imagenet")
    keep_checkpoints(recipes / "single.py")
    flags = f"--data-dir {cifar_tree} {CIFAR} {TRAINING} --log-dir log"
    compute(f"python {recipes}/single.py {flags}", cwd=folder)
    return recipes, folder / "log"


def figures(log):
    return evaluations(log)[-1]


def test_learns(learned):
    _, log = learned
    result = figures(log)
    assert result["val/loss"] < 0.95 * math.log(10), "less than by chance"
    assert result["step"] == 3 * (640 // 96), "what does not fill a step is left out"


def test_resumes_within_an_epoch(learned, cifar_tree, tmp_path):
    """With workers and --accumulate, the rest of the epoch is that of a run never stopped."""
    recipes, log = learned
    flags = f"--data-dir {cifar_tree} {CIFAR} {TRAINING} --resume {log}/14.pt --log-dir log"
    output = compute(f"python {recipes}/single.py {flags}", cwd=tmp_path)
    assert "at epoch 3, sample 192" in output
    whole, resumed = checkpoint(log), checkpoint(tmp_path / "log")
    for part in ("model", "optimizer", "position", "best"):
        assert_same(resumed[part], whole[part])
    expected, found = figures(log), figures(tmp_path / "log")
    # The sum of the losses is added in parts, and so may differ in its last bits.
    for name in [name for name in expected if name.startswith(("train/", "val/"))]:
        assert found[name] == pytest.approx(expected[name], rel=1e-12, abs=0)


@pytest.mark.parametrize("strategy", ["ddp_launch", "hvd_gloo"])
def test_evaluate(strategy, learned, cifar_tree, tmp_path):
    """Three processes find the loss, top-1 and top-5 of the checkpoint's epoch."""
    if strategy.startswith("hvd"):
        need_horovod(strategy)
    recipes, log = learned
    command = strategies(3, recipes)[strategy]
    flags = f"--data-dir {cifar_tree} {CIFAR} -b 32 --evaluate --resume {log}/last.pt"
    output = compute(f"{command} {flags}", cwd=tmp_path)
    result = {name: figures(log)[f"val/{name}"] for name in ("loss", "accuracy", "top5")}
    loss, accuracy, top5 = result.values()
    shown = f"loss {loss:.4g} acc {accuracy:.2%} top-5 {top5:.2%}"
    assert f"200 val images: {shown}\n" in output
    assert not list(tmp_path.iterdir()), "it writes no files"


def test_top_5():
    """The class of the k-th of ten images is in the k-th place: five are among the first five."""
    logits = -torch.arange(10.0).expand(10, 10)
    labels = torch.arange(10)
    recipe = runpy.run_path(str(ROOT / "imagenet" / "single.py"), run_name="recipe")
    sums = Sums(torch.device("cpu"), recipe["averages"])
    recipe["add_to"](sums, torch.tensor(2.0), logits, labels)
    assert sums.result() == {"loss": 2, "accuracy": 0.1, "top5": 0.5}


ACCUMULATED = (
    f"--synthetic 160 --epochs 2 --arch lenet {small('imagenet')} --wd 5e-4 --warmup-epochs 0 "
    "--device cpu --lr 0.04 --scale-lr none --log-dir log"
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Recipes in float64, and the checkpoint of a run with batches of 32: 5 steps per epoch."""
    folder = tmp_path_factory.mktemp("whole")
    recipes = in_float64(folder, "imagenet")
    compute(f"python {recipes}/single.py {ACCUMULATED} -b 32", cwd=folder)
    return recipes, checkpoint(folder / "log")


@pytest.mark.parametrize("strategy", ["single", "ddp_launch", "fsdp", "hvd_gloo"])
def test_accumulate(strategy, whole, tmp_path):
    """A global batch of 32 is 4 batches of 8, or 4 of 4 on each of two processes: as -b 32."""
    if strategy.startswith("hvd"):
        need_horovod(strategy)
    recipes, expected = whole
    command = {"single": f"python {recipes}/single.py", **strategies(2, recipes)}[strategy]
    compute(f"{command} {ACCUMULATED} --global-batch-size 32 --accumulate 4", cwd=tmp_path)
    parts = checkpoint(tmp_path / "log")
    assert largest_difference(parts["model"], expected["model"]) < TOLERANCE
    assert [result["step"] for result in evaluations(tmp_path / "log")] == [5, 10]


def test_compiled_and_channels_last(tmp_path, monkeypatch):
    """torch's kernels compute what its layers do. (test_parity.py has the rest of --compile.)"""
    need(shutil.which("g++"), "g++, which torch.compile needs on the CPU")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = networks.build("lenet", size=32, classes=10)
    images = torch.rand(4, 3, 32, 32)
    expected = model(images)
    devices.use_channels_last(model)
    devices.compile_model(model)
    # Else it starts processes that import torch.
    with torch._inductor.config.patch(compile_threads=1), torch.inference_mode():
        torch.testing.assert_close(model(images), expected)


@pytest.mark.parametrize(
    ("flags_of_it", "says"),
    [
        ("--arch vitb16", "did you mean vit_"),
        ("--image-size 31", "--image-size: 31"),
        ("--image-size 32 --arch inception_v3", "inception_v3 takes no images of 32x32"),
        ("--image-size 50 --arch vit_b_16", "vit_b_16 takes no images of 50x50"),
        ("--evaluate", "--init-from FILE"),
        ("--evaluate --resume auto --log-dir empty", "there is no checkpoint in empty"),
    ],
)
def test_wrong_flag(flags_of_it, says, tmp_path):
    command = f"imagenet/single.py --synthetic 320 --device cpu --arch lenet {flags_of_it}"
    assert says in refused_here(command, tmp_path)


def test_sync_bn_without_a_gpu():
    args = argparse.Namespace(evaluate=False, sync_bn=True)
    with pytest.raises(InputError, match="--sync-bn"):
        networks.check(args, torch.device("cpu"))
