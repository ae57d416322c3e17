"""What only the recipes of ImageNet have: trees of JPEGs and what decodes them, --accumulate, --evaluate, any model."""

import json
import os
import re
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SHARED
from launch import ROOT, checkpoint, largest_difference, need, need_horovod, run, small, strategies
from PIL import Image
from test_input import refused
from test_resume import assert_same
from torchvision import transforms

from benchmarks import jpeg_tree
from common import data, files, flags, jpegs, models

CPU = torch.device("cpu")
SINGLE = f"python {ROOT}/imagenet/single.py"
LOADERS = list(jpegs.LOADERS)


def arguments(*given):
    parser = flags.parser("", "imagenet", ("lenet",), 1, 4, 0.1, 0)
    flags.add_imagenet(parser)
    return parser.parse_args(["--workers", "0", *map(str, given)])


def need_loader(name):
    if name == "nvimgcodec":
        try:
            from nvidia import nvimgcodec  # noqa: F401 - whether it is there
        except ImportError:
            need(False, jpegs.NVIMGCODEC)


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """A tree like ImageNet's, with what is rare in it as well: grey, CMYK, progressive, upright, tiny, a PNG."""
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
    exif[0x0112] = 6  # to be shown turned by a quarter, which neither torchvision nor ImageNet's recipes do
    picture.save(rare / "turned.JPEG", exif=exif)
    for path in rare.glob("[a-z]*"):
        shutil.copy(path, folder / "val" / "class1")
    return folder


def assert_close(ours, usual):
    """Normalised images are as near as rounding in the resize leaves them: 0.1 grey levels on average, two at most."""
    difference = (torch.stack(list(ours)) - torch.stack(list(usual))).abs()
    difference *= 255 * torch.tensor(data.IMAGENET_MEAN_STD[1]).view(3, 1, 1)
    assert difference.max() < 2.001
    assert difference.mean() < 0.1


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("flag", ["--seed=0", "--channels-last"])
def test_training_images_are_those_of_torchvision(loader, flag, photos):
    """The same crops, mirrored or not, as its transforms draw with the same seed, up to rounding in the resize."""
    need_loader(loader)
    train, _ = data.imagenet(arguments("--data-dir", photos, "--loader", loader, flag), CPU)
    usual = transforms.Compose([transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(),
                                transforms.ToTensor(), transforms.Normalize(*data.IMAGENET_MEAN_STD)])
    tree = files.image_tree(photos)[0]
    for epoch in (0, 3):
        train.sampler.set_epoch(epoch)
        places = list(train.sampler)
        ours, labels = (torch.cat(parts) for parts in zip(*train, strict=True))
        assert len(ours) == len(places) // 4 * 4
        expected = []
        for place, label in zip(places, labels, strict=False):
            torch.manual_seed(hash((0, place)) % 2**32)
            picture, its_label = tree[place % len(tree)]
            expected.append(usual(picture))
            assert label == its_label
        assert_close(ours, expected)
    batch = next(iter(train))[0]
    assert batch.is_contiguous(memory_format=torch.channels_last if "last" in flag else torch.contiguous_format)


@pytest.mark.parametrize("size", [224, 96])
def test_validation_images_are_those_of_torchvision(size, photos):
    _, val = data.imagenet(arguments("--data-dir", photos, "--image-size", size), CPU)
    usual = transforms.Compose([transforms.Resize(int(size * 256 / 224)), transforms.CenterCrop(size),
                                transforms.ToTensor(), transforms.Normalize(*data.IMAGENET_MEAN_STD)])
    ours, labels = (torch.cat(parts) for parts in zip(*val, strict=True))
    tree = files.image_tree(photos)[1]
    assert len(ours) == len(tree) == 11
    assert labels.tolist() == tree.targets
    assert_close(ours, [usual(picture) for picture, _ in tree])


def test_loaders_give_the_same_images(photos):
    """Bit by bit; what is decoded in part is what is cut out of the whole."""
    need_loader("nvimgcodec")
    batches = [next(iter(data.imagenet(arguments("--data-dir", photos, "-b", 27, "--loader", name), CPU)[0]))
               for name in LOADERS]
    assert len(batches[0][0]) == 27
    assert all(torch.equal(one, other) for one, other in zip(*batches, strict=True))


def test_images_do_not_depend_on_processes_and_workers(photos):
    """The k-th batches of two ranks, with workers, are the k-th batch of one process without; epochs differ."""
    one, _ = data.imagenet(arguments("--data-dir", photos, "-b", 8, "--image-size", 64), CPU)
    ranks = [data.imagenet(arguments("--data-dir", photos, "-b", 4, "--image-size", 64, "-j", 2), CPU, rank, 2)[0]
             for rank in range(2)]
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
    """One line names it, whatever decodes it and where."""
    need_loader(loader)
    shutil.copytree(photos, tmp_path / "tree")
    path = tmp_path / "tree" / "train" / "class2" / "00002.JPEG"
    path.write_bytes(spoil(path.read_bytes()))
    output = run(f"{SINGLE} --data-dir tree --arch lenet -b 27 --image-size 32 -j {workers} --loader {loader} "
                 "--log-dir log", cwd=tmp_path, status=2)
    assert output.count("single.py: tree/train/class2/00002.JPEG is not an image that can be read") == 1, output
    assert "Traceback" not in output


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
    run(f"{SINGLE} --data-dir {cifar_tree} {CIFAR} -b 32 --lr 0.005 -j 1 --log-dir log", cwd=folder)
    return folder / "log"


def figures(log):
    epoch, = json.loads((log / "results.json").read_text())["epochs"]
    return epoch["val"]


def test_learns(learned):
    val = figures(learned)
    assert val["images"] == 1000
    assert val["accuracy"] > 0.25, "chance is 0.1"
    assert val["top5"] > 0.7, "chance is 0.5"


@pytest.mark.parametrize("strategy", ["ddp_launch", "hvd_gloo"])
def test_learns_on_two_processes(strategy, learned, cifar_tree, tmp_path):
    """As well as on one, within what 1,000 images and BatchNorm over half the batch leave open."""
    if strategy.startswith("hvd"):
        need_horovod(strategy)
    run(f"{strategies(2, ROOT / 'imagenet')[strategy]} --data-dir {cifar_tree} {CIFAR} -b 16 --lr 0.0025 -j 1 "
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
    output = run(f"{command} --data-dir {cifar_tree} --arch convnet --image-size 32 --device cpu -j 1 "
                 f"--evaluate --resume {learned}/last.pt", cwd=tmp_path)
    val = figures(learned)
    assert f"1,000 images of val: loss {val['loss']:.4f} accuracy {val['accuracy']:.2%} top-5 {val['top5']:.2%} | " \
        in output
    assert not list(tmp_path.iterdir()), "it writes no files"


@pytest.mark.parametrize("loader", LOADERS)
def test_resumes_within_an_epoch(loader, cifar_tree, tmp_path):
    """With workers and --accumulate, the rest of the epoch is that of a run that was never stopped."""
    need_loader(loader)
    command = (f"{SINGLE} --data-dir {cifar_tree} {CIFAR} -b 32 --lr 0.005 --accumulate 3 -j 1 --loader {loader} "
               "--checkpoint-every 25 --keep 9")
    run(f"{command} --log-dir whole", cwd=tmp_path)
    within = next((tmp_path / "whole").glob("epoch-0000-step-000025-*"))  # after 75 of the 125 batches
    assert "after epoch 0 and 25 steps" in run(f"{command} --log-dir part --resume {within}", cwd=tmp_path)
    whole, part = checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "part")
    assert whole["scheduler"]["last_epoch"] == 42, "the last step has the two batches that are left"
    for name in ("model", "optimizer", "random_states"):
        assert_same(whole[name], part[name])
    for name in ("loss", "accuracy", "top5", "images"):
        assert whole["epochs"][0]["train"][name] == part["epochs"][0]["train"][name]


ACCUMULATED = (f"--synthetic 320 --epochs 2 --arch lenet {small('imagenet')} --wd 5e-4 --warmup-epochs 0 --device cpu "
               "--lr 0.04 --scale-lr none --log-dir log")


@pytest.mark.parametrize("strategy", ["single", *strategies(1, "")])
def test_accumulate(strategy, tmp_path):
    """4 batches of 8 are one of 32, on two processes 4 of 4 on each."""
    if strategy.startswith("hvd"):
        need_horovod(strategy)
    (tmp_path / "whole").mkdir()
    run(f"{SINGLE} {ACCUMULATED} -b 32", cwd=tmp_path / "whole")
    command = {"single": f"{SINGLE} -b 8", **{name: f"{command} -b 4" for name, command in
                                              strategies(2, ROOT / "imagenet").items()}}[strategy]
    output = run(f"{command} {ACCUMULATED} --accumulate 4", cwd=tmp_path)
    assert "x 4 accumulated, 32 global" in output
    whole, parts = checkpoint(tmp_path / "whole" / "log"), checkpoint(tmp_path / "log")
    assert parts["scheduler"]["last_epoch"] == whole["scheduler"]["last_epoch"] == 20
    assert largest_difference(parts["model"], whole["model"]) < 1e-5


@pytest.mark.parametrize("strategy", ["single", "ddp_launch", "hvd_gloo"])
def test_accumulate_flushes_the_tail(strategy, tmp_path):
    """7 batches by 4 are a step of four and one of three, each the step of all its images together."""
    if strategy.startswith("hvd"):
        need_horovod(strategy)
    command = {"single": f"{SINGLE} -b 8", **{name: f"{command} -b 4" for name, command in
                                              strategies(2, ROOT / "imagenet").items()}}[strategy]
    flags_of_it = ["--synthetic", "56", "--arch", "lenet", "--image-size", "32", "--wd", "0", "--lr", "0.04"]
    run(f"{command} {' '.join(flags_of_it)} --epochs 1 --warmup-epochs 1 --scale-lr none --label-smoothing 0 "
        "--accumulate 4 --device cpu --log-dir log", cwd=tmp_path)
    args = arguments(*flags_of_it, "-b", 8)
    train, _ = data.imagenet(args, CPU)
    model = models.build(args, channels=3, size=32, classes=train.classes)
    optimizer = torch.optim.SGD(model.parameters(), 0.04, momentum=0.9)
    batches = list(train)
    for step in (batches[:4], batches[4:]):
        pictures, labels = (torch.cat(parts) for parts in zip(*step, strict=True))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(pictures), labels).backward()
        optimizer.step()
    assert largest_difference(checkpoint(tmp_path / "log")["model"], model.state_dict()) < 1e-5


@pytest.mark.parametrize("name", ["resnet18", "googlenet", "inception_v3", "vit_b_16", "mobilenet_v3_small",
                                  "squeezenet1_0", "densenet121", "convnext_tiny", "efficientnet_b0", "swin_t"])
def test_any_model_of_torchvision(name):
    """One that is new for each family with ways of its own: auxiliary classifiers, a size that is part of the model."""
    assert name in models.classifiers()
    size = 96 if name == "inception_v3" else 64
    args = arguments("--image-size", size)
    args.model = name
    model = models.build(args, channels=3, size=size, classes=7)
    logits = model.train()(torch.randn(2, 3, size, size))
    assert logits.shape == (2, 7)
    logits.sum().backward()


def test_weight_decay_spares_batch_norm_and_biases():
    args = arguments()
    args.model = "resnet18"
    model = models.build(args, channels=3, size=64, classes=7)
    decayed, others = models.decay_groups(model, 1e-4)
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

    args = arguments()
    args.model = "resnet18"
    model = models.build(args, channels=3, size=64, classes=7).eval()
    pictures = torch.randn(2, 3, 64, 64)
    before = model(pictures)
    assert models.replace_batch_norm(model, Other) is model
    assert {type(m) for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)} == {Other}
    assert torch.equal(model.eval()(pictures), before)


def test_compiled_and_channels_last(tmp_path):
    """A run with both goes on without, as the checkpoint has the usual names; and ends with the same loss."""
    need(shutil.which("g++"), "g++, which torch.compile needs on the CPU")
    command = (f"{SINGLE} --synthetic 256 --arch convnet --image-size 32 -b 64 --lr 0.005 --epochs 2 --device cpu "
               "--warmup-epochs 0")
    run(f"{command} --log-dir plain", cwd=tmp_path)
    run(f"{command} --channels-last --compile --log-dir fast --keep 9", cwd=tmp_path)
    plain, fast = checkpoint(tmp_path / "plain"), checkpoint(tmp_path / "fast")
    assert plain["epochs"][0]["train"]["loss"] == pytest.approx(fast["epochs"][0]["train"]["loss"], rel=1e-3)
    first = next((tmp_path / "fast").glob("epoch-0001-step-000000-*"))
    assert "resumed from" in run(f"{command} --resume {first} --log-dir on", cwd=tmp_path)


def test_compile_without_a_compiler(tmp_path):
    output = run(f"{SINGLE} --synthetic 64 --arch lenet --image-size 32 -b 64 --device cpu --compile --dry-run",
                 cwd=tmp_path, status=2, CXX="/nowhere/g++")
    assert output.splitlines()[-1] == \
        "single.py: --compile finds no C++ compiler: install g++, or leave --compile out"


@pytest.mark.parametrize(("flags_of_it", "says"), [
    ("--arch resnet5O", "there is no resnet5O; did you mean resnet50"),
    ("--arch vitb16", "did you mean vit_"),
    ("--image-size 31", "--image-size: 31 is not at least 32"),
    ("--image-size 32 --arch inception_v3", "inception_v3 takes no images of 32x32"),
    ("--image-size 50 --arch vit_b_16", "vit_b_16 takes no images of 50x50"),
    ("--label-smoothing 2", "2 is more than 1"),
    ("--accumulate 0", "--accumulate: 0 is not at least 1"),
    ("--loader libjpeg", "choose from"),
    ("--evaluate", "--evaluate: of which checkpoint?"),
])
def test_wrong_flag(flags_of_it, says, tmp_path):
    assert says in refused(f"{SINGLE} --synthetic 320 --device cpu --arch lenet {flags_of_it}", tmp_path)


def test_sync_bn_without_a_gpu(tmp_path):
    assert "--sync-bn" in refused(f"python {ROOT}/imagenet/ddp_spawn.py -g 2 --synthetic 320 --device cpu --sync-bn",
                                  tmp_path)


def test_loader_without_its_package(photos, tmp_path):
    (tmp_path / "site" / "nvidia" / "nvimgcodec").mkdir(parents=True)
    (tmp_path / "site" / "nvidia" / "nvimgcodec" / "__init__.py").write_text("raise ImportError('not here')")
    (tmp_path / "site" / "nvidia" / "__init__.py").touch()
    line = refused(f"{SINGLE} --data-dir {photos} --arch lenet -b 4 --loader nvimgcodec", tmp_path,
                   PYTHONPATH=str(tmp_path / "site"), PYTHONDONTWRITEBYTECODE="1")
    assert "pip install" in line
    assert "--loader pillow" in line


def flat(tree):
    for path in list((tree / "val").glob("*/*")):
        os.replace(path, tree / "val" / f"{path.parent.name}-{path.name}")
    for path in (tree / "val").glob("class?"):
        path.rmdir()


@pytest.mark.parametrize(("spoil", "says"), [
    (flat, "val has its images in one folder, as the archive has them: sort them by class, with https://"),
    (lambda tree: shutil.rmtree(tree / "val" / "class3"), "val/class3 is not there, and"),
    (lambda tree: shutil.rmtree(tree / "val"), "val is not there: --data-dir takes a folder with train/<class>"),
], ids=["flat", "a class", "val"])
def test_tree_that_is_not_one(spoil, says, photos, tmp_path):
    shutil.copytree(photos, tmp_path / "tree")
    spoil(tmp_path / "tree")
    assert says in refused(f"{SINGLE} --data-dir tree --arch lenet -b 4", tmp_path)


def test_benchmark_of_the_loaders(photos, tmp_path):
    need_loader("nvimgcodec")
    lines = run(f"python {ROOT}/benchmarks/jpeg_loader.py --data-dir {photos} --repeats 1", cwd=tmp_path).splitlines()
    assert [line.partition("  ")[0] for line in lines[1:]] == [
        "usual pipeline", "--loader pillow", "limit of pillow: decode the crop", "--loader nvimgcodec",
        "limit of nvimgcodec: decode the crop"]
    assert all(re.search(r" \d+ images/s and core, \d\.\d\d times the usual", line) for line in lines[1:])


def test_a_large_tree_is_two_arrays(photos):
    """No Python object for each image, of which each worker would get a copy (its reference count is written)."""
    tree = jpegs.TrainTree(files.image_tree(photos)[0], 32, 0, "pillow")
    assert isinstance(tree.paths, np.ndarray) and tree.paths.dtype.kind == "S"
    assert [os.fsdecode(path) for path in tree.paths] == [path for path, _ in files.image_tree(photos)[0].samples]
