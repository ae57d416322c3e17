"""torch.load for untrusted files: they run no code, and a small one cannot fill the memory."""

import os
import pickletools
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch

# Nested lists can hold one list many times: forty short ones print as 2**40 values.
MOST_VALUES = 1_000_000
BYTEARRAY = "it has a bytearray"


def load(path: Path | str, mapped: bool = True):
    """What torch.save wrote to the file `path`. If `mapped`, tensors are memory-mapped if possible.

    Raises OSError, ValueError for a malicious file, and any exception for a damaged one.
    """
    in_zip = zipfile.is_zipfile(path)
    for pickled in pickles_in_zip(path) if in_zip else pickles_before_1_6(path):
        refuse_bytearray(pickled)
    # weights_only: a pickle could run code. mmap: the ranks of a machine share the memory.
    saved = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped and in_zip)
    refuse_absurd_values(saved)
    return saved


def pickles_in_zip(path) -> Iterator[bytes]:
    """Yield the pickles that torch.load reads from a zip archive."""
    with zipfile.ZipFile(path) as archive:
        refuse_compressed(archive)
        for entry in archive.infolist():
            if entry.filename.endswith("data.pkl"):
                yield archive.read(entry)


def refuse_compressed(archive: zipfile.ZipFile) -> None:
    """Raise ValueError for compressed or overlapping entries, which torch.save never writes."""
    size = os.path.getsize(archive.filename)
    if sum(entry.file_size for entry in archive.infolist()) > size:
        raise ValueError("it is larger than its file")


def pickles_before_1_6(path):
    """The same for a file from torch before 1.6: four pickles, and then the tensors."""
    with open(path, "rb") as file:
        for _ in range(4):
            yield file


def refuse_bytearray(pickled) -> None:
    """Raise ValueError for bytearray(10**15): a few bytes in a pickle, and torch.load calls it."""
    for operation, argument, _ in pickletools.genops(pickled):
        if operation.name == "GLOBAL" and argument.endswith(" bytearray"):
            raise ValueError(BYTEARRAY)


def refuse_absurd_values(saved) -> None:
    """Raise ValueError for a bytearray, and for more than MOST_VALUES nested values."""
    left = [saved]
    count = 0
    while left:
        value = left.pop()
        count += 1
        if isinstance(value, bytearray):
            raise ValueError(BYTEARRAY)
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list | tuple | set):
            left += value
        if count + len(left) > MOST_VALUES:
            raise ValueError(f"it has more than {MOST_VALUES:,} values outside of tensors")
