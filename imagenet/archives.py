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
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torchvision.datasets.folder import is_image_file

from common import lease
from common.errors import InputError, in_one_line, show
from common.files import (
    cache_folder,
    patiently,
    read_regular,
    read_surely,
    refusal,
    write_atomically,
)
from common.log import Progress
from images import folders

# Of the index: another number, and it is made again.
FORMAT = 2
# Kaggle's zip, and the archives of image-net.org with their sizes in bytes.
ZIP = "imagenet-object-localization-challenge.zip"
TRAIN = "ILSVRC2012_img_train.tar"
VAL = "ILSVRC2012_img_val.tar"
SIZES = {TRAIN: 147_897_477_120, VAL: 6_744_924_160}
DEVKIT = "ILSVRC2012_devkit_t*.tar.gz"
COMPRESSED = {
    b"\x1f\x8b": "gunzip",
    b"\xfd7zXZ": "unxz",
    b"BZh": "bunzip2",
    b"\x28\xb5\x2f\xfd": "unzstd",
}
# Bytes of a file that is compressed in a zip: a small one can unpack to a thousand times its size.
LARGEST = 2**28
# Bytes of the text before a file in a tar, such as its name.
LONGEST_TEXT = 2**20
# Bytes of a name, as in a file system: in an index each has the room of the longest.
LONGEST_NAME = 4096
# A file in a zip begins with a header of this form, its name, and a field of any length.
ZIP_HEADER = struct.Struct("<26x2H")
# A zip ends with a record of this size that begins like this, and a comment.
ZIP_END = b"PK\x05\x06"
ZIP_END_SIZE = 22


class Entry(NamedTuple):
    """A file in an archive: its name, and where it is; `crc` and `deflated` are of a zip.

    A link has the name of its file as `target`, and no place.
    """

    name: str
    offset: int = 0
    size: int = 0
    crc: int = 0
    deflated: bool = False
    target: str = ""


class Files:
    """The entries of an archive, in columns: there may be 14 million, which take 120 bytes each."""

    def __init__(self):
        self.names = []
        self.columns = {
            "offset": array("q"),
            "size": array("q"),
            "crc": array("I"),
            "deflated": array("B"),
        }

    def add(self, entry: Entry) -> None:
        self.names.append(entry.name)
        for field, column in self.columns.items():
            column.append(getattr(entry, field))

    def add_links(self, links: list[Entry], path) -> None:
        """Add the files behind links, under the links' names; raises InputError."""
        number_of = {name: number for number, name in enumerate(self.names)} if links else {}
        for link in links:
            number = number_of.get(link.target)
            if number is None:
                raise InputError(
                    f"{path}:{link.name} is a link to {link.target}, which is no file in the "
                    "archive: pack it with tar --dereference"
                )
            place = {field: column[number] for field, column in self.columns.items()}
            self.add(Entry(link.name, **place))


class Member(tarfile.TarInfo):
    """A TarInfo that refuses absurd sizes: tarfile reads the text before a file as a whole."""

    TEXTS = (
        tarfile.XHDTYPE,
        tarfile.XGLTYPE,
        tarfile.SOLARIS_XHDTYPE,
        tarfile.GNUTYPE_LONGNAME,
        tarfile.GNUTYPE_LONGLINK,
    )

    @classmethod
    def frombuf(cls, buf, encoding, errors):
        member = super().frombuf(buf, encoding, errors)
        if member.size < 0 or (member.type in cls.TEXTS and member.size > LONGEST_TEXT):
            raise tarfile.InvalidHeaderError(f"a size of {member.size}")
        return member


class Archive:
    """The images of `split` (train or val) in an archive, in the order of folders.

    `labels` is an int array, `classes` a list of names, and `left_out` says which files are no
    images by their names. `class_of` returns {stem of a file: its class}, for archives without
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
        content = self._read_behind_header(index, offset, size)
        try:
            if record["deflated"]:
                decompressor = zlib.decompressobj(wbits=-15)
                content = decompressor.decompress(content, LARGEST)
                if not decompressor.eof:
                    raise zlib.error(f"it is cut off, or has more than {LARGEST:,} bytes")
        except zlib.error as error:
            raise InputError(f"{self.where(index)}: {error}: fetch the archive again") from error
        if zlib.crc32(content) != record["crc"]:
            raise InputError(f"{self.where(index)}: its CRC is wrong: fetch the archive again")
        return content

    def _read_behind_header(self, index, offset, size):
        """The `size` bytes of a file in a zip, whose header is at `offset`."""
        # The length of the header is in the header. Mostly one read has both.
        guess = min(1024 + size, self.stat[0] - offset)
        content = self._read_bytes(index, offset, guess)
        start = ZIP_HEADER.size + sum(ZIP_HEADER.unpack_from(content))
        if start + size > guess:
            return self._read_bytes(index, offset + start, size)
        return content[start : start + size]

    def prefetch(self, indices: list[int]) -> None:
        """Let the kernel begin to read images: while one is decoded, the others arrive."""
        # An error is read()'s to report. macOS has no posix_fadvise.
        with contextlib.suppress(OSError, AttributeError):
            for record in self.records[indices]:
                place = int(record["offset"]), int(record["size"])
                os.posix_fadvise(self._opened(), *place, os.POSIX_FADV_WILLNEED)

    def _read_bytes(self, index, offset, size):
        """`size` bytes at `offset`, which are of the image `index`; raises InputError."""
        try:
            content = patiently(lambda: self._pread(size, offset))
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
        # A process that is not forked opens the archive and maps the index itself.
        return self.__dict__ | {"descriptor": None, "records": self.header["index"]}

    def __setstate__(self, state):
        self.__dict__.update(state)
        _, self.records = read_index(Path(state["records"]))


def find(folder: str) -> tuple[Archive, Archive] | None:
    """The archives of train and val in `folder`, of the same classes; None if there are none.

    Raises InputError, or OSError for a folder that may not be entered.
    """
    folder = Path(folder)

    def labels_of_devkit():
        return devkit_classes(folder)

    def labels_of_kaggle():
        return kaggle_classes(folder / ZIP)

    if (folder / ZIP).exists():
        paths = (folder / ZIP, folder / ZIP)
        class_of = labels_of_kaggle
    else:
        paths = two_tars(folder)
        class_of = labels_of_devkit
    if paths is None:
        return None
    train_path, val_path = paths
    # First what is quick to find missing.
    val = Archive(val_path, "val", class_of)
    train = Archive(train_path, "train")
    folders.check_classes(train, val)
    return train, val


def two_tars(folder):
    """The paths of the tars of train and val, or None; raises InputError if only one is there."""
    for names in ((TRAIN, VAL), ("train.tar", "val.tar")):
        train, val = (folder / name for name in names)
        if train.exists() and val.exists():
            return train, val
        if train.exists():
            raise InputError(f"{val} is missing, but {train} exists")
        if val.exists():
            raise InputError(f"{train} is missing, but {val} exists")
    return None


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
    try:
        content = io.BytesIO(read_regular(paths[0]))
    except OSError as error:
        raise InputError(f"{paths[0]}: {error.strerror}") from error
    try:
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
    # A damaged file can raise anything.
    except Exception as error:
        raise InputError(f"{paths[0]} is damaged ({in_one_line(error)}): fetch it again") from error


def kaggle_classes(path):
    """{stem of a validation image: its class}, from the CSV file in or beside Kaggle's zip.

    Raises InputError.
    """
    name = "LOC_val_solution.csv"
    beside = path.with_name(name)
    try:
        if beside.exists():
            place = beside
            content = read_regular(beside)
        else:
            place = f"{path}:{name}"
            with zipfile.ZipFile(path) as archive:
                if archive.getinfo(name).file_size > LARGEST:
                    raise ValueError(f"it has more than {LARGEST:,} bytes")
                content = archive.read(name)
    # A damaged zip can raise anything.
    except Exception as error:
        refuse_to_call_damaged(path, error)
        raise InputError(
            f"{place} cannot be read, which has the labels of validation ({in_one_line(error)}): "
            f"fetch it from the same page, and put it beside {path}"
        ) from error
    # Excel puts a byte order mark before it.
    text = content.decode("utf-8-sig", errors="replace")
    rows = csv.DictReader(io.StringIO(text), restval="")
    classes = {}
    try:
        for row in rows:
            classes[row["ImageId"]], *_ = row["PredictionString"].split()
    except (KeyError, ValueError, csv.Error) as error:
        raise InputError(
            f"{place}, line {rows.line_num}: it needs the columns ImageId and PredictionString, "
            "and a label in each row: fetch it again"
        ) from error
    return classes


def refuse_to_call_damaged(path, error) -> None:
    """Raise InputError if it is the machine that refuses to read the file."""
    if refused := refusal(error):
        raise InputError(f"{path}: {refused.strerror}") from error


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
    """The index of an archive as it is now: (header, records), or None."""
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
            # It is of another format, or damaged.
            continue
    return None


def read_index(path):
    """(header, records) of an index. Raises OSError, or ValueError and others for another file."""
    return read_surely(path, parse_index)


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
    # It may lie beside an archive of somebody else.
    size_of_archive, _ = header["stat"]
    sizes_fit = (records["size"] >= 0) & (records["size"] <= size_of_archive)
    offsets_fit = (records["offset"] >= 0) & (records["offset"] <= size_of_archive)
    labels_fit = (records["label"] >= 0) & (records["label"] < len(header["classes"]))
    are_texts = all(isinstance(text, str) for text in [*header["classes"], header["left_out"]])
    fingerprint = header["fingerprint"]
    is_fingerprint = isinstance(fingerprint, int) and 0 <= fingerprint < 2**32
    if not (are_texts and is_fingerprint and (sizes_fit & offsets_fit & labels_fit).all()):
        raise ValueError("absurd")
    return header, records


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
                        content = patiently(partial(index_of, path, split, stat, class_of))
                    write_atomically(to, *content)
                    show(f"{to} is there after {time.perf_counter() - start:.1f} s")
            break
        # The folder may not be written, or its disk is full: the next place.
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
    files = files_in(path, stat[0])
    images, others = images_among(files.names, path, split)
    begin_with_classes(files.names, images, path, class_of)
    images = in_order_of_folders(images, files.names)
    classes = sorted({class_in(files.names[number]) for number in images})
    for name in others:
        if "/" in name and class_in(name) not in classes:
            of_class = [each for each in others if class_in(each) == class_in(name)]
            raise InputError(folders.no_images(f"{path}/{class_in(name)}", of_class))
    records = records_of(images, files, classes, path)
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


def files_in(path, size) -> Files:
    """All files in an archive of `size` bytes. Raises InputError."""
    files = Files()
    links = []
    with Progress(desc=path.name, total=size, unit="B", unit_scale=True) as bar:
        entries = zip_entries(path) if is_zip(path) else tar_entries(path, bar)
        for entry in entries:
            if entry.target:
                links.append(entry)
            else:
                files.add(entry)
    files.add_links(links, path)
    return files


def images_among(names, path, split):
    """The numbers of the images of `split` among files, and the names of its other files.

    Hidden ones do not count. `names` become those in a folder of `split`. Raises InputError.
    """
    # A tar is of one split, a zip has all.
    has_all_splits = is_zip(path)
    images = []
    others = []
    for number, name in enumerate(names):
        name = posixpath.normpath(name).lstrip("/")
        of_split = split in name.split("/")[:-1] or not has_all_splits
        if not of_split or folders.is_hidden(name):
            continue
        names[number] = name
        if is_image_file(name):
            images.append(number)
        else:
            others.append(name)
    if not images:
        raise InputError(folders.no_images(f"{path} (for {split})", others))
    # Names begin with what was packed: train/, or a folder above it.
    folders_of_images = {posixpath.dirname(names[number]) for number in images}
    above = posixpath.commonpath(folders_of_images).split("/")
    packed = ""
    if split in above:
        packed = "/".join(above[: above.index(split) + 1]) + "/"
    for number in images:
        names[number] = names[number].removeprefix(packed)
    return images, [name.removeprefix(packed) for name in others if name.startswith(packed)]


def begin_with_classes(names, images, path, class_of) -> None:
    """Let the name of each image begin with its class; raises InputError."""
    flat = [number for number in images if "/" not in names[number]]
    if not flat:
        return
    if class_of is None:
        raise InputError(f"{path}:{names[flat[0]]} is in no folder: it needs <class>/*.JPEG")
    classes = class_of()
    stems = {number: posixpath.splitext(names[number])[0] for number in images}
    unknown = [names[number] for number, stem in stems.items() if stem not in classes]
    if unknown:
        raise InputError(f"{path}:{unknown[0]} has no label ({len(unknown)} such images)")
    for number, stem in stems.items():
        names[number] = f"{classes[stem]}/{names[number]}"


def class_in(name):
    """The first folder of a name."""
    return name.partition("/")[0]


def in_order_of_folders(images, names):
    """`images`, sorted by name as torchvision's ImageFolder does.

    Of two with one name the last in the archive counts, as if they were unpacked.
    """

    def key(number):
        folder, _, file = names[number].rpartition("/")
        name_of_class, _, below = folder.partition("/")
        # No name has a "\0", and it comes before all other characters.
        return f"{name_of_class}\0{below}\0{file}"

    images = sorted(images, key=key)
    following = [*images[1:], None]
    return [
        number
        for number, next_one in zip(images, following, strict=True)
        if next_one is None or names[number] != names[next_one]
    ]


def records_of(images, files, classes, path):
    """What an index has of each image; a label is the number of its class. Raises InputError."""
    number_of = {name: number for number, name in enumerate(classes)}
    longest = max(
        (files.names[number] for number in images), key=lambda name: len(os.fsencode(name))
    )
    if len(os.fsencode(longest)) > LONGEST_NAME:
        raise InputError(f"{path} has names of over {LONGEST_NAME} bytes, such as {longest[:50]}")
    records = np.empty(len(images), record_type(len(os.fsencode(longest))))
    names = records["name"]
    labels = records["label"]
    for row, number in enumerate(images):
        name = files.names[number]
        names[row] = os.fsencode(name)
        labels[row] = number_of[class_in(name)]
    for field, column in files.columns.items():
        records[field] = np.asarray(column)[images]
    return records


def fingerprint_of(names) -> int:
    """The CRC-32 of names, as that of folders."""
    crc = 0
    before = b"/"
    for name in names:
        crc = zlib.crc32(before + name, crc)
        before = b"\n/"
    return crc


def zip_entries(path) -> Iterator[Entry]:
    """The files in a zip; an offset is that of the header. Raises InputError."""
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            infos = archive.infolist()
            comment = archive.comment
            size = os.path.getsize(path)
            file.seek(max(0, size - ZIP_END_SIZE - 2**16))
            last = file.read()
    # A damaged file can raise anything.
    except Exception as error:
        refuse_to_call_damaged(path, error)
        raise InputError(f"{path}: {error}, or it was cut off: fetch it again") from error
    start = min((info.header_offset for info in infos), default=0)
    rest = last[last.rindex(ZIP_END) + ZIP_END_SIZE + len(comment) :]
    if start > 0 or rest.strip(b"\0"):
        raise InputError(
            f"{path} has more before or behind the zip, perhaps another one, which would not be "
            "read: pack all files into one zip"
        )
    for info in infos:
        if info.is_dir():
            continue
        is_encrypted = info.flag_bits & 1
        if is_encrypted or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise InputError(
                f"{path}:{info.filename} is encrypted, or compressed by another method than "
                "deflate: pack it again, without"
            )
        if not 0 <= info.header_offset <= info.header_offset + info.compress_size <= size:
            raise InputError(f"{path}:{info.filename} is not within the zip: fetch it again")
        deflated = info.compress_type == zipfile.ZIP_DEFLATED
        yield Entry(info.filename, info.header_offset, info.compress_size, info.CRC, deflated)


def tar_entries(path, bar) -> Iterator[Entry]:
    """The files in a tar, and in tars in it, whose names become folders. Raises InputError."""
    try:
        with open(path, "rb") as file:
            begin = file.read(6)
            for magic, program in COMPRESSED.items():
                if begin.startswith(magic):
                    raise InputError(
                        f"{path} is compressed, and an image in it is no range of bytes: "
                        f"{program} it (JPEGs are as small without)"
                    )
            yield from entries_between(file, 0, os.fstat(file.fileno()).st_size, path, bar)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error


def entries_between(file, start, end, path, bar, in_another=False):
    """The entries of the tar from `start` to `end` in a file, which may be a tar in another."""
    for member in members_between(file, start, end, path):
        name = posixpath.normpath(member.name)
        is_tar = name.lower().endswith(".tar") and not folders.is_hidden(name)
        if member.islnk():
            yield Entry(name, target=posixpath.normpath(member.linkname))
        elif member.issym():
            target = posixpath.join(posixpath.dirname(name), member.linkname)
            yield Entry(name, target=posixpath.normpath(target))
        elif member.issparse() or not member.isreg():
            if (is_tar or is_image_file(name)) and not member.isdir():
                raise InputError(
                    f"{path}:{name} is a sparse or special file, and no range of bytes: "
                    "pack it again, without --sparse"
                )
        elif is_tar:
            if in_another:
                raise InputError(f"{path}:{name} is a tar within a tar within a tar: unpack it")
            begin = member.offset_data
            folder = f"{name[:-4]}/"
            for entry in entries_between(file, begin, begin + member.size, path, bar, True):
                target = entry.target and folder + entry.target
                yield entry._replace(name=folder + entry.name, target=target)
        else:
            yield Entry(name, member.offset_data, member.size)
        bar.update(member.offset_data - bar.n)


def members_between(file, start, end, path):
    """The members of the tar from `start` to `end` of a file; a whole one ends with zeros.

    tarfile reads the headers. Its own iterator takes a cut or damaged header for the end.
    """
    tar = tarfile.TarFile(fileobj=io.BytesIO(bytes(tarfile.RECORDSIZE)))
    tar.fileobj = file
    tar.offset = start
    while True:
        offset = tar.offset
        missing = offset + tarfile.BLOCKSIZE - end
        if missing > 0:
            raise InputError(cut_off(path, missing))
        file.seek(offset)
        if file.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE):
            require_zeros(file, end, path)
            return
        file.seek(offset)
        try:
            member = Member.fromtarfile(tar)
            # A text before it can say another size than its header.
            if member.size < 0:
                raise tarfile.InvalidHeaderError(f"a size of {member.size}")
        # RecursionError: many names for one file.
        except (tarfile.TarError, ValueError, RecursionError) as error:
            if file.tell() >= end:
                raise InputError(cut_off(path, tarfile.BLOCKSIZE)) from error
            if offset == 0:
                raise InputError(f"{path} is no tar archive ({error})") from error
            raise InputError(
                f"{path} is damaged at offset {offset} ({error}): fetch it again"
            ) from error
        missing = tar.offset - end
        if missing > 0:
            raise InputError(cut_off(path, missing))
        yield member


def require_zeros(file, end, path):
    """Raise InputError unless a file has nothing but zeros from where it is read up to `end`."""
    while content := file.read(min(2**20, end - file.tell())):
        if rest := content.lstrip(b"\0"):
            raise InputError(
                f"{path} has more behind the end of a tar, from offset {file.tell() - len(rest)} "
                "on, which would not be read: join tars with tar --concatenate, not with cat"
            )


def cut_off(path, missing):
    """What to say of a tar that ends too early."""
    whole = SIZES.get(path.name)
    if whole:
        missing = whole - os.path.getsize(path)
    least = "" if whole else "at least "
    return f"{path} was cut off: {least}{missing:,} bytes are missing: fetch it again"
