"""Images in archives: the same as in folders, and what is said of damaged archives."""

import errno
import io
import json
import os
import pickle
import pwd
import re
import subprocess
import tarfile
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from forked import compute
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import assert_same, checkpoint
from PIL import Image
from recipes import in_float64, keep_checkpoints
from scipy.io import savemat

import archives
from common import files as common_files
from common.errors import InputError
from imagenet import jpegs
from images import folders

CLASSES = ["n01440764", "n01443537", "n02085620"]


def jpeg(random):
    file = io.BytesIO()
    Image.fromarray(random.integers(0, 256, (40, 50, 3), np.uint8)).save(file, "JPEG")
    return file.getvalue()


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Three classes with the names of ImageNet, 8 images of each to train, 2 to validate."""
    folder = tmp_path_factory.mktemp("tree")
    random = np.random.default_rng(0)
    for number, name in enumerate(CLASSES):
        for split, count in (("train", 8), ("val", 2)):
            (folder / split / name).mkdir(parents=True)
            for image in range(count):
                of_split = {
                    "train": f"{name}_{image * 7}.JPEG",
                    # Neighbours are of different classes.
                    "val": f"ILSVRC2012_val_{image * len(CLASSES) + number + 1:08}.JPEG",
                }
                (folder / split / name / of_split[split]).write_bytes(jpeg(random))
    return folder


def pack(path, files, mode="w", **options):
    """Write a tar of {name: Path or bytes}."""
    with tarfile.open(path, mode, **options) as archive:
        for name, content in files.items():
            if isinstance(content, Path):
                content = content.read_bytes()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def files_of(folder, prefix=""):
    """{name in the archive: Path} of the images in `folder`/<class>/."""
    return {f"{prefix}{path.relative_to(folder)}": path for path in sorted(folder.glob("*/*"))}


def flat(folder):
    """The same, all in one folder."""
    return {path.name: path for path in sorted(folder.glob("*/*"), key=lambda path: path.name)}


def write_devkit(to):
    """The devkit of these classes: a tree of synsets in a MATLAB file, and a label in each line."""
    # The synsets are not in the order of their names, and the last one is no class.
    order = [CLASSES[2], CLASSES[0], CLASSES[1], "n00001740"]
    kinds = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("gloss", "O")]
    kinds += [("num_children", "O"), ("children", "O"), ("wordnet_height", "O")]
    kinds += [("num_train_images", "O")]
    synsets = np.empty((len(order), 1), kinds)
    for number, name in enumerate(order, 1):
        children = [1, 2, 3] if number == len(order) else []
        synsets[number - 1, 0] = (number, name, "words", "gloss", len(children), children, 0, 8)
    meta = io.BytesIO()
    savemat(meta, {"synsets": synsets})
    truth = "".join(f"{order.index(CLASSES[number % len(CLASSES)]) + 1}\n" for number in range(6))
    folder = "ILSVRC2012_devkit_t12/data"
    files = {
        f"{folder}/meta.mat": meta.getvalue(),
        f"{folder}/ILSVRC2012_validation_ground_truth.txt": truth.encode(),
    }
    pack(to / "ILSVRC2012_devkit_t12.tar.gz", files, "w:gz")


def original(tree, to):
    """The three files of image-net.org."""
    inner = {}
    for name in CLASSES[::-1]:
        pack(to / "inner.tar", flat_class(tree / "train" / name))
        inner[f"{name}.tar"] = (to / "inner.tar").read_bytes()
    (to / "inner.tar").unlink()
    pack(to / archives.TRAIN, inner)
    pack(to / archives.VAL, flat(tree / "val"))
    write_devkit(to)


def flat_class(folder):
    return {path.name: path for path in sorted(folder.iterdir(), reverse=True)}


def of_folders(tree, to):
    """train.tar and val.tar, as `tar --create --file train.tar train` makes them."""
    for split in ("train", "val"):
        pack(to / f"{split}.tar", files_of(tree / split, f"./{split}/"))


def kaggle(method):
    def write(tree, to):
        with zipfile.ZipFile(to / archives.ZIP, "w", method) as archive:
            for split, files in (
                ("train", files_of(tree / "train")),
                ("val", flat(tree / "val")),
            ):
                for name, path in files.items():
                    archive.write(path, f"ILSVRC/Data/CLS-LOC/{split}/{name}")
            archive.writestr("ILSVRC/Data/CLS-LOC/test/ILSVRC2012_test_00000001.JPEG", b"")
            archive.writestr("ILSVRC/Annotations/CLS-LOC/val/ILSVRC2012_val_00000001.xml", b"")
            rows = [
                f"{path.stem},{path.parent.name} 1 2 3 4" for path in flat(tree / "val").values()
            ]
            text = "\n".join(["ImageId,PredictionString", *rows])
            archive.writestr(archives.LABELS, text)

    return write


LAYOUTS = {
    "tar of tars": original,
    "tar of folders": of_folders,
    "zip, stored": kaggle(zipfile.ZIP_STORED),
    "zip, deflated": kaggle(zipfile.ZIP_DEFLATED),
}


@pytest.fixture
def train_tar(tree, tmp_path):
    """A tar of the classes of train/."""
    pack(tmp_path / "train.tar", files_of(tree / "train"))
    return tmp_path / "train.tar"


@pytest.fixture(params=LAYOUTS)
def archived(request, tree, tmp_path):
    """A folder with the images of `tree` in archives."""
    (tmp_path / "archives").mkdir()
    LAYOUTS[request.param](tree, tmp_path / "archives")
    return tmp_path / "archives"


@pytest.mark.check
def test_archives_are_as_folders(archived, tree):
    for folder, archive in zip(folders.find(tree), archives.find(archived), strict=True):
        assert archive.classes == folder.classes == CLASSES
        assert archive.labels.tolist() == folder.labels.tolist()
        assert archive.fingerprint() == folder.fingerprint()
        for index in range(len(folder)):
            assert archive.read(index) == folder.read(index)
            path = Path(folder.where(index)).relative_to(folder.path)
            assert f":{path} at offset " in archive.where(index)


FLAGS = "--arch lenet --image-size 32 -G 4 -j 1 --epochs 2 --device cpu --lr 0.01"
TORCHRUN = "torchrun --standalone --nproc-per-node=2"


@pytest.mark.parametrize(
    ("layout", "launcher", "recipe", "loader"),
    [
        ("tar of tars", "python", "single.py", "pillow"),
        ("tar of folders", "python", "single.py", "nvimgcodec"),
        ("zip, deflated", TORCHRUN, "ddp_launch.py", "pillow"),
    ],
    indirect=["loader"],
)
def test_weights_are_those_from_folders(layout, launcher, recipe, loader, tree, tmp_path):
    """Bit by bit, also if the run begins on folders and goes on, within an epoch, on archives."""
    script = in_float64(tmp_path, "imagenet") / recipe
    keep_checkpoints(script)
    start = f"{launcher} {script} {FLAGS} --loader {loader}"
    compute(f"{start} --data-dir {tree} --checkpoint-every 8 --log-dir folders", tmp_path)
    (tmp_path / "archives").mkdir()
    LAYOUTS[layout](tree, tmp_path / "archives")
    said = compute(f"{start} --data-dir archives --log-dir archives-log", tmp_path)
    assert "24 images in" in said and "6 images in" in said
    assert said.count("making the index") == 2
    expected = checkpoint(tmp_path / "folders")["model"]
    assert_same(checkpoint(tmp_path / "archives-log")["model"], expected)
    resume = "--resume folders/8.pt --log-dir resumed"
    said = compute(f"{start} --data-dir archives {resume}", tmp_path)
    assert "resumed from folders/8.pt at epoch 2, sample 8" in said
    assert_same(checkpoint(tmp_path / "resumed")["model"], expected)


@pytest.mark.check
@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_forms_of_tar(form, tree, tmp_path):
    """Long names, names that are no UTF-8, and folders."""
    image = next((tree / "train" / CLASSES[0]).iterdir())
    long = f"cat/{'d' * 90}/{'e' * 90}/1.jpeg"
    names = ["train/cat/1.png", "train/cat/.hidden/1.png", f"train/{long}", "train/dog/\udce4.JPG"]
    with tarfile.open(tmp_path / "train.tar", "w", format=form) as archive:
        folder = tarfile.TarInfo("train/cat")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name in [*names, "train/README"]:
            archive.add(image, name)
    found = archives.Archive(tmp_path / "train.tar", "train")
    shown = [re.search(r":(.*) at offset", found.where(index))[1] for index in range(len(found))]
    assert shown == ["cat/1.png", long, "dog/\udce4.JPG"]
    assert all(found.read(index) == image.read_bytes() for index in range(len(found)))


@pytest.mark.check
def test_a_tar_that_was_cut_off_anywhere(tree, tmp_path):
    """In a header, a long name, an image, or before the block of zeros at its end."""
    long = {f"train/cat/{'d' * 120}/{number}.JPEG": jpeg_of(tree) for number in range(2)}
    pack(tmp_path / "whole.tar", long, format=tarfile.GNU_FORMAT)
    inner = (tmp_path / "whole.tar").read_bytes()
    pack(tmp_path / "nested.tar", {"cat.tar": inner, "dog.tar": inner})
    for name in ("whole.tar", "nested.tar"):
        whole = (tmp_path / name).read_bytes()
        end = len(whole.rstrip(b"\0")) // 512 * 512 + 512
        cut = tmp_path / "train.tar"
        for size in range(512, end + 512, 173):
            cut.write_bytes(whole[:size])
            with pytest.raises(
                InputError, match=r"train.tar was cut off or damaged.*: fetch it again"
            ):
                archives.Archive(cut, "train")
    assert not list(tmp_path.glob("*.index"))


@pytest.mark.check
def test_a_joined_tar(tree, tmp_path):
    """`cat a.tar b.tar` gives a tar that ends after the first one, with half of the images."""
    pack(tmp_path / "whole.tar", files_of(tree / "train"))
    whole = (tmp_path / "whole.tar").read_bytes()
    pack(tmp_path / "nested.tar", {"cat.tar": whole + whole})
    for content in (whole + whole, whole + b"text", (tmp_path / "nested.tar").read_bytes()):
        (tmp_path / "train.tar").write_bytes(content)
        with pytest.raises(InputError, match=r"train.tar has more than one archive in it"):
            archives.Archive(tmp_path / "train.tar", "train")
    (tmp_path / "train.tar").write_bytes(whole + bytes(2**21 + 100))
    assert len(archives.Archive(tmp_path / "train.tar", "train")) == 24


@pytest.mark.check
@pytest.mark.parametrize("make", ["ln cat/1.jpg", "ln -s 1.jpg", "truncate -s 1M"])
def test_links_and_sparse_files(make, tree, tmp_path):
    """An image has to be a range of bytes. Other files may be anything."""
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.jpg").write_bytes(jpeg_of(tree))
    for name in ("notes.txt", "2.jpg"):
        command = (
            f"{make} cat/{name} && tar --create --sparse --file={name}.tar cat/1.jpg cat/{name}"
        )
        subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    assert archives.Archive(tmp_path / "notes.txt.tar", "train").read(0) == jpeg_of(tree)
    with pytest.raises(InputError, match=r"2.jpg.tar:cat/2.jpg is a link, or a sparse"):
        archives.Archive(tmp_path / "2.jpg.tar", "train")


@pytest.mark.check
def test_a_damaged_header(train_tar):
    """tarfile takes it for the end."""
    content = bytearray(train_tar.read_bytes())
    offset = content.index(b"ustar", 1000) - 257
    content[offset] ^= 1
    train_tar.write_bytes(content)
    with pytest.raises(InputError, match=rf"damaged.*no header at offset {offset}\)"):
        archives.Archive(train_tar, "train")


@pytest.mark.check
def test_a_joined_zip(tree, tmp_path):
    """`cat a.zip b.zip` gives a zip with the files of the second one."""
    kaggle(zipfile.ZIP_STORED)(tree, tmp_path)
    path = tmp_path / archives.ZIP
    path.write_bytes(2 * path.read_bytes())
    with pytest.raises(InputError, match=f"{archives.ZIP} has more than one archive in it"):
        archives.find(tmp_path)


@pytest.mark.check
def test_a_zip_that_names_a_place_behind_its_end(tmp_path):
    with zipfile.ZipFile(tmp_path / "train.zip", "w") as archive:
        archive.writestr("train/cat/0.jpg", b"0123456789")
    content = bytearray((tmp_path / "train.zip").read_bytes())
    size_in_directory = content.index(b"PK\x01\x02") + 20
    content[size_in_directory : size_in_directory + 4] = b"\xf0\xff\xff\xff"
    (tmp_path / "train.zip").write_bytes(content)
    with pytest.raises(InputError, match=r"train\.zip lists images beyond its end"):
        archives.Archive(tmp_path / "train.zip", "train")


@pytest.mark.check
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("1.jpg", "train.tar:1.jpg is in no folder"),
        ("bird/1.jp2", "train.tar/bird has no images, but 1 .jp2"),
        (f"cat/{'a/' * 5000}1.jpg", "names of over 4096 bytes"),
    ],
)
def test_refused(name, says, tree, tmp_path):
    pack(tmp_path / "train.tar", {**files_of(tree / "train"), name: b""})
    with pytest.raises(InputError, match=re.escape(says)):
        archives.Archive(tmp_path / "train.tar", "train")


@pytest.mark.check
def test_other_files(tree, tmp_path):
    """Hidden ones, such as those of macOS, do not count; the others are counted, as in folders."""
    of_mac = {f"{CLASSES[0]}/._1.JPEG": b"Mac", "._more.tar": b"Mac", "__MACOSX/._1.JPEG": b"Mac"}
    others = {f"{CLASSES[0]}/a.avif": b"", "labels.csv": b""}
    pack(tmp_path / "train.tar", {**of_mac, **files_of(tree / "train"), **others})
    # The second time from the index.
    for _ in range(2):
        found = archives.Archive(tmp_path / "train.tar", "train")
        assert len(found) == 24
        assert found.left_out == "1 .csv, 1 .avif (such as 'labels.csv')"


@pytest.mark.check
def test_what_is_missing(tree, tmp_path):
    """A class, the labels, or an archive."""
    files = files_of(tree / "val")
    pack(tmp_path / "train.tar", files_of(tree / "train"))
    pack(tmp_path / "val.tar", {name: files[name] for name in files if CLASSES[1] not in name})
    with pytest.raises(InputError, match=rf"val.tar/{CLASSES[1]} is missing, but .*train.tar/"):
        jpegs.find_files(tmp_path)
    (tmp_path / "train.tar").unlink()
    with pytest.raises(InputError, match=r"train.tar: No such file"):
        jpegs.find_files(tmp_path)
    original(tree, tmp_path)
    (tmp_path / "ILSVRC2012_devkit_t12.tar.gz").unlink()
    with pytest.raises(InputError, match=r"has no ILSVRC2012_devkit.*https://image-net.org"):
        jpegs.find_files(tmp_path)


@pytest.mark.check
def test_the_last_of_two_files_with_one_name_counts(tree, tmp_path):
    """`tar --append` and `--update` leave the old one in the archive."""
    files = files_of(tree / "train")
    pack(tmp_path / "train.tar", {**files, f"{CLASSES[0]}/1.JPEG": b"old"})
    pack(tmp_path / "train.tar", {f"./{CLASSES[0]}/1.JPEG": b"new"}, "a")
    found = archives.Archive(tmp_path / "train.tar", "train")
    assert len(found) == 25
    assert found.read(0) == b"new"


def jpeg_of(tree):
    return next((tree / "train" / CLASSES[0]).iterdir()).read_bytes()


@pytest.mark.check
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_damaged_image_in_a_zip(method, tree, tmp_path, monkeypatch):
    """Also one that unpacks to a thousand times its size."""
    kaggle(method)(tree, tmp_path)
    found, _ = archives.find(tmp_path)
    monkeypatch.setattr(archives, "LARGEST", 100)
    found.records = np.array(found.records)
    if method == zipfile.ZIP_STORED:
        found.records["size"] -= 1
    with pytest.raises(InputError, match=rf"{archives.ZIP}:{CLASSES[0]}/.*: its CRC is wrong"):
        found.read(0)


@pytest.mark.check
def test_labels_beside_a_zip(tree, tmp_path, monkeypatch):
    """They are taken before those in it, and one line says what is wrong with either."""
    kaggle(zipfile.ZIP_STORED)(tree, tmp_path)
    path = tmp_path / archives.ZIP
    with zipfile.ZipFile(path) as archive:
        labels = archive.read(archives.LABELS).decode()
    beside = tmp_path / archives.LABELS
    beside.write_text(labels, encoding="utf-8-sig")
    assert archives.kaggle_classes(path)["ILSVRC2012_val_00000002"] == CLASSES[1]
    for spoiled in (re.sub(",n.*", ",", labels), labels.replace("ImageId", "image"), "\udcff"):
        beside.write_bytes(os.fsencode(spoiled))
        with pytest.raises(InputError, match=f"{archives.LABELS} has no labels of validation"):
            archives.kaggle_classes(path)
    beside.unlink()
    monkeypatch.setattr(archives, "LARGEST", 10)
    with pytest.raises(InputError, match=rf"{archives.ZIP} has no labels .*more than 10 bytes"):
        archives.kaggle_classes(path)
    path.write_bytes(path.read_bytes().replace(archives.LABELS.encode(), b"x" * 20))
    with pytest.raises(InputError, match=rf"{archives.ZIP} has no labels .*{archives.LABELS}"):
        archives.kaggle_classes(path)


@pytest.mark.check
def test_the_index_is_made_again(train_tar, capsys):
    """When the archive has changed, or the index is damaged, and not otherwise."""
    index = train_tar.with_name("train.tar.train.index")

    def lines():
        archives.Archive(train_tar, "train")
        return capsys.readouterr().out.count("making the index")

    assert [lines(), lines()] == [1, 0]
    os.utime(train_tar, (1, 1))
    assert [lines(), lines()] == [1, 0]
    whole = index.read_bytes()
    damaged = bytearray(whole)
    damaged[-1] ^= 1
    older = whole.replace(b'"format": 2', b'"format": 1')
    for content in (b"", b"no index", whole[:-1], older, damaged):
        index.write_bytes(content)
        assert [lines(), lines()] == [1, 0]
    assert index.read_bytes() == whole


@pytest.mark.check
@pytest.mark.parametrize("full", ["beside", "everywhere"])
def test_a_full_disk(full, train_tar, tmp_path, monkeypatch):
    """The index goes to the cache folder, and the advice is about that one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    real = archives.write_atomically

    def write(to, *parts):
        if full == "everywhere" or to.parent == tmp_path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(to, *parts)

    monkeypatch.setattr(archives, "write_atomically", write)
    if full == "beside":
        assert len(archives.Archive(train_tar, "train")) == 24
        assert len(list((tmp_path / "cache").rglob("*.index"))) == 1
    else:
        says = f"cannot write the index {tmp_path}/cache/.*No space left.*set XDG_CACHE_HOME"
        with pytest.raises(InputError, match=says):
            archives.Archive(train_tar, "train")


@pytest.mark.check
def test_a_user_without_a_home(train_tar, monkeypatch):
    """In a container, an archive needs no more than folders do."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: {}["no such user"])
    assert len(archives.Archive(train_tar, "train")) == 24


@pytest.mark.check
def test_an_archive_that_is_replaced(train_tar, tree, tmp_path):
    """What is open stays readable; a process that opens it later notices."""
    found = archives.Archive(train_tar, "train")
    before = found.read(0)
    other = tmp_path / "other.tar"
    pack(other, files_of(tree / "val"))
    os.replace(other, train_tar)
    assert found.read(0) == before
    found.descriptor = None
    with pytest.raises(InputError, match=r"train.tar has changed during the run: start it again"):
        found.read(0)
    found = archives.Archive(train_tar, "train")
    found.read(0)
    os.truncate(train_tar, 1000)
    with pytest.raises(InputError, match=r"\(which has changed during the run\):.* ends before it"):
        found.read(5)


@pytest.mark.check
def test_a_read_error(train_tar, monkeypatch):
    """It is tried again, with a new descriptor, and then named."""
    monkeypatch.setattr(common_files, "PAUSES", (0, 0))
    found = archives.Archive(train_tar, "train")
    expected = found.read(3)
    real = os.pread
    failures = [errno.EIO]

    def pread(*arguments):
        if failures:
            raise OSError(failures.pop(), "Input/output error")
        return real(*arguments)

    monkeypatch.setattr(os, "pread", pread)
    assert found.read(3) == expected
    failures += [errno.EIO] * 3
    with pytest.raises(InputError, match=r"train.tar:.* at offset \d+: Input/output error"):
        found.read(3)


def test_processes_that_are_not_forked_map_the_index(train_tar):
    found = archives.Archive(train_tar, "train")
    sent = pickle.dumps(found)
    assert len(sent) < found.records.nbytes
    copy = pickle.loads(sent)
    assert copy.read(5) == found.read(5)
    assert copy.labels.tolist() == found.labels.tolist()


@pytest.mark.check
@pytest.mark.parametrize(
    "edit",
    [
        lambda header, _: header.update(longest="1,O"),
        lambda header, _: header.update(longest=-1),
        lambda header, _: header.update(longest=2**40),
        lambda header, _: header.update(classes=[1, 2, 3]),
        lambda header, _: header.update(classes=["one"]),
        lambda header, _: header.update(stat="a"),
        lambda header, _: header.update(fingerprint="a"),
        lambda header, _: header.update(fingerprint=0.5),
        lambda header, _: header.update(fingerprint=2**40),
        lambda header, _: header.pop("format"),
        lambda _, records: records["size"].__setitem__(0, 2**40),
        lambda _, records: records["size"].__setitem__(0, -1),
        lambda _, records: records["offset"].__setitem__(0, -1),
        lambda _, records: records["label"].__setitem__(0, 3),
    ],
)
def test_an_index_of_somebody_else(edit, train_tar, capsys):
    """What no archive has is not believed: "1,O" is a dtype of pointers."""
    index = train_tar.with_name("train.tar.train.index")
    archives.Archive(train_tar, "train")
    whole = index.read_bytes()
    header, records = archives.read_index(index)
    records = np.array(records)
    edit(header, records)
    header["crc"] = zlib.crc32(records)
    index.write_bytes(json.dumps(header).encode() + b"\n" + records.tobytes())
    capsys.readouterr()
    archives.Archive(train_tar, "train")
    assert "making the index" in capsys.readouterr().out
    assert index.read_bytes() == whole


def header_of(name, size, kind=b"0"):
    """The header of a file in a tar, with any size."""
    member = tarfile.TarInfo(name)
    member.type = kind
    content = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    content[124:136] = tarfile.itn(size, 12, tarfile.GNU_FORMAT)
    content[148:156] = b" " * 8
    content[148:156] = b"%06o\0 " % sum(content)
    return bytes(content)


@pytest.mark.check
@pytest.mark.parametrize(
    "begin",
    [
        header_of("cat/1.jpg", -1024),
        header_of("long", -1, tarfile.GNUTYPE_LONGNAME),
        header_of("long", 2**40, tarfile.GNUTYPE_LONGNAME),
        header_of("pax", 2**40, tarfile.XHDTYPE),
        header_of("pax", 512, tarfile.XHDTYPE)
        + b"13 size=-512\n".ljust(512, b"\0")
        + header_of("cat/1.jpg", 0),
        2000 * (header_of("long", 4, tarfile.GNUTYPE_LONGNAME) + b"cat\0".ljust(512, b"\0")),
    ],
    ids=["back", "name", "endless name", "endless text", "back, in a text", "names"],
)
def test_a_tar_with_absurd_sizes(begin, tmp_path):
    """It is refused, and not read without end, or into memory."""
    path = tmp_path / "train.tar"
    path.write_bytes(begin + bytes(10240))
    # A file of any size takes no space.
    os.truncate(path, 2**41)
    with pytest.raises(InputError, match=r"train.tar was cut off or damaged, or is no"):
        archives.Archive(path, "train")


FUZZ = int(os.environ.get("FUZZ", 100))  # examples; make fuzz sets more


@pytest.mark.check
@pytest.mark.parametrize("kind", ["tar", "zip", "index"])
def test_fuzz(kind, tree, tmp_path):
    """A file of any bytes: the images are read, or one line says what is wrong."""
    files = {f"train/{name}": path for name, path in files_of(tree / "train").items()}
    path = tmp_path / ("train.tar" if kind != "zip" else archives.ZIP)
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, image in files.items():
                archive.write(image, name)
    else:
        pack(path, files)
    archives.Archive(path, "train")
    index = path.with_name(f"{path.name}.train.index")
    fuzzed = index if kind == "index" else path
    whole = fuzzed.read_bytes()

    @settings(max_examples=FUZZ, deadline=None)
    @given(
        st.lists(
            st.tuples(st.integers(0, len(whole) - 1), st.binary(max_size=8), st.integers(0, 64)),
            min_size=1,
            max_size=5,
        )
    )
    def read(edits):
        content = bytearray(whole)
        for position, inserted, removed in edits:
            content[position : position + removed] = inserted
        if kind != "index":
            index.unlink(missing_ok=True)
        fuzzed.write_bytes(content)
        try:
            archive = archives.Archive(path, "train")
            for number in range(len(archive)):
                archive.read(number)
        except InputError as error:
            assert len(str(error)) < 1000

    read()
