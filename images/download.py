"""Download a data set's files, once for all processes."""

import contextlib
import glob
import io
import os
import shutil
import signal
import socket
import tempfile
from pathlib import Path

from common import lease
from common.errors import InputError
from common.process import signals


def download(folder: Path, files: list[str], fetch) -> None:
    """Download `files` by fetch(to), which takes a folder, unless `folder` has them.

    One process downloads, and the others wait. Raises InputError if it fails. Nothing of a failed
    download is left, nor of one that SIGTERM or Ctrl-C interrupted.
    """

    def missing():
        # Not exists(): a link to /dev/zero would be read without end.
        return [name for name in files if not (folder / name).is_file()]

    if not missing():
        return
    # A missing folder is created only with its files, so a typo leaves no folder behind.
    place = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    before = socket.getdefaulttimeout()
    # Time out after this many seconds without a byte; the default is never.
    socket.setdefaulttimeout(30)
    try:
        with (
            signals.clean_up_first(signal.SIGTERM, signal.SIGINT),
            lease.held(place / ".download.lock"),
        ):
            if missing():
                download_and_move(place, folder, missing(), fetch)
    except (OSError, RuntimeError, EOFError) as error:
        # The last line is the error of the last mirror.
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise InputError(
            f"{folder / (missing() or files)[0]} is missing and the download failed ({reason}): "
            "copy the files there, or train on generated data with --synthetic"
        ) from error
    finally:
        # The timeout applies to the whole process: restore it.
        socket.setdefaulttimeout(before)


def download_and_move(place: Path, folder: Path, files: list[str], fetch) -> None:
    """Fetch to a new folder in `place`, so that no partial file ever has a final name."""
    # `place` may be a folder that others share: the name says for what this one is.
    prefix = f".{folder.resolve().name}.downloading-"
    # Temporary folders that SIGKILL left behind.
    for left in place.glob(f"{glob.escape(prefix)}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=place, prefix=prefix) as to:
        with contextlib.redirect_stdout(io.StringIO()):
            fetch(to)
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(Path(to, name), folder / name)
