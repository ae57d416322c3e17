"""Images in the archives that they come in: nothing is unpacked.

A tar is not compressed, so each image in it is a range of bytes, and a zip is much the same. One
pass over the headers finds the ranges, and an index beside the archive keeps them. Images have the
names and the order that they would have in folders.
"""

import contextlib
import csv
import io
import json
import os
import posixpath
import struct
import tarfile
import time
import zipfile
import zlib
from array import array
from collections.abc import Iterator
from functools import partial
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

import numpy as np
from torchvision.datasets.folder import is_image_file

from common import lease
from common.errors import InputError, in_one_line, show
from common.files import (
    cache_folder,
    read_regular,
    read_with_retries,
    refusal,
    retry,
    write_atomically,
)
from common.log import Progress
from images import folders

# Of the index: one with another number is built again.
FORMAT = 2
# Kaggle's zip with its labels, and the files of image-net.org.
ZIP = "imagenet-object-localization-challenge.zip"
LABELS = "LOC_val_solution.csv"
TRAIN = "ILSVRC2012_img_train.tar"
VAL = "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t*.tar.gz"
# Bytes of an unpacked file from a zip: a small file can unpack to a thousand times its size.
LARGEST = 2**28
# Bytes of a name, as in a file system. An index has fixed-size records, as wide as the longest.
LONGEST_NAME = 4096
# Members of a tar that describe the next one, such as its long name, and their longest, in bytes.
TEXTS = {
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
}
LONGEST_TEXT = 2**20
# A file in a zip begins with a header of this form, its name, and a field of any length.
ZIP_HEADER = struct.Struct("<26x2H")


class Archive:
    """The images of `split` (train or val) in an archive, in the order of folders.

    `labels` is an int array, `classes` a list of names, and `left_out` says which files do not
    have the name of an image. `class_of` returns {stem of a file: its class}, for archives without
    folders. The index is memory-mapped, and all processes share it. Raises InputError.
    """

    def __init__(self, path: Path, split: str, class_of=None):
        self.path = path
        self.descriptor = None
        self.stat = stat_of(path)
        index = usable_index(path, split, self.stat)
        if index is None:
            index = make_index(path, split, self.stat, class_of)
        self.header, self.records = index
        self.classes = self.header["classes"]
        self.left_out = self.header["left_out"]

    def __len__(self):
        return len(self.records)

    @property
    def labels(self):
        return self.records["label"]

    def fingerprint(self) -> int:
        """That of folders with the same images."""
        return self.header["fingerprint"]

    def where(self, index: int) -> str:
        """The archive, the name of an image in it, and its offset in bytes."""
        record = self.records[index]
        changed = "" if self.is_unchanged() else " (which has changed during the run)"
        return f"{self.path}{changed}:{os.fsdecode(record['name'])} at offset {record['offset']}"

    def is_unchanged(self):
        try:
            return stat_of(self.path) == self.stat
        except InputError:
            return False

    def read(self, index: int) -> bytes:
        """The bytes of an image file; raises InputError."""
        record = self.records[index]
        offset = int(record["offset"])
        size = int(record["size"])
        if not is_zip(self.path):
            return self._read_bytes(index, offset, size)
        header = self._read_bytes(index, offset, ZIP_HEADER.size)
        begin = offset + ZIP_HEADER.size + sum(ZIP_HEADER.unpack(header))
        content = self._read_bytes(index, begin, size)
        try:
            if record["deflated"]:
                content = zlib.decompressobj(wbits=-15).decompress(content, LARGEST)
            if zlib.crc32(content) != record["crc"]:
                raise zlib.error("its CRC is wrong")
        except zlib.error as error:
            raise InputError(f"{self.where(index)}: {error}: fetch the archive again") from error
        return content

    def prefetch(self, indices: list[int]) -> None:
        """Tell the kernel to read these images ahead, while others are decoded."""
        # An error is read()'s to report. macOS has no posix_fadvise.
        with contextlib.suppress(OSError, AttributeError):
            for record in self.records[indices]:
                place = int(record["offset"]), int(record["size"])
                os.posix_fadvise(self._opened(), *place, os.POSIX_FADV_WILLNEED)

    def _read_bytes(self, index, offset, size):
        """`size` bytes at `offset`, a part of the image `index`; raises InputError."""
        try:
            content = retry(lambda: self._pread(size, offset))
        except OSError as error:
            raise InputError(f"{self.where(index)}: {error.strerror}") from error
        if len(content) < size:
            raise InputError(f"{self.where(index)}: the archive ends before it")
        return content

    def _pread(self, size, offset):
        try:
            return os.pread(self._opened(), size, offset)
        except OSError:
            # The old one stays open: another thread may use it.
            self.descriptor = None
            raise

    def _opened(self):
        """The descriptor of the archive: pread has no position, so workers and threads share it."""
        if self.descriptor is None:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            if not self.is_unchanged():
                raise InputError(f"{self.path} has changed during the run: start it again")
            self.descriptor = descriptor
        return self.descriptor

    def __getstate__(self):
        # A process that is spawned, not forked, opens the archive and maps the index itself.
        return self.__dict__ | {"descriptor": None, "records": self.header["index"]}

    def __setstate__(self, state):
        self.__dict__.update(state)
        _, self.records = read_index(Path(state["records"]))


def find(folder: str) -> tuple[Archive, Archive] | None:
    """The archives of train and val in `folder`, of the same classes; None if there are none.

    Raises InputError, or OSError for a folder that may not be entered.
    """
    folder = Path(folder)
    if (folder / ZIP).exists():
        train_path = val_path = folder / ZIP
        class_of = partial(kaggle_classes, folder / ZIP)
    else:
        for names in ((TRAIN, VAL), ("train.tar", "val.tar")):
            train_path, val_path = (folder / name for name in names)
            if train_path.exists() or val_path.exists():
                break
        else:
            return None
        class_of = partial(devkit_classes, folder)
    # Find a missing archive before the other one is indexed.
    stat_of(train_path)
    val = Archive(val_path, "val", class_of)
    train = Archive(train_path, "train")
    folders.check_classes(train, val)
    return train, val


@contextlib.contextmanager
def refusing(path: Path, what: str):
    """Turn any exception about the file `path` into an InputError, which says `what` is wrong."""
    try:
        yield
    except InputError:
        raise
    # A damaged file can raise anything.
    except Exception as error:
        # zipfile reports some I/O errors as a damaged file.
        refused = error if isinstance(error, OSError) else refusal(error)
        if refused:
            raise InputError(f"{path}: {refused.strerror or refused}") from error
        raise InputError(f"{path} {what} ({in_one_line(error)}): fetch it again") from error


def devkit_classes(folder):
    """{stem of a validation image: its class}, from the devkit; raises InputError."""
    paths = sorted(folder.glob(DEVKIT))
    if not paths:
        raise InputError(
            f"{folder} has no {DEVKIT}, which has the labels of ImageNet's validation images: "
            "fetch it from https://image-net.org/download"
        )
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise InputError(f"the labels in {paths[0]} need SciPy: pip install scipy") from error
    with refusing(paths[0], "is damaged"):
        content = io.BytesIO(read_regular(paths[0]))
        with tarfile.open(fileobj=content) as devkit:
            files = {posixpath.basename(member.name): member for member in devkit}
            meta = devkit.extractfile(files["meta.mat"]).read()
            truth = devkit.extractfile(files["ILSVRC2012_validation_ground_truth.txt"]).read()
        synsets = loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
        names = dict(zip(synsets["ILSVRC2012_ID"].tolist(), synsets["WNID"].tolist(), strict=True))
        return {
            f"ILSVRC2012_val_{number:08}": names[int(label)]
            for number, label in enumerate(truth.split(), 1)
        }


def kaggle_classes(path):
    """{stem of a validation image: its class}, from the CSV file in or beside Kaggle's zip.

    Raises InputError.
    """
    beside = path.with_name(LABELS)
    place = beside if beside.exists() else path
    with refusing(place, "has no labels of validation that can be read"):
        if place == beside:
            content = read_regular(beside)
        else:
            with zipfile.ZipFile(path) as archive:
                if archive.getinfo(LABELS).file_size > LARGEST:
                    raise ValueError(f"more than {LARGEST:,} bytes")
                content = archive.read(LABELS)
        # Excel puts a byte order mark before it.
        rows = csv.DictReader(io.StringIO(content.decode("utf-8-sig")))
        return {row["ImageId"]: row["PredictionString"].split()[0] for row in rows}


def is_zip(path):
    return path.suffix == ".zip"


def stat_of(path):
    """[size in bytes, time of the last change] of a file; raises InputError."""
    try:
        stat = os.stat(path)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    # In whole seconds, as some file systems keep no more in a copy.
    return [stat.st_size, int(stat.st_mtime)]


def index_paths(path, split):
    """Where the index of an archive may be: beside it, or in the cache folder of this user."""
    name = f"{path.name}.{split}.index"
    beside = path.with_name(name)
    try:
        cache = cache_folder()
    except RuntimeError:
        return [beside]
    of_this_archive = blake2b(os.fsencode(path.resolve()), digest_size=8).hexdigest()
    return [beside, cache / "imagenet-archives" / of_this_archive / name]


def usable_index(path, split, stat):
    """(header, records) of an index that fits the archive as it is now, or None."""
    for index in index_paths(path, split):
        try:
            header, records = read_index(index)
            if (header["format"], header["stat"]) == (FORMAT, stat):
                return header, records
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        except OSError as error:
            # It may be good.
            raise InputError(f"{index}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError):
            # It has another format, or is damaged.
            continue
    return None


def read_index(path):
    """(header, records) of an index. Raises OSError, or ValueError and others for another file."""
    return read_with_retries(path, parse_index)


def parse_index(path, mapped):
    """What read_index() returns."""
    with open(path, "rb") as file:
        header = json.loads(file.readline())
        start = file.tell()
    kind = record_type(header["longest"])
    records = np.memmap(path, kind, "r", start) if mapped else np.fromfile(path, kind, offset=start)
    header["index"] = str(path)
    if zlib.crc32(records) != header["crc"]:
        raise ValueError("damaged")
    # Somebody else may have put it beside the archive.
    size_of_archive, _ = header["stat"]
    labels_fit = (records["label"] >= 0) & (records["label"] < len(header["classes"]))
    are_texts = all(isinstance(text, str) for text in [*header["classes"], header["left_out"]])
    fingerprint = header["fingerprint"]
    is_fingerprint = isinstance(fingerprint, int) and 0 <= fingerprint < 2**32
    is_sane = are_within(records, size_of_archive) and labels_fit.all()
    if not (are_texts and is_fingerprint and is_sane):
        raise ValueError("absurd")
    return header, records


def are_within(records, size_of_archive) -> bool:
    """Whether all images are in the archive."""
    offsets = records["offset"]
    sizes = records["size"]
    return ((offsets >= 0) & (sizes >= 0) & (offsets <= size_of_archive - sizes)).all()


def record_type(longest: int):
    """The dtype of an image in an index; `longest` is the number of bytes of the longest name."""
    if not 0 < longest <= LONGEST_NAME:
        raise ValueError(f"names of {longest} bytes")
    return np.dtype(
        [
            ("offset", "<i8"),
            ("size", "<i8"),
            ("label", "<i4"),
            ("crc", "<u4"),
            ("deflated", "?"),
            ("name", f"S{longest:d}"),
        ]
    )


def make_index(path, split, stat, class_of):
    """Make the index of an archive, or wait for the process that does. Raises InputError."""
    start = time.perf_counter()
    content = None
    for to in index_paths(path, split):
        try:
            to.parent.mkdir(parents=True, exist_ok=True)
            with lease.held(to.with_name(f".{to.name}.lock")):
                if usable_index(path, split, stat) is None:
                    if content is None:
                        content = retry(partial(index_of, path, split, stat, class_of))
                    write_atomically(to, *content)
                    show(f"made {to} in {time.perf_counter() - start:.1f} s")
            break
        # The folder is not writable, or its disk is full: try the next place.
        except OSError as error:
            failed = error
    else:
        raise InputError(
            f"cannot write the index {to} ({failed.strerror}): "
            "set XDG_CACHE_HOME to a folder that can be written"
        ) from failed
    index = usable_index(path, split, stat)
    if index is None:
        raise InputError(f"{path} changes while its index is made: wait until it is complete")
    return index


def index_of(path, split, stat, class_of):
    """The index of an archive: its header, and a record for each image. Raises InputError."""
    show(f"making the index of {path} for {split}, once ({stat[0] / 1e9:.2f} GB)")
    names, places, others = files_in(path, split, stat[0])
    packed = packed_folder(names, split)
    names = [name.removeprefix(packed) for name in names]
    others = [name.removeprefix(packed) for name in others if name.startswith(packed)]
    names = below_classes(names, path, class_of)
    order = in_order_of_folders(names)
    names = [names[number] for number in order]
    classes = sorted({class_in(name) for name in names})
    if empty := {class_in(name) for name in others if "/" in name} - set(classes):
        one = min(empty)
        of_class = [name for name in others if class_in(name) == one]
        raise InputError(folders.no_images(f"{path}/{one}", of_class))
    records = records_of(names, classes, places[order], path)
    if not are_within(records, stat[0]):
        raise InputError(f"{path} lists images beyond its end: fetch it again")
    header = {
        "format": FORMAT,
        "stat": stat,
        "classes": classes,
        "left_out": folders.in_words(others),
        "longest": records["name"].itemsize,
        "crc": zlib.crc32(records),
        "fingerprint": fingerprint_of(records["name"]),
    }
    return json.dumps(header).encode() + b"\n", records


def files_in(path, split, size):
    """The files of `split` in an archive of `size` bytes that are not hidden. Raises InputError.

    Returns the names of the images, their places as int64 [images, 4] (offset, size, CRC, whether
    it is deflated), and the names of the other files.
    """
    names = []
    others = []
    # An array: there can be 14 million images, and a tuple takes a hundred bytes.
    places = array("q")
    kind = "zip" if is_zip(path) else "uncompressed tar"
    with (
        refusing(path, f"was cut off or damaged, or is no {kind}"),
        open(path, "rb") as file,
        Progress(desc=path.name, total=size, unit="B", unit_scale=True) as bar,
    ):
        files = zip_files(file, path) if is_zip(path) else tar_files(file, path)
        for name, *place in files:
            bar.update(place[0] - bar.n)
            name = posixpath.normpath(name).lstrip("/")
            # A tar is of one split, a zip has all.
            of_split = split in name.split("/")[:-1] or not is_zip(path)
            if not of_split or folders.is_hidden(name):
                continue
            if is_image_file(name):
                names.append(name)
                places.extend(place)
            else:
                others.append(name)
    if not names:
        raise InputError(folders.no_images(f"{path} (for {split})", others))
    return names, np.frombuffer(places, np.int64).reshape(-1, 4), others


def packed_folder(names, split):
    """The packed folder that has the classes: "train/", perhaps with parents, or ""."""
    above = posixpath.commonpath({posixpath.dirname(name) for name in names}).split("/")
    if split not in above:
        return ""
    return "/".join(above[: above.index(split) + 1]) + "/"


def below_classes(names, path, class_of):
    """`names`, each with its class as the first folder; raises InputError."""
    flat = [name for name in names if "/" not in name]
    if not flat:
        return names
    if class_of is None:
        raise InputError(f"{path}:{flat[0]} is in no folder: it needs <class>/*.JPEG")
    classes = class_of()
    stems = {name: posixpath.splitext(name)[0] for name in flat}
    unknown = [name for name, stem in stems.items() if stem not in classes]
    if unknown:
        raise InputError(f"{path}:{unknown[0]} has no label ({len(unknown)} such images)")
    return [f"{classes[stems[name]]}/{name}" if name in stems else name for name in names]


def class_in(name):
    """The first folder of a name."""
    return name.partition("/")[0]


def in_order_of_folders(names):
    """The numbers of `names`, sorted by name as torchvision's ImageFolder does.

    Of two files with the same name the last one counts, as if they were unpacked.
    """

    def key(number):
        folder, _, file = names[number].rpartition("/")
        name_of_class, _, below = folder.partition("/")
        # No name has a "\0", and it comes before all other characters.
        return f"{name_of_class}\0{below}\0{file}"

    numbers = sorted(range(len(names)), key=key)
    return [list(same)[-1] for _, same in groupby(numbers, names.__getitem__)]


def records_of(names, classes, places, path):
    """The records of an index, one per image; a label is the number of its class.

    Raises InputError.
    """
    longest = max(len(os.fsencode(name)) for name in names)
    if longest > LONGEST_NAME:
        raise InputError(f"{path} has names of over {LONGEST_NAME} bytes")
    records = np.empty(len(names), record_type(longest))
    number_of = {name: number for number, name in enumerate(classes)}
    records["label"] = [number_of[class_in(name)] for name in names]
    for column, field in enumerate(("offset", "size", "crc", "deflated")):
        records[field] = places[:, column]
    encoded = records["name"]
    for row, name in enumerate(names):
        encoded[row] = os.fsencode(name)
    return records


def fingerprint_of(names) -> int:
    """The CRC-32 of the names: folders of the same images have the same."""
    crc = 0
    before = b"/"
    for name in names:
        crc = zlib.crc32(before + name, crc)
        before = b"\n/"
    return crc


def zip_files(file: BinaryIO, path: Path) -> Iterator[tuple]:
    """The files in a zip: their names, offsets of their headers, sizes, CRCs, and if deflated.

    Raises InputError, and others for a damaged file.
    """
    infos = zipfile.ZipFile(file).infolist()
    if min((info.header_offset for info in infos), default=0) > 0:
        raise InputError(joined(path))
    for info in infos:
        if info.is_dir():
            continue
        is_encrypted = info.flag_bits & 1
        if is_encrypted or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise InputError(
                f"{path}:{info.filename} is encrypted, or compressed by another method than "
                "deflate: pack it again, without"
            )
        deflated = info.compress_type == zipfile.ZIP_DEFLATED
        yield info.filename, info.header_offset, info.compress_size, info.CRC, deflated


class Member(tarfile.TarInfo):
    """A TarInfo that refuses absurd sizes: tarfile reads the text before a file as a whole."""

    @classmethod
    def frombuf(cls, buf, encoding, errors):
        member = super().frombuf(buf, encoding, errors)
        if member.size < 0 or (member.type in TEXTS and member.size > LONGEST_TEXT):
            raise tarfile.InvalidHeaderError(f"a size of {member.size}")
        return member


def tar_files(file: BinaryIO, path: Path, folder: str = "") -> Iterator[tuple]:
    """The same of a tar, and of the tars in it, whose names become folders.

    `folder` is that of a tar in another.
    """
    tar = tarfile.TarFile(fileobj=file, tarinfo=Member)
    for member in iter(tar.next, None):
        # tarfile would keep a kilobyte for each member.
        tar.members.clear()
        # A member that describes it can give another size than its header.
        if member.size < 0:
            raise tarfile.ReadError(f"a size of {member.size}")
        name = folder + member.name
        is_tar = name.lower().endswith(".tar") and not folders.is_hidden(name)
        if member.isdir():
            continue
        if not member.isreg() or member.issparse():
            if is_tar or is_image_file(name):
                raise InputError(
                    f"{path}:{name} is a link, or a sparse or special file, and no range of "
                    "bytes: pack it again with tar --dereference, without --sparse"
                )
        elif not is_tar:
            yield name, member.offset_data, member.size, 0, False
        elif folder:
            raise InputError(f"{path}:{name} is a tar within a tar within a tar: unpack it")
        else:
            inner = tar.extractfile(member)
            for its_name, offset, *others in tar_files(inner, path, f"{name[:-4]}/"):
                yield its_name, member.offset_data + offset, *others
    require_end(file, tar.offset, path)


def require_end(file, offset, path):
    """Raise unless the tar ends at `offset`, where tarfile finds no further header."""
    file.seek(offset)
    block = file.read(tarfile.BLOCKSIZE)
    if block != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError(f"no header at offset {offset}")
    # Zeros fill the last record.
    if file.read(2**16).strip(b"\0"):
        raise InputError(joined(path))


def joined(path):
    """The message about two archives in one file, of which only one would be read."""
    return f"{path} has more than one archive in it, perhaps joined by cat: pack all files into one"
