"""Files that are there as a whole, or not at all."""

import errno
import os
from pathlib import Path


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Replace the file `path` as a whole, also in a crash; raises OSError."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        # Frees its space on a full disk.
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


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
