"""Files that are there as a whole, or not at all."""

import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from common import lease


def cache_folder() -> Path:
    """The folder for what can be made again, in which no other user writes.

    Raises RuntimeError in a container whose user has no home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def read_regular(path) -> bytes:
    """The content of a file that has an end: no /dev/zero, and no pipe. Raises OSError."""
    # O_NONBLOCK: else it waits for somebody who writes to a pipe.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return file.read()


def write_atomically(path: Path, *parts) -> None:
    """Let `parts`, which are bytes or other buffers, be the file `path`, or none of them.

    Also in a crash. Raises OSError.
    """

    def write(file):
        for part in parts:
            file.write(part)

    replace(write_beside(path, write), path)


def write_beside(path: Path, write: Callable[[BinaryIO], object]) -> Path:
    """Make a file beside `path`, which write(file) writes, and replace() renames to `path`.

    Raises OSError, RunError as lease.require() does, and what `write` raises.
    """
    lease.require(path.parent)
    partial = path.with_name(f".{path.name}.partial")
    # One that a crash left may have another name by now: its content stays as it is. So does the
    # file behind a link that somebody else made there.
    partial.unlink(missing_ok=True)
    try:
        with open(partial, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        # Frees its space on a full disk.
        partial.unlink(missing_ok=True)
        raise
    return partial


def replace(partial: Path, path: Path) -> None:
    """Give the file `partial` the name `path`; raises OSError and RunError."""
    lease.require(path.parent)
    os.replace(partial, path)
    sync_folder(path.parent)


def link_or_copy(there: Path, path: Path) -> None:
    """Let `path` be another name of the file `there`, or a copy; raises OSError and RunError."""
    lease.require(path.parent)
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        os.link(there, partial)
    except OSError:
        # The file system has no hard links.
        with open(there, "rb") as file, open(partial, "xb") as copy:
            shutil.copyfileobj(file, copy)
            copy.flush()
            os.fsync(copy.fileno())
    lease.require(path.parent)
    os.replace(partial, path)
    # If both names already meant one file, os.replace has done nothing.
    partial.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Let new names in `folder` survive a power cut, where the file system can; raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # CIFS and some FUSE file systems refuse it. The file itself is on the disk.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(descriptor)
