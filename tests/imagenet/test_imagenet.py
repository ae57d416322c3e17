"""What only ImageNet's recipes have: trees of JPEGs, decoders, accumulation, --evaluate, models."""

import os
import re
import runpy
import shutil
import signal
import sys

import numpy as np
import pytest
import torch
from forked import compute, refused
from launch import (
    TOLERANCE,
    Job,
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
from torchvision import transforms

from benchmarks import jpeg_tree
from cifar10 import cifar
from common.data import DataObject, EpochSampler, seed_of
from common.errors import InputError
from common.metrics import Sums

sys.path.append(str(ROOT / "imagenet"))  # as for its recipes, which lie beside these two
import jpegs
import networks

CPU = torch.device("cpu")
SINGLE = f"python {ROOT}/imagenet/single.py"
LOADERS = list(jpegs.LOADERS)


def training(folder, batch_size=4, size=224, decoder="pillow", workers=0, *, rank=0, world_size=1):
    """The images to train on, as `rank` of `world_size` reads them."""
    train_set, _ = jpegs.load(folder, None, 0, size, decoder)
    sampler = EpochSampler(len(train_set), batch_size, rank, world_size, seed=0)
    loader = jpegs.loader(train_set, sampler, batch_size, workers, CPU)
    return DataObject(train_set, sampler, loader)


def need_loader(name):
    if name == "nvimgcodec":
        try:
            from nvidia import nvimgcodec  # noqa: F401 - whether it is there
        except ImportError:
            need(False, "pip install nvidia-nvimgcodec-cu13[all]")


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """A tree like ImageNet's, with rare cases: grey, CMYK, progressive, upright, tiny, a PNG."""
    folder = tmp_path_factory.mktemp("photos")
    jpeg_tree.make(folder, images=20)
    picture = Image.open(folder / "train" / "class0" / "00000.JPEG")
    rare = folder / "train" / "class1"
    picture.convert("L").save(rare / "grey.JPEG")
    picture.convert("CMYK").save(rare / "cmyk.JPEG")
    picture.save(rare / "png.JPEG", "PNG")
    upright = picture.transpose(Image.Transpose.ROTATE_90)
    upright.save(rare / "upright.JPEG", quality=90, subsampling=0)
    picture.resize((40, 30)).save(rare / "tiny.JPEG")
    picture.save(rare / "progressive.JPEG", progressive=True)
    exif = Image.Exif()
    exif[0x0112] = 6  # "rotate by 90 degrees", which torchvision and our recipes ignore
    picture.save(rare / "turned.JPEG", exif=exif)
    for path in rare.glob("[a-z]*"):
        shutil.copy(path, folder / "val" / "class1")
    return folder


def assert_close(ours, usual):
    """uint8 `ours` and `usual` in 0..1 differ only by rounding in the resize.

    By 0.1 grey levels on average, and by two at most.
    """
    assert ours.dtype == torch.uint8
    difference = (ours.float() - 255 * torch.stack(list(usual))).abs()
    assert difference.max() < 2.001
    assert difference.mean() < 0.1


@pytest.mark.parametrize("loader", LOADERS)
def test_training_images_are_those_of_torchvision(loader, photos):
    """The same crops, mirrored or not, as its transforms draw with the same seed."""
    need_loader(loader)
    train = training(photos, decoder=loader)
    usual = transforms.Compose(
        [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
        ]
    )
    tree = jpegs.image_tree(photos)[0]
    for epoch in (0, 3):
        train.sampler.set_epoch(epoch)
        ours, labels = (torch.cat(parts) for parts in zip(*train.loader, strict=True))
        indices = list(train.sampler)
        assert len(ours) == len(indices) == len(tree) // 4 * 4
        expected = []
        for index, label in zip(indices, labels, strict=True):
            torch.manual_seed(seed_of(0, epoch, index))
            picture, its_label = tree[index]
            expected.append(usual(picture))
            assert label == its_label
        assert_close(ours, expected)


@pytest.mark.parametrize("size", [224, 96])
def test_validation_images_are_those_of_torchvision(size, photos):
    _, val_set = jpegs.load(photos, None, 0, size, "pillow")
    loader = jpegs.loader(val_set, range(len(val_set)), 4, 0, CPU)
    usual = transforms.Compose(
        [
            transforms.Resize(int(size * 256 / 224)),
            transforms.CenterCrop(size),
            transforms.ToTensor(),
        ]
    )
    ours, labels = (torch.cat(parts) for parts in zip(*loader, strict=True))
    tree = jpegs.image_tree(photos)[1]
    assert len(ours) == len(tree) == 11
    assert labels.tolist() == tree.targets
    assert_close(ours, [usual(picture) for picture, _ in tree])


def test_normalised_as_the_weights_of_torchvision_expect(photos):
    images, _ = next(iter(training(photos).loader))
    usual = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))(images / 255)
    torch.testing.assert_close(jpegs.normalise(images), usual, rtol=0, atol=1e-5)


def test_loaders_give_the_same_images(photos):
    """Bit by bit: decoding only the crop gives the same pixels as cropping the whole image."""
    need_loader("nvimgcodec")
    batches = [next(iter(training(photos, 27, decoder=name).loader)) for name in LOADERS]
    assert len(batches[0][0]) == 27
    assert all(torch.equal(one, other) for one, other in zip(*batches, strict=True))


def test_images_do_not_depend_on_processes_and_workers(photos):
    """The k-th batches of two ranks with workers are that of one process without; epochs differ."""
    one = training(photos, 8, 64)
    ranks = [training(photos, 4, 64, workers=2, rank=rank, world_size=2) for rank in range(2)]
    before, seen = torch.get_rng_state(), []
    for epoch in range(2):
        for train in (one, *ranks):
            train.sampler.set_epoch(epoch)
        of_ranks = [train.loader for train in ranks]
        for (whole, labels), *shares in zip(one.loader, *of_ranks, strict=True):
            images = torch.stack([share[0] for share in shares], dim=1).flatten(0, 1)
            assert torch.equal(images, whole)
            assert torch.equal(torch.stack([share[1] for share in shares], dim=1).flatten(), labels)
            seen.append(whole)
    assert len(seen) == 6
    assert not any(torch.equal(seen[0], later) for later in seen[1:])
    assert torch.equal(before, torch.get_rng_state()), "draws leave the global random state alone"


def cut(content):
    return content[: len(content) // 2]


def text(_):
    return b"no image"


def no_jpeg(content):
    return content[:2] + b"no JPEG" + content[-2:]


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("spoil", [cut, text, no_jpeg])
def test_corrupt_image(loader, workers, spoil, photos, tmp_path):
    """The error names the file, for each decoder, in a worker or not."""
    need_loader(loader)
    shutil.copytree(photos, tmp_path / "tree")
    path = tmp_path / "tree" / "train" / "class2" / "00002.JPEG"
    path.write_bytes(spoil(path.read_bytes()))
    train = training(tmp_path / "tree", 27, 32, loader, workers)
    with pytest.raises(InputError, match=re.escape(str(path))):
        list(train.loader)


def test_corrupt_image_ends_the_run(photos, tmp_path):
    shutil.copytree(photos, tmp_path / "tree")
    (tmp_path / "tree" / "train" / "class2" / "00002.JPEG").write_bytes(b"no image")
    flags = "--data-dir tree --arch lenet -b 27 --image-size 32 -j 1 --log-dir log"
    output = compute(f"{SINGLE} {flags}", tmp_path, status=2)
    assert "tree/train/class2/00002.JPEG cannot be decoded" in output.rstrip().splitlines()[-1]


@pytest.mark.parametrize("strategy", ["single", "ddp_launch"])
def test_ctrl_c_with_workers(strategy, photos, tmp_path):
    command = {"single": SINGLE, **strategies(2, ROOT / "imagenet")}[strategy]
    flags = f"--data-dir {photos} --arch lenet -b 4 --image-size 32 -j 2 --log-dir log"
    job = Job(f"exec {command} {flags}", cwd=tmp_path)
    job.wait_for("epoch 1/")
    job.signal(signal.SIGINT)
    assert job.finish() != 0
    of_a_rank = re.findall(r'File "[^"]*/(?:imagenet|common)/', job.output())
    assert not of_a_rank, "no rank prints a traceback"
    assert "leaked" not in job.output()


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
    sums = Sums(CPU, "loss", "correct", "correct5", "images")
    add_to(sums, torch.tensor(2.0), logits, labels)
    assert sums.total() == {"loss": 20, "correct": 1, "correct5": 5, "images": 10, "stop": 0}


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


@pytest.mark.parametrize("loader", LOADERS)
def test_resumes_within_an_epoch(loader, cifar_tree, tmp_path):
    """With workers and --accumulate, the rest of the epoch is that of a run never stopped."""
    need_loader(loader)
    flags = f"{CIFAR} -b 32 --lr 0.005 --accumulate 3 -j 1 --loader {loader}"
    command = f"{SINGLE} --data-dir {cifar_tree} {flags} --checkpoint-every 25"
    compute(f"{command} --log-dir whole", cwd=tmp_path)
    # the step before a checkpoint
    stop = (
        "            if position.samples == 2304:\n"
        "                __import__('signal').raise_signal(15)\n"
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
    assert f"batch {batch} per process x 4 accumulated, 32 global" in output
    parts = checkpoint(tmp_path / "log")
    assert largest_difference(parts["model"], expected["model"]) < TOLERANCE
    assert [result["step"] for result in evaluations(tmp_path / "log")] == [10, 20]


@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        "googlenet",
        "inception_v3",
        "vit_b_16",
        "mobilenet_v3_small",
        "squeezenet1_0",
        "densenet121",
        "convnext_tiny",
        "efficientnet_b0",
        "swin_t",
    ],
)
def test_any_model_of_torchvision(name):
    """Each family that is peculiar: auxiliary classifiers, or an image size that is part of it."""
    size = 96 if name == "inception_v3" else 64
    model = networks.build(name, size, classes=7)
    logits = model.train()(torch.randn(2, 3, size, size))
    assert logits.shape == (2, 7)
    logits.sum().backward()


def test_weight_decay_spares_batch_norm_and_biases():
    model = networks.build("resnet18", 64, classes=7)
    decayed, others = networks.decay_groups(model, 1e-4)
    assert (decayed["weight_decay"], others["weight_decay"]) == (1e-4, 0)
    spared = {id(p) for p in others["params"]}
    for name, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            expected = isinstance(module, torch.nn.BatchNorm2d) or kind == "bias"
            assert (id(parameter) in spared) == expected, f"{name}.{kind}"
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))


def test_replaced_batch_norm_computes_the_same():
    class Other(torch.nn.BatchNorm2d):
        pass

    model = networks.build("resnet18", 64, classes=7).eval()
    pictures = torch.randn(2, 3, 64, 64)
    before = model(pictures)
    assert networks.replace_batch_norm(model, Other) is model
    assert {type(m) for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)} == {Other}
    assert torch.equal(model.eval()(pictures), before)


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


def test_loader_without_its_package(photos, tmp_path):
    (tmp_path / "site" / "nvidia" / "nvimgcodec").mkdir(parents=True)
    (tmp_path / "site" / "nvidia" / "nvimgcodec" / "__init__.py").write_text(
        "raise ImportError('not here')"
    )
    (tmp_path / "site" / "nvidia" / "__init__.py").touch()
    command = f"{SINGLE} --data-dir {photos} --arch lenet -b 4 --loader nvimgcodec"
    shown = run(command, tmp_path, status=1, PYTHONPATH=str(tmp_path / "site"))
    assert "from nvidia import nvimgcodec" in shown
    assert "pip install" in shown, "the comment at the import"


def flat(tree):
    for path in list((tree / "val").glob("*/*")):
        os.replace(path, tree / "val" / f"{path.parent.name}-{path.name}")
    for path in (tree / "val").glob("class?"):
        path.rmdir()


def without(name):
    def spoil(tree):
        shutil.rmtree(tree / name)

    return spoil


def no_class(tree):
    for path in (tree / "val").glob("class?"):
        shutil.rmtree(path)


def empty_class(tree):
    for path in (tree / "train" / "class0").iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (flat, ["val", "valprep.sh"]),
        (without("val/class3"), ["val/class3", "train/class3"]),
        (without("train/class3"), ["train/class3", "val/class3"]),
        (without("val"), ["val", "--data-dir", "--synthetic"]),
        (no_class, ["val"]),
        (empty_class, ["train", "class0"]),
    ],
    ids=["flat", "a class of val", "a class of train", "val", "all classes", "an empty class"],
)
def test_wrong_tree(spoil, says, photos, tmp_path):
    shutil.copytree(photos, tmp_path / "tree")
    spoil(tmp_path / "tree")
    line = refused_here("imagenet/single.py --data-dir tree --arch lenet -b 4", tmp_path)
    for part in (f"tree/{says[0]}", *says[1:]):
        assert part in line


def test_benchmark_of_the_loaders(photos, tmp_path):
    need_loader("nvimgcodec")
    command = f"python {ROOT}/benchmarks/jpeg_loader.py --data-dir {photos} --repeats 1"
    lines = run(command, cwd=tmp_path).splitlines()
    assert [line.partition("  ")[0] for line in lines[1:]] == [
        "usual pipeline",
        "--loader pillow",
        "limit of pillow: decode the crop",
        "--loader nvimgcodec",
        "limit of nvimgcodec: decode the crop",
    ]
    assert all(
        re.search(r" \d+ images/s per core, \d+\.\d\d times the usual", line) for line in lines[1:]
    )


def test_a_large_tree_is_two_arrays(photos):
    """No Python object per image.

    Each worker would copy it, as reading it writes its reference count.
    """
    folder = jpegs.image_tree(photos)[0]
    tree = jpegs.TrainTree(folder, 32, "pillow")
    assert isinstance(tree.paths, np.ndarray) and tree.paths.dtype.kind == "S"
    assert isinstance(tree.labels, np.ndarray)
    assert [os.fsdecode(path) for path in tree.paths] == [path for path, _ in folder.samples]
