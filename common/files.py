"""Atomic file writes, and reads that retry."""

import errno
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from common import lease

# Errors that may pass: a stale NFS handle, a server or disk that does not answer, a busy file, too
# many open files.
MAY_PASS = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ESTALE,
    errno.ETIMEDOUT,
}
# Seconds to wait before each retry.
PAUSES = (0.1, 0.5, 2, 5)


def refusal(error: BaseException | None) -> OSError | None:
    """The OSError that may pass, if one caused `error`: zipfile reports it as a damaged file."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in MAY_PASS:
            return error
        error = error.__cause__ or error.__context__
    return None


def retry(act: Callable):
    """act(), with retries for some seconds while an error may pass; raises the last one."""
    for pause in PAUSES:
        try:
            return act()
        except Exception as error:
            if refusal(error) is None:
                raise
        time.sleep(pause)
    return act()


def read_with_retries(path, read: Callable):
    """read(path, mapped=True), or if that fails, read(path, mapped=False).

    Libraries report some I/O errors as damage, such as an mmap that a network file system does not
    support. So the second try comes once the whole file could be read: an exception is then about
    the content, unless it is an OSError.
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
            # Not an I/O error: a damaged file can hold a negative offset.
            if error.errno in (None, errno.EINVAL):
                raise ValueError(str(error)) from error
            raise

    return retry(look_twice)


def cache_folder() -> Path:
    """The user's cache folder, in which no other user can write.

    Raises RuntimeError in a container whose user has no home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def read_regular(path) -> bytes:
    """The content of a regular file. Raises OSError, also for a pipe or a device."""

    def read():
        with open_regular(path) as file:
            return file.read()

    return retry(read)


def open_regular(path) -> BinaryIO:
    """Open a regular file to read it. Raises OSError, also for a pipe or a device."""
    try:
        # O_NONBLOCK: to open a pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except BlockingIOError:
        # Another program has a lease on the file (fcntl F_SETLEASE): wait until it lets go.
        descriptor = os.open(path, os.O_RDONLY)
    file = open(descriptor, "rb", buffering=0)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def write_atomically(path: Path, *parts) -> None:
    """Write `parts`, which are bytes or other buffers, to the file `path`, all or nothing.

    That holds in a crash, too. Raises OSError.
    """

    def write(file):
        for part in parts:
            file.write(part)

    replace(write_beside(path, write), path)


def write_beside(path: Path, write: Callable[[BinaryIO], object]) -> Path:
    """Make a temporary file beside `path` by write(file); replace() then renames it to `path`.

    Raises OSError, RunError as lease.require() does, and what `write` raises.
    """
    lease.require(path.parent)
    partial = path.with_name(f".{path.name}.partial")
    # Delete one that a crash left, not overwrite it: it may be a hard link to a checkpoint, or a
    # symbolic link that somebody else made.
    partial.unlink(missing_ok=True)
    try:
        with open(partial, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        # Free its space on a full disk.
        partial.unlink(missing_ok=True)
        raise
    return partial


def replace(partial: Path, path: Path) -> None:
    """Give the file `partial` the name `path`; raises OSError and RunError."""
    lease.require(path.parent)
    os.replace(partial, path)
    sync_folder(path.parent)


def link_or_copy(there: Path, path: Path) -> None:
    """Make `path` a hard link to the file `there`, or a copy; raises OSError and RunError."""
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
    # os.replace does nothing if both names are hard links to one file.
    partial.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """fsync `folder`, so that new names in it survive a power cut; raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # CIFS and some FUSE file systems cannot. The file itself has been synced.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(descriptor)
