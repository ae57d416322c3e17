"""What only the recipes of ImageNet have: trees of JPEGs and their decoders, --accumulate, --evaluate, any model."""

import json
import os
import re
import shutil
import signal
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SHARED
from forked import compute, refused
from launch import (
    TOLERANCE,
    Job,
    checkpoint,
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
from common import flags
from common.data import DataObject, EpochSampler

sys.path.append(str(ROOT / "imagenet"))  # as for its recipes, which lie beside these two
import jpegs
import networks

CPU = torch.device("cpu")
SINGLE = f"python {ROOT}/imagenet/single.py"
LOADERS = list(jpegs.LOADERS)


def arguments(*given):
    parser = flags.parser("", dataset="imagenet")
    jpegs.add_flags(parser)
    networks.add_flags(parser)
    return parser.parse_args(["--workers", "0", "-b", "4", *map(str, given)])


def training(*given, rank=0, world_size=1):
    """The images to train on, as `rank` of `world_size` reads them with these flags."""
    args = arguments(*given)
    train_set, _ = jpegs.imagenet(args)
    sampler = EpochSampler(len(train_set), args.batch_size, args.seed, rank, world_size)
    return DataObject(train_set, sampler, args.batch_size, CPU, args.workers)


def need_loader(name):
    if name == "nvimgcodec":
        try:
            from nvidia import nvimgcodec  # noqa: F401 - whether it is there
        except ImportError:
            need(False, "pip install nvidia-nvimgcodec-cu13[all]")


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """A tree like ImageNet's, with its rare cases as well: grey, CMYK, progressive, upright, tiny, a PNG."""
    folder = tmp_path_factory.mktemp("photos")
    jpeg_tree.make(folder, images=20)
    picture = Image.open(folder / "train" / "class0" / "00000.JPEG")
    rare = folder / "train" / "class1"
    picture.convert("L").save(rare / "grey.JPEG")
    picture.convert("CMYK").save(rare / "cmyk.JPEG")
    picture.save(rare / "png.JPEG", "PNG")
    picture.transpose(Image.Transpose.ROTATE_90).save(rare / "upright.JPEG", quality=90, subsampling=0)
    picture.resize((40, 30)).save(rare / "tiny.JPEG")
    picture.save(rare / "progressive.JPEG", progressive=True)
    exif = Image.Exif()
    exif[0x0112] = 6  # "rotate by 90 degrees", which torchvision and our recipes ignore
    picture.save(rare / "turned.JPEG", exif=exif)
    for path in rare.glob("[a-z]*"):
        shutil.copy(path, folder / "val" / "class1")
    return folder


def assert_close(ours, usual):
    """Normalised images differ only by rounding in the resize: by 0.1 grey levels on average, by two at most."""
    difference = (torch.stack(list(ours)) - torch.stack(list(usual))).abs()
    difference *= 255 * torch.tensor(jpegs.MEAN_STD[1]).view(3, 1, 1)
    assert difference.max() < 2.001
    assert difference.mean() < 0.1


@pytest.mark.parametrize("loader", LOADERS)
def test_training_images_are_those_of_torchvision(loader, photos):
    """The same crops, mirrored or not, as its transforms draw with the same seed, up to rounding in the resize."""
    need_loader(loader)
    train = training("--data-dir", photos, "--loader", loader)
    usual = transforms.Compose([transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(),
                                transforms.ToTensor(), transforms.Normalize(*jpegs.MEAN_STD)])
    tree = jpegs.image_tree(photos)[0]
    for epoch in (0, 3):
        train.sampler.set_epoch(epoch)
        ours, labels = (torch.cat(parts) for parts in zip(*train, strict=True))
        indices = train.indices().tolist()
        assert len(ours) == len(indices) == len(tree) // 4 * 4
        expected = []
        for index, label in zip(indices, labels, strict=True):
            torch.manual_seed(hash((0, epoch * len(tree) + index)))
            picture, its_label = tree[index]
            expected.append(usual(picture))
            assert label == its_label
        assert_close(ours, expected)


@pytest.mark.parametrize("size", [224, 96])
def test_validation_images_are_those_of_torchvision(size, photos):
    _, val_set = jpegs.imagenet(arguments("--data-dir", photos, "--image-size", size))
    val = DataObject(val_set, range(len(val_set)), 4, CPU)
    usual = transforms.Compose([transforms.Resize(int(size * 256 / 224)), transforms.CenterCrop(size),
                                transforms.ToTensor(), transforms.Normalize(*jpegs.MEAN_STD)])
    ours, labels = (torch.cat(parts) for parts in zip(*val, strict=True))
    tree = jpegs.image_tree(photos)[1]
    assert len(ours) == len(tree) == 11
    assert labels.tolist() == tree.targets
    assert_close(ours, [usual(picture) for picture, _ in tree])


def test_loaders_give_the_same_images(photos):
    """Bit by bit: decoding only the crop gives the same pixels as cropping the whole image."""
    need_loader("nvimgcodec")
    batches = [next(iter(training("--data-dir", photos, "-b", 27, "--loader", name))) for name in LOADERS]
    assert len(batches[0][0]) == 27
    assert all(torch.equal(one, other) for one, other in zip(*batches, strict=True))


def test_images_do_not_depend_on_processes_and_workers(photos):
    """The k-th batches of two ranks, with workers, are the k-th batch of one process without; epochs differ."""
    one = training("--data-dir", photos, "-b", 8, "--image-size", 64)
    ranks = [training("--data-dir", photos, "--image-size", 64, "-j", 2, rank=rank, world_size=2) for rank in range(2)]
    before, seen = torch.get_rng_state(), []
    for epoch in range(2):
        for train in (one, *ranks):
            train.sampler.set_epoch(epoch)
        for (whole, labels), *shares in zip(one, *ranks, strict=True):
            assert torch.equal(torch.stack([share[0] for share in shares], dim=1).flatten(0, 1), whole)
            assert torch.equal(torch.stack([share[1] for share in shares], dim=1).flatten(), labels)
            seen.append(whole)
    assert not any(torch.equal(seen[0], later) for later in seen[1:])
    assert torch.equal(before, torch.get_rng_state()), "draws leave the global random state alone"


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("spoil", [lambda content: content[:len(content) // 2], lambda content: b"no image",
                                   lambda content: content[:2] + b"no JPEG" + content[-2:]],
                         ids=["cut", "text", "no JPEG"])
def test_corrupt_image(loader, workers, spoil, photos, tmp_path):
    """The error names the file, for each decoder, in a worker or not."""
    need_loader(loader)
    shutil.copytree(photos, tmp_path / "tree")
    path = tmp_path / "tree" / "train" / "class2" / "00002.JPEG"
    path.write_bytes(spoil(path.read_bytes()))
    train = training("--data-dir", tmp_path / "tree", "-b", 27, "--image-size", 32, "-j", workers, "--loader", loader)
    with pytest.raises(jpegs.BrokenImage, match=re.escape(str(path))):
        list(train)


def test_corrupt_image_ends_the_run(photos, tmp_path):
    shutil.copytree(photos, tmp_path / "tree")
    (tmp_path / "tree" / "train" / "class2" / "00002.JPEG").write_bytes(b"no image")
    output = compute(f"{SINGLE} --data-dir tree --arch lenet -b 27 --image-size 32 -j 1 --log-dir log", tmp_path,
                     status=1)
    assert "tree/train/class2/00002.JPEG is not an image" in output.rstrip().splitlines()[-1]


@pytest.mark.parametrize("strategy", ["single", "ddp_launch"])
def test_ctrl_c_with_workers(strategy, photos, tmp_path):
    command = {"single": SINGLE, **strategies(2, ROOT / "imagenet")}[strategy]
    job = Job(f"exec {command} --data-dir {photos} --arch lenet -b 4 --image-size 32 -j 2 --log-dir log", cwd=tmp_path)
    job.wait_for("epoch 1/")
    job.signal(signal.SIGINT)
    assert job.finish(timeout=30) != 0
    assert not re.findall(r'File "[^"]*/(?:imagenet|common)/', job.output()), "no rank prints a traceback"
    assert "leaked" not in job.output()


@pytest.fixture(scope="session")
def cifar_tree(tmp_path_factory):
    """A part of CIFAR-10 as an ImageNet tree: 4,000 images in ten classes to train on, and 1,000 to validate."""
    archive = SHARED / "cifar10-jpeg.tar.xz"
    need(archive.exists(), f"{archive}: the real images")
    folder, left = tmp_path_factory.mktemp("cifar"), {}
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile():
                split, label, name = Path(member.name).parts[-3:]
                left.setdefault((split, label), {"train": 400, "test": 100}[split])
                if left[split, label]:
                    left[split, label] -= 1
                    path = folder / split.replace("test", "val") / label / Path(name).with_suffix(".JPEG")
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(tar.extractfile(member).read())
    return folder


CIFAR = "--arch convnet --image-size 32 --device cpu --epochs 1 --warmup-epochs 0 --label-smoothing 0"


@pytest.fixture(scope="session")
def learned(cifar_tree, tmp_path_factory):
    """The log folder of an epoch of single.py on that tree."""
    folder = tmp_path_factory.mktemp("learned")
    compute(f"{SINGLE} --data-dir {cifar_tree} {CIFAR} -b 32 --lr 0.005 -j 1 --log-dir log", cwd=folder)
    return folder / "log"


def figures(log):
    epoch, = json.loads((log / "results.json").read_text())["epochs"]
    return epoch["val"]


def test_learns(learned):
    val = figures(learned)
    assert val["images"] == 1000
    assert val["accuracy"] > 0.25, "chance is 0.1"
    assert val["top5"] > 0.7, "chance is 0.5"


def test_learns_on_two_processes(learned, cifar_tree, tmp_path):
    """As well as on one, up to the noise of 1,000 images and of BatchNorm over half the batch."""
    compute(f"{strategies(2, ROOT / 'imagenet')['ddp_launch']} --data-dir {cifar_tree} {CIFAR} -b 16 --lr 0.0025 -j 1 "
            "--log-dir log", cwd=tmp_path)
    val = figures(tmp_path / "log")
    assert val["images"] == 1000
    assert val["accuracy"] == pytest.approx(figures(learned)["accuracy"], abs=0.06)
    assert val["top5"] == pytest.approx(figures(learned)["top5"], abs=0.06)


@pytest.mark.parametrize("strategy", ["single", "ddp_launch", "hvd_gloo"])
def test_evaluate(strategy, learned, cifar_tree, tmp_path):
    """--evaluate finds the top-1 and top-5 of the epoch that the checkpoint is from, on three processes as well."""
    if strategy.startswith("hvd"):
        need_horovod(strategy)
    command = {"single": SINGLE, **strategies(3, ROOT / "imagenet")}[strategy]
    output = compute(f"{command} --data-dir {cifar_tree} --arch convnet --image-size 32 --device cpu -j 1 "
                 f"--evaluate --resume {learned}/last.pt", cwd=tmp_path)
    val = figures(learned)
    assert f"1,000 val images: loss {val['loss']:.4f} acc {val['accuracy']:.2%} top-5 {val['top5']:.2%} | " \
        in output
    assert not list(tmp_path.iterdir()), "it writes no files"


@pytest.mark.parametrize("loader", LOADERS)
def test_resumes_within_an_epoch(loader, cifar_tree, tmp_path):
    """With workers and --accumulate, the rest of the epoch is that of a run that was never stopped."""
    need_loader(loader)
    command = (f"{SINGLE} --data-dir {cifar_tree} {CIFAR} -b 32 --lr 0.005 --accumulate 3 -j 1 --loader {loader} "
               "--checkpoint-every 25")
    compute(f"{command} --log-dir whole", cwd=tmp_path)
    stop = "        if run.samples == 2304: __import__('signal').raise_signal(15)\n"  # the step before a checkpoint
    copy = changed_copy(tmp_path, "imagenet/single.py", STEP, STEP + stop)
    compute(f"{command.replace(SINGLE, f'python {copy}/single.py')} --log-dir part", cwd=tmp_path)
    assert "at epoch 1, sample 2400" in compute(f"{command} --log-dir part --resume auto", cwd=tmp_path)
    whole, part = checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "part")
    for name in ("model", "optimizer"):
        torch.testing.assert_close(part[name], whole[name], rtol=0, atol=0)
    for name in ("loss", "accuracy", "top5", "images"):
        assert whole["history"][0]["train"][name] == part["history"][0]["train"][name]
    assert whole["history"][0]["train"]["images"] == 41 * 96, "what does not fill a step is left out"


ACCUMULATED = (f"--synthetic 340 --epochs 2 --arch lenet {small('imagenet')} --wd 5e-4 --warmup-epochs 0 --device cpu "
               "--lr 0.04 --scale-lr none --log-dir log")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of recipes in float64, and the checkpoint of a run with batches of 32: 10 steps per epoch."""
    folder = tmp_path_factory.mktemp("whole")
    recipes = in_float64(folder, "imagenet")
    compute(f"python {recipes}/single.py {ACCUMULATED} -b 32", cwd=folder)
    return recipes, checkpoint(folder / "log")


@pytest.mark.parametrize("strategy", ["single", *strategies(1, "")])
def test_accumulate(strategy, whole, tmp_path):
    """A global batch of 32 trains like -b 32 if it is 4 batches of 8, or 4 of 4 on each of two processes."""
    if strategy.startswith("hvd"):
        need_horovod(strategy)
    recipes, expected = whole
    command = {"single": f"python {recipes}/single.py", **strategies(2, recipes)}[strategy]
    output = compute(f"{command} {ACCUMULATED} --global-batch-size 32 --accumulate 4", cwd=tmp_path)
    assert f"batch {8 if strategy == 'single' else 4} per process x 4 accumulated, 32 global" in output
    parts = checkpoint(tmp_path / "log")
    assert largest_difference(parts["model"], expected["model"]) < TOLERANCE
    assert [epoch["train"]["images"] for epoch in parts["history"]] == [320, 320]


@pytest.mark.parametrize("name", ["resnet18", "googlenet", "inception_v3", "vit_b_16", "mobilenet_v3_small",
                                  "squeezenet1_0", "densenet121", "convnext_tiny", "efficientnet_b0", "swin_t"])
def test_any_model_of_torchvision(name):
    """One model of each family that has peculiarities: auxiliary classifiers, or an image size that is part of it."""
    size = 96 if name == "inception_v3" else 64
    model = networks.build(arguments("--image-size", size, "--arch", name), CPU, classes=7)
    logits = model.train()(torch.randn(2, 3, size, size))
    assert logits.shape == (2, 7)
    logits.sum().backward()


def test_weight_decay_spares_batch_norm_and_biases():
    model = networks.build(arguments("--image-size", 64, "--arch", "resnet18"), CPU, classes=7)
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

    model = networks.build(arguments("--image-size", 64, "--arch", "resnet18"), CPU, classes=7).eval()
    pictures = torch.randn(2, 3, 64, 64)
    before = model(pictures)
    assert networks.replace_batch_norm(model, Other) is model
    assert {type(m) for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)} == {Other}
    assert torch.equal(model.eval()(pictures), before)


def test_compiled_and_channels_last(tmp_path):
    """A run with both can resume without them, as the checkpoint has the usual names; the loss is the same."""
    need(shutil.which("g++"), "g++, which torch.compile needs on the CPU")
    command = (f"{SINGLE} --synthetic 256 --arch convnet --image-size 32 -b 64 --lr 0.005 --epochs 2 --device cpu "
               "--warmup-epochs 0")
    compute(f"{command} --log-dir plain", cwd=tmp_path)
    run(f"{command} --channels-last --compile --log-dir fast", cwd=tmp_path)
    plain, fast = checkpoint(tmp_path / "plain"), checkpoint(tmp_path / "fast")
    assert plain["history"][0]["train"]["loss"] == pytest.approx(fast["history"][0]["train"]["loss"], rel=1e-3)
    assert "resumed from" in compute(f"{command} --resume fast/previous.pt --log-dir on", cwd=tmp_path)


def test_horovod_with_channels_last(tmp_path):
    """Two processes get the images in another memory order, and train the same."""
    need_horovod("gloo")
    command = (f"{strategies(2, ROOT / 'imagenet')['hvd_gloo']} --synthetic 128 --arch convnet --image-size 32 -b 16 "
               "--lr 0.005 --epochs 1 --device cpu")
    compute(f"{command} --log-dir plain", cwd=tmp_path)
    compute(f"{command} --channels-last --log-dir last", cwd=tmp_path)
    plain, last = checkpoint(tmp_path / "plain"), checkpoint(tmp_path / "last")
    assert plain["history"][0]["train"]["loss"] == pytest.approx(last["history"][0]["train"]["loss"], rel=1e-3)


@pytest.mark.parametrize(("flags_of_it", "says"), [
    ("--arch vitb16", "did you mean vit_"),
    ("--image-size 31", "--image-size: 31"),
    ("--image-size 32 --arch inception_v3", "inception_v3 takes no images of 32x32"),
    ("--image-size 50 --arch vit_b_16", "vit_b_16 takes no images of 50x50"),
    ("--label-smoothing 2", "--label-smoothing: 2"),
    ("--accumulate 0", "--accumulate: 0"),
    ("--loader libjpeg", "pillow"),
    ("--evaluate", "--resume"),
])
def test_wrong_flag(flags_of_it, says, tmp_path):
    assert says in refused_here(f"imagenet/single.py --synthetic 320 --device cpu --arch lenet {flags_of_it}", tmp_path)


def test_sync_bn_without_a_gpu(tmp_path):
    assert "--sync-bn" in refused(f"python {ROOT}/imagenet/ddp_spawn.py -g 2 --synthetic 320 -b 32 --device cpu "
                                  "--sync-bn", tmp_path)


def test_loader_without_its_package(photos, tmp_path):
    (tmp_path / "site" / "nvidia" / "nvimgcodec").mkdir(parents=True)
    (tmp_path / "site" / "nvidia" / "nvimgcodec" / "__init__.py").write_text("raise ImportError('not here')")
    (tmp_path / "site" / "nvidia" / "__init__.py").touch()
    shown = run(f"{SINGLE} --data-dir {photos} --arch lenet -b 4 --loader nvimgcodec", tmp_path, status=1,
                PYTHONPATH=str(tmp_path / "site"))
    assert "from nvidia import nvimgcodec" in shown
    assert "pip install" in shown, "the comment at the import"


def flat(tree):
    for path in list((tree / "val").glob("*/*")):
        os.replace(path, tree / "val" / f"{path.parent.name}-{path.name}")
    for path in (tree / "val").glob("class?"):
        path.rmdir()


def no_class(tree, split):
    for path in (tree / split).glob("class?"):
        shutil.rmtree(path)


@pytest.mark.parametrize(("spoil", "says"), [
    (flat, ["val", "valprep.sh"]),
    (lambda tree: shutil.rmtree(tree / "val" / "class3"), ["val/class3", "train/class3"]),
    (lambda tree: shutil.rmtree(tree / "train" / "class3"), ["train/class3", "val/class3"]),
    (lambda tree: shutil.rmtree(tree / "val"), ["val", "--data-dir", "--synthetic"]),
    (lambda tree: no_class(tree, "val"), ["val"]),
    (lambda tree: [path.unlink() for path in (tree / "train" / "class0").iterdir()], ["train", "class0"]),
], ids=["flat", "a class of val", "a class of train", "val", "all classes", "an empty class"])
def test_wrong_tree(spoil, says, photos, tmp_path):
    shutil.copytree(photos, tmp_path / "tree")
    spoil(tmp_path / "tree")
    line = refused_here("imagenet/single.py --data-dir tree --arch lenet -b 4", tmp_path)
    for part in (f"tree/{says[0]}", *says[1:]):
        assert part in line


def test_benchmark_of_the_loaders(photos, tmp_path):
    need_loader("nvimgcodec")
    lines = run(f"python {ROOT}/benchmarks/jpeg_loader.py --data-dir {photos} --repeats 1", cwd=tmp_path).splitlines()
    assert [line.partition("  ")[0] for line in lines[1:]] == [
        "usual pipeline", "--loader pillow", "limit of pillow: decode the crop", "--loader nvimgcodec",
        "limit of nvimgcodec: decode the crop"]
    assert all(re.search(r" \d+ images/s per core, \d+\.\d\d times the usual", line) for line in lines[1:])


def test_a_large_tree_is_two_arrays(photos):
    """No Python object per image: each worker would copy it, as reading it writes its reference count."""
    tree = jpegs.TrainTree(jpegs.image_tree(photos)[0], 32, "pillow")
    assert isinstance(tree.paths, np.ndarray) and tree.paths.dtype.kind == "S"
    assert [os.fsdecode(path) for path in tree.paths] == [path for path, _ in jpegs.image_tree(photos)[0].samples]
