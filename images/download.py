"""The download of a data set's files, once for all processes."""

import contextlib
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
    """Let `fetch(to)` download `files` to a folder, unless they are in `folder`.

    One process does, and the others wait for it. Raises InputError if it fails, and then nothing
    of it is left, as also after SIGTERM or Ctrl-C.
    """

    def missing():
        # A link to /dev/zero would be read without end.
        return [name for name in files if not (folder / name).is_file()]

    if not missing():
        return
    # A folder that is not there is made once its files are: a typo makes none.
    place = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    before = socket.getdefaulttimeout()
    # Seconds without a byte; the default is to wait for ever.
    socket.setdefaulttimeout(30)
    try:
        with (
            signals.clean_up_first(signal.SIGTERM, signal.SIGINT),
            lease.held(place / ".download.lock"),
        ):
            if missing():
                download_and_move(place, folder, missing(), fetch)
    except (OSError, RuntimeError, EOFError) as error:
        # The last mirror's reason.
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise InputError(
            f"{folder / (missing() or files)[0]} is missing and the download failed ({reason}): "
            "copy the files there, or train on generated data with --synthetic"
        ) from error
    finally:
        # It is that of the whole process.
        socket.setdefaulttimeout(before)


def download_and_move(place: Path, folder: Path, files: list[str], fetch) -> None:
    """Fetch to a new folder in `place`, so that no half file ever has a final name."""
    # One that SIGKILL left.
    for left in place.glob(".downloading-*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=place, prefix=".downloading-") as to:
        with contextlib.redirect_stdout(io.StringIO()):
            fetch(to)
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(Path(to, name), folder / name)
