"""What only ImageNet's recipes have: --evaluate, --accumulate, --channels-last, --compile."""

import runpy
import shutil

import pytest
import torch
from forked import compute, refused
from launch import (
    TOLERANCE,
    assert_same,
    checkpoint,
    evaluations,
    largest_difference,
    need,
    need_horovod,
    refused_here,
    run,
    strategies,
)
from PIL import Image
from recipes import ROOT, STEP, changed_copy, in_float64, small

from cifar10 import cifar
from common.metrics import Sums

SINGLE = f"python {ROOT}/imagenet/single.py"


@pytest.fixture(scope="session")
def cifar_tree(real_data, tmp_path_factory):
    """A part of CIFAR-10 as an ImageNet tree: ten classes, 4,000 images, and 1,000 to validate."""
    folder = tmp_path_factory.mktemp("cifar")
    datasets = cifar.load(real_data("cifar10"), None, 0)
    for split, dataset, images in zip(("train", "val"), datasets, (400, 100), strict=True):
        pictures, labels = dataset.tensors
        for label in range(10):
            path = folder / split / f"class{label}"
            path.mkdir(parents=True)
            for number, picture in enumerate(pictures[labels == label][:images]):
                image = Image.fromarray(picture.permute(1, 2, 0).numpy())
                image.save(path / f"{number:05}.JPEG", quality=95)
    return folder


CIFAR = (
    "--arch convnet --image-size 32 --device cpu --epochs 1 --warmup-epochs 0 --label-smoothing 0"
)


@pytest.fixture(scope="session")
def learned(cifar_tree, tmp_path_factory):
    """The log folder of an epoch of single.py on that tree."""
    folder = tmp_path_factory.mktemp("learned")
    flags = f"{CIFAR} -b 32 --lr 0.005 -j 1 --log-dir log"
    compute(f"{SINGLE} --data-dir {cifar_tree} {flags}", cwd=folder)
    return folder / "log"


def figures(log):
    (result,) = evaluations(log)
    return result


def test_learns(learned):
    result = figures(learned)
    assert result["val/accuracy"] > 0.25, "chance is 0.1"
    assert result["val/top5"] > 0.7, "chance is 0.5"


def test_learns_on_two_processes(learned, cifar_tree, tmp_path):
    """As well as on one, up to the noise of 1,000 images and of BatchNorm over half the batch."""
    command = strategies(2, ROOT / "imagenet")["ddp_launch"]
    flags = f"{CIFAR} -b 16 --lr 0.0025 -j 1 --log-dir log"
    compute(f"{command} --data-dir {cifar_tree} {flags}", cwd=tmp_path)
    result, of_one = figures(tmp_path / "log"), figures(learned)
    for name in ("val/accuracy", "val/top5"):
        assert result[name] == pytest.approx(of_one[name], abs=0.06)


def test_top_5():
    """The class of the k-th of ten images is in the k-th place: five are among the first five."""
    logits = -torch.arange(10.0).expand(10, 10)
    labels = torch.arange(10)
    add_to = runpy.run_path(str(ROOT / "imagenet" / "single.py"), run_name="recipe")["add_to"]
    sums = Sums(torch.device("cpu"), "loss", "correct", "correct5", "images")
    add_to(sums, torch.tensor(2.0), logits, labels)
    assert sums.total() == {"loss": 20, "correct": 1, "correct5": 5, "images": 0}


@pytest.mark.parametrize("strategy", ["single", "ddp_launch", "hvd_gloo"])
def test_evaluate(strategy, learned, cifar_tree, tmp_path):
    """It finds the top-1 and top-5 of the checkpoint's epoch, on three processes as well."""
    if strategy.startswith("hvd"):
        need_horovod(strategy)
    command = {"single": SINGLE, **strategies(3, ROOT / "imagenet")}[strategy]
    flags = "--arch convnet --image-size 32 --device cpu -j 1"
    output = compute(
        f"{command} --data-dir {cifar_tree} {flags} --evaluate --resume {learned}/last.pt",
        cwd=tmp_path,
    )
    loss, *accuracies = (figures(learned)[f"val/{name}"] for name in ("loss", "accuracy", "top5"))
    top1, top5 = (f"{accuracy:.2%}" for accuracy in accuracies)
    assert f"1,000 val images: loss {loss:.4f} acc {top1} top-5 {top5}\n" in output
    assert not list(tmp_path.iterdir()), "it writes no files"


def test_resumes_within_an_epoch(loader, cifar_tree, tmp_path):
    """With workers and --accumulate, the rest of the epoch is that of a run never stopped."""
    flags = f"{CIFAR} -b 32 --lr 0.005 --accumulate 3 -j 1 --loader {loader}"
    command = f"{SINGLE} --data-dir {cifar_tree} {flags} --checkpoint-every 25"
    compute(f"{command} --log-dir whole", cwd=tmp_path)
    # the step before a checkpoint
    stop = (
        "        if position.samples == 2304:\n            __import__('signal').raise_signal(15)\n"
    )
    copy = changed_copy(tmp_path, "imagenet/single.py", STEP, stop + STEP)
    compute(f"{command.replace(SINGLE, f'python {copy}/single.py')} --log-dir part", cwd=tmp_path)
    resumed = compute(f"{command} --log-dir part --resume auto", cwd=tmp_path)
    assert "at epoch 1, sample 2400" in resumed
    whole, part = checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "part")
    for name in ("model", "optimizer", "position", "best"):
        assert_same(part[name], whole[name])
    one, other = figures(tmp_path / "whole"), figures(tmp_path / "part")
    for name in one:
        assert one[name] == other[name] or name.startswith("perf/")
    assert one["step"] == 4000 // 96, "what does not fill a step is left out"


ACCUMULATED = (
    f"--synthetic 340 --epochs 2 --arch lenet {small('imagenet')} --wd 5e-4 --warmup-epochs 0 "
    "--device cpu --lr 0.04 --scale-lr none --log-dir log"
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Recipes in float64, and the checkpoint of a run with batches of 32: 10 steps per epoch."""
    folder = tmp_path_factory.mktemp("whole")
    recipes = in_float64(folder, "imagenet")
    compute(f"python {recipes}/single.py {ACCUMULATED} -b 32", cwd=folder)
    return recipes, checkpoint(folder / "log")


@pytest.mark.parametrize("strategy", ["single", *strategies(1, "")])
def test_accumulate(strategy, whole, tmp_path):
    """A global batch of 32 is 4 batches of 8, or 4 of 4 on each of two processes: as -b 32."""
    if strategy.startswith("hvd"):
        need_horovod(strategy)
    recipes, expected = whole
    command = {"single": f"python {recipes}/single.py", **strategies(2, recipes)}[strategy]
    output = compute(f"{command} {ACCUMULATED} --global-batch-size 32 --accumulate 4", cwd=tmp_path)
    batch = 8 if strategy == "single" else 4
    assert f"each step accumulates 4 batches of {batch} per process\n" in output
    parts = checkpoint(tmp_path / "log")
    assert largest_difference(parts["model"], expected["model"]) < TOLERANCE
    assert [result["step"] for result in evaluations(tmp_path / "log")] == [10, 20]


def test_compiled_and_channels_last(tmp_path):
    """The loss is the same, and a run can resume without them: a checkpoint has the usual names."""
    need(shutil.which("g++"), "g++, which torch.compile needs on the CPU")
    flags = "--arch convnet --image-size 32 -b 64 --lr 0.005 --epochs 2 --device cpu"
    command = f"{SINGLE} --synthetic 256 {flags} --warmup-epochs 0"
    compute(f"{command} --log-dir plain", cwd=tmp_path)
    run(f"{command} --channels-last --compile --log-dir fast", cwd=tmp_path)
    plain, fast = (evaluations(tmp_path / name)[0]["train/loss"] for name in ("plain", "fast"))
    assert plain == pytest.approx(fast, rel=1e-3)
    resumed = compute(f"{command} --resume fast/previous.pt --log-dir on", cwd=tmp_path)
    assert "resumed from" in resumed


def test_horovod_with_channels_last(tmp_path):
    """Two processes get the images in another memory order, and train the same."""
    need_horovod("gloo")
    command = strategies(2, ROOT / "imagenet")["hvd_gloo"]
    flags = "--arch convnet --image-size 32 -b 16 --lr 0.005 --epochs 1 --device cpu"
    command = f"{command} --synthetic 128 {flags}"
    compute(f"{command} --log-dir plain", cwd=tmp_path)
    compute(f"{command} --channels-last --log-dir last", cwd=tmp_path)
    plain, last = (figures(tmp_path / name)["train/loss"] for name in ("plain", "last"))
    assert plain == pytest.approx(last, rel=1e-3)


@pytest.mark.parametrize(
    ("flags_of_it", "says"),
    [
        ("--arch vitb16", "did you mean vit_"),
        ("--image-size 31", "--image-size: 31"),
        ("--image-size 32 --arch inception_v3", "inception_v3 takes no images of 32x32"),
        ("--image-size 50 --arch vit_b_16", "vit_b_16 takes no images of 50x50"),
        ("--label-smoothing 2", "--label-smoothing: 2"),
        ("--accumulate 0", "--accumulate: 0"),
        ("--loader libjpeg", "pillow"),
        ("--evaluate", "--resume"),
    ],
)
def test_wrong_flag(flags_of_it, says, tmp_path):
    command = f"imagenet/single.py --synthetic 320 --device cpu --arch lenet {flags_of_it}"
    assert says in refused_here(command, tmp_path)


def test_sync_bn_without_a_gpu(tmp_path):
    command = f"python {ROOT}/imagenet/ddp_spawn.py -g 2 --synthetic 320 -b 32 --device cpu"
    assert "--sync-bn" in refused(f"{command} --sync-bn", tmp_path)
