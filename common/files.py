"""Files that are there as a whole, or not at all."""

import errno
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from common import lease

# What a machine refuses for a moment: a handle of NFS is stale, a server or a disk does not answer,
# a file is busy, or too many are open.
MAY_PASS = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ESTALE,
    errno.ETIMEDOUT,
}
# Seconds to wait before each further try.
PAUSES = (0.1, 0.5, 2, 5)


def refusal(error: BaseException | None) -> OSError | None:
    """The OSError that may pass, if one is behind `error`: zipfile words it as a damaged file."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in MAY_PASS:
            return error
        error = error.__cause__ or error.__context__
    return None


def patiently(act: Callable):
    """act(), again for some seconds while the machine refuses it; raises what the last one does."""
    for pause in PAUSES:
        try:
            return act()
        except Exception as error:
            if refusal(error) is None:
                raise
        time.sleep(pause)
    return act()


def read_surely(path, read: Callable):
    """read(path, mapped=True), or read(path, mapped=False) once the whole file could be read.

    What a machine refuses, mmap of some network file systems for example, looks like damage in the
    words of a library. So what this raises is about the content, unless it is an OSError.
    """

    def look_twice():
        try:
            return read(path, mapped=True)
        except Exception:
            with open_regular(path) as file:
                while file.read(2**20):
                    pass
        try:
            return read(path, mapped=False)
        except OSError as error:
            # A damaged file can name a place before its beginning.
            if error.errno in (None, errno.EINVAL):
                raise ValueError(str(error)) from error
            raise

    return patiently(look_twice)


def cache_folder() -> Path:
    """The folder for what can be made again, in which no other user writes.

    Raises RuntimeError in a container whose user has no home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def read_regular(path) -> bytes:
    """The content of a file that has an end: no /dev/zero, and no pipe. Raises OSError."""

    def read():
        with open_regular(path) as file:
            return file.read()

    return patiently(read)


def open_regular(path) -> BinaryIO:
    """Open a file that has an end, to read it. Raises OSError."""
    try:
        # O_NONBLOCK: else it waits for somebody who writes to a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except BlockingIOError:
        # It is no pipe: another program has a lease on it, and gives it back.
        descriptor = os.open(path, os.O_RDONLY)
    file = open(descriptor, "rb", buffering=0)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file


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
