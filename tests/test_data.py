"""The fast pipeline gives what the usual one gives, each image once, the same on any number of processes."""

import json
import shutil
import subprocess
import sys
import time
from multiprocessing import current_process, resource_sharer
from multiprocessing.connection import Client

import pytest
import torch
import torch.nn.functional as F
from launch import ROOT, need_horovod, run, strategies
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms

from common import data, files, flags, models, schedule
from common.metrics import Metrics

CPU = torch.device("cpu")


def arguments(*given):
    return flags.parser("", "cifar10", ("lenet",), 1, 8, 0.1, 0).parse_args(["--synthetic", "500", *given])


def read_epoch(train, epoch):
    train.sampler.set_epoch(epoch)
    images, labels = zip(*train, strict=True)
    return torch.cat(images), torch.cat(labels)


@pytest.mark.parametrize("workers", [0, 2])
def test_normalised_as_torchvision_does(workers):
    _, val = data.cifar10(arguments("-j", str(workers)), CPU)
    usual = transforms.Compose([transforms.ToPILImage(), transforms.ToTensor(), transforms.Normalize(*val.mean_std)])
    images = torch.cat([images for images, _ in val])
    expected = torch.stack([usual(image) for image in val.dataset.images])
    assert images.dtype == torch.float32
    assert images.shape == (100, 3, 32, 32)
    torch.testing.assert_close(images, expected, rtol=0, atol=1e-5)


def test_every_crop_is_one_of_the_padded_image():
    images = torch.randint(256, (40, 3, 32, 32), dtype=torch.uint8)
    dataset = data.RandomCropFlip(images, torch.arange(40), seed=0)
    found = set()
    for epoch in range(20):
        crops, labels = dataset.__getitems__([40 * epoch + index for index in range(39, -1, -1)])
        for crop, label in zip(crops, labels, strict=True):
            padded = F.pad(images[label], (4,) * 4)
            windows = torch.cat((padded.unfold(1, 32, 1).unfold(2, 32, 1).flatten(1, 2),
                                 padded.flip(-1).unfold(1, 32, 1).unfold(2, 32, 1).flatten(1, 2)), dim=1)
            same = (windows == crop.unsqueeze(1)).flatten(2).all(dim=2).all(dim=0).nonzero().flatten().tolist()
            assert len(same) == 1
            found.update(same)
    assert len(found) > 150, "of 162: 9 x 9 offsets, mirrored or not"


def test_batches_do_not_depend_on_the_number_of_processes():
    """The k-th batches of all ranks together are the k-th batch of one process, augmentation included."""
    one, _ = data.cifar10(arguments("-b", "24"), CPU)
    whole_images, whole_labels = read_epoch(one, epoch=3)
    shares = [read_epoch(data.cifar10(arguments("-b", "8"), CPU, rank, 3)[0], epoch=3) for rank in range(3)]
    for step in range(len(one)):
        ours, here = slice(8 * step, 8 * step + 8), slice(24 * step, 24 * step + 24)
        together = torch.stack([images[ours] for images, _ in shares], dim=1).flatten(0, 1)
        assert torch.equal(together, whole_images[here])
        assert torch.equal(torch.stack([labels[ours] for _, labels in shares], dim=1).flatten(), whole_labels[here])


def test_epochs_differ_and_repeat():
    train, _ = data.cifar10(arguments(), CPU)
    first, second, again = (read_epoch(train, epoch)[0] for epoch in (0, 1, 0))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_loading_leaves_the_global_random_state_alone():
    train, _ = data.cifar10(arguments(), CPU)
    before = torch.get_rng_state()
    read_epoch(train, epoch=1)
    assert torch.equal(before, torch.get_rng_state())


def test_a_loader_worker_is_quiet_when_who_asked_it_for_a_batch_has_ended(capfd):
    """As on Ctrl-C: its thread that hands batches over calls sys.excepthook, which prints, and sets a signal."""

    class Offer(data.ImageTensor):
        def __getitems__(self, places):
            return [*resource_sharer.DupFd(2)._id]  # where the thread of this worker listens, and the key to a file

    loader = DataLoader(Offer(*data.synthetic(1, 1, 28, seed=0, split=0)), num_workers=1, collate_fn=data.as_it_is,
                        worker_init_fn=data._in_worker)
    batches = iter(loader)
    address, _ = next(batches)
    Client(address, authkey=current_process().authkey).close()
    time.sleep(0.5)
    assert capfd.readouterr().err == ""


def test_validation_shares_cover_the_set_once():
    shares = [list(data.cifar10(arguments(), CPU, rank, 7)[1].sampler) for rank in range(7)]
    assert sorted(index for share in shares for index in share) == list(range(100))


def test_synthetic_is_the_same_everywhere_and_the_splits_differ():
    first, second = (data.synthetic(50, 1, 28, seed=3, split=0) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[0], data.synthetic(50, 1, 28, seed=3, split=1)[0])
    assert not torch.equal(first[0], data.synthetic(50, 1, 28, seed=4, split=0)[0])


def test_metrics_are_those_of_all_images_at_once():
    logits, labels = torch.randn(1001, 10, generator=torch.Generator().manual_seed(0)), torch.arange(1001) % 10
    shares = []
    for rank in range(3):
        shares.append(Metrics(CPU, all_reduce=lambda sums: None))
        for index in range(rank, 1001, 3):
            image, label = logits[[index]].double(), labels[[index]]
            shares[-1].update(F.cross_entropy(image, label), image, label)
    total = torch.stack([share.sums for share in shares]).sum(dim=0)
    shares[1].all_reduce = lambda sums: sums.copy_(total)
    average = shares[1].average()
    assert average["loss"] == pytest.approx(F.cross_entropy(logits.double(), labels).item(), rel=0, abs=1e-12)
    assert average["accuracy"] == (logits.argmax(1) == labels).double().mean().item()
    assert average["images"] == 1001


def test_schedule():
    args = arguments("--epochs", "5", "--warmup-epochs", "2", "--lr", "0.1")
    assert schedule.lr_factor(args, 4) == 4
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.4)
    scheduler = schedule.warmup_cosine(optimizer, args, batches_per_epoch=10)
    rates = []
    for _ in range(51):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates[0] == pytest.approx(0.1)
    assert rates[10] == pytest.approx(0.25)
    assert rates[20] == pytest.approx(0.4)
    assert rates[35] == pytest.approx(0.2)
    assert rates[50] == pytest.approx(0)


@pytest.mark.parametrize(("name", "parameters"), [("convnet", 29_034), ("lenet", 61_706), ("resnet18", 11_173_962)])
def test_models(name, parameters):
    """ConvNet and LeNet-5 for MNIST; ResNet-18 for 32x32 has half a million fewer than torchvision's for ImageNet."""
    channels, size = (3, 32) if name == "resnet18" else (1, 28)
    model = models.MODELS[name](channels, size)
    assert model(torch.zeros(2, channels, size, size)).shape == (2, 10)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert counted == parameters


@pytest.mark.parametrize("strategy", ["single", "ddp_launch", "hvd_gloo"])
def test_real_mnist(strategy, real_data, tmp_path):
    if strategy.startswith("hvd"):
        need_horovod(strategy)
    command = {"single": f"python {ROOT}/mnist/single.py", **strategies(2, ROOT / "mnist")}[strategy]
    run(f"{command} --data-dir {real_data('mnist')} --epochs 1 --log-dir log", cwd=tmp_path)
    epoch, = json.loads((tmp_path / "log" / "results.json").read_text())["epochs"]
    assert epoch["val"]["images"] == 10_000
    assert epoch["val"]["accuracy"] >= 0.97


def test_real_cifar10(real_data, tmp_path):
    run(f"python {ROOT}/cifar10/single.py --data-dir {real_data('cifar10')} --epochs 1 --model convnet --lr 0.02 "
        "--log-dir log", cwd=tmp_path)
    epoch, = json.loads((tmp_path / "log" / "results.json").read_text())["epochs"]
    assert epoch["val"]["images"] == 10_000
    assert epoch["val"]["accuracy"] >= 0.45


@pytest.fixture
def tree(tmp_path):
    """An image tree of two classes with two images each, for training and validation."""
    for name in ("train/cat/1.JPEG", "train/cat/2.JPEG", "train/dog/1.JPEG", "val/cat/1.JPEG", "val/dog/1.JPEG"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 6), (200, 100, 0)).save(tmp_path / name)
    return tmp_path


def test_image_tree(tree):
    train, val = files.image_tree(tree)
    assert train.classes == val.classes == ["cat", "dog"]
    assert [label for _, label in train] == [0, 0, 1]
    assert all(image.size == (8, 6) for image, _ in (*train, *val))


@pytest.mark.parametrize(("spoil", "says"), [
    (lambda tree: shutil.rmtree(tree / "train"), "train is not there: --data-dir takes a folder with"),
    (lambda tree: [shutil.rmtree(tree / "val" / name) for name in ("cat", "dog")], "val: Couldn't find any class"),
    (lambda tree: (tree / "train" / "dog" / "1.JPEG").unlink(), "train: Found no valid file for the classes dog"),
    (lambda tree: shutil.rmtree(tree / "val" / "dog"), "val/dog is not there, and"),
    (lambda tree: shutil.rmtree(tree / "train" / "cat"), "train/cat is not there, and"),
])
def test_image_tree_that_is_not_one(spoil, says, tree, capsys):
    spoil(tree)
    with pytest.raises(SystemExit, match="2"):
        files.image_tree(tree)
    line = capsys.readouterr().err
    assert says in line
    assert str(tree) in line
    assert line.count("\n") == 1


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("content", [b"", b"no image", None], ids=["empty", "text", "cut short"])
def test_corrupt_image(workers, content, tree):
    """It ends the run with one line that names it, in a loader worker as well."""
    path = tree / "train" / "dog" / "1.JPEG"
    path.write_bytes(path.read_bytes()[:300] if content is None else content)
    program = ("import sys; from torch.utils.data import DataLoader; from common import failures, files\n"
               "sys.excepthook = failures.excepthook\n"
               f"train, val = files.image_tree({str(tree)!r})\n"
               f"for _ in DataLoader(train, 1, num_workers={workers}, collate_fn=list): pass")
    shown = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 2, shown.stderr
    assert f"{path} is not an image that can be read" in shown.stderr
    assert shown.stderr.count("\n") == 1
