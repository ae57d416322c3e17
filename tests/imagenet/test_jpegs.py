"""The images that ImageNet's loaders give: decoded, cropped and resized as torchvision does it."""

import re
import shutil
import traceback

import pytest
import torch
from PIL import Image
from torchvision import transforms
from torchvision.datasets import ImageFolder

from benchmarks import jpeg_tree
from common.data import DataObject, EpochSampler, seed_of
from common.errors import InputError
from imagenet import jpegs

CPU = torch.device("cpu")


def training(folder, batch_size=4, size=224, decoder="pillow", workers=0, *, rank=0, world_size=1):
    """The images to train on, as `rank` of `world_size` reads them."""
    train_set, _ = jpegs.load(folder, None, 0, size, decoder)
    sampler = EpochSampler(len(train_set), batch_size, rank, world_size, seed=0)
    loader = jpegs.loader(train_set, sampler, batch_size, workers, CPU)
    return DataObject(train_set, sampler, loader)


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
    """uint8 `ours` and `usual` in 0..1 differ by 0.1 grey levels on average, and by two at most.

    It is the rounding in the resize.
    """
    assert ours.dtype == torch.uint8
    difference = (ours.float() - 255 * torch.stack(list(usual))).abs()
    assert difference.max() < 2.001
    assert difference.mean() < 0.1


def test_training_images_are_those_of_torchvision(loader, photos):
    """The same crops, mirrored or not, as its transforms draw with the same seed."""
    train = training(photos, decoder=loader)
    usual = transforms.Compose(
        [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
        ]
    )
    tree = ImageFolder(photos / "train")
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
    tree = ImageFolder(photos / "val")
    assert len(ours) == len(tree) == 11
    assert labels.tolist() == tree.targets
    assert_close(ours, [usual(picture) for picture, _ in tree])


def test_normalised_as_the_weights_of_torchvision_expect(photos):
    images, _ = next(iter(training(photos).loader))
    usual = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))(images / 255)
    torch.testing.assert_close(jpegs.normalise(images), usual, rtol=0, atol=1e-5)


def test_loaders_give_the_same_images(nvimgcodec, photos):
    """Bit by bit: decoding only the crop gives the same pixels as cropping the whole image."""
    batches = [next(iter(training(photos, 27, decoder=name).loader)) for name in jpegs.LOADERS]
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


@pytest.mark.parametrize(("spoil", "workers"), [(cut, 0), (text, 0), (no_jpeg, 1)])
def test_corrupt_image(loader, workers, spoil, photos, tmp_path):
    """The error names the file, for each decoder, in a worker or not."""
    shutil.copytree(photos, tmp_path / "tree")
    path = tmp_path / "tree" / "train" / "class2" / "00002.JPEG"
    path.write_bytes(spoil(path.read_bytes()))
    train = training(tmp_path / "tree", 27, 32, loader, workers)
    with pytest.raises(InputError, match=re.escape(str(path))) as raised:
        list(train.loader)
    # They would hold the loader until a garbage collection, which waits 5 s for its worker.
    traceback.clear_frames(raised.tb)
    del raised
