"""The download of a data set's files, once for all processes."""

import contextlib
import io
import os
import socket
import tempfile
from pathlib import Path

from common import lease
from common.errors import InputError


def download(folder: Path, files: list[str], fetch) -> None:
    """Let `fetch(to)` download `files` to a folder, unless they are in `folder`.

    One process does, and the others wait for it. Raises InputError if it fails.
    """

    def missing():
        # A link to /dev/zero would be read without end.
        return [name for name in files if not (folder / name).is_file()]

    if not missing():
        return
    before = socket.getdefaulttimeout()
    # Seconds without a byte; the default is to wait for ever.
    socket.setdefaulttimeout(30)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with lease.held(folder / ".download.lock"):
            if missing():
                download_and_move(folder, missing(), fetch)
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


def download_and_move(folder: Path, files: list[str], fetch) -> None:
    """Fetch to a folder beside them, so that no half file ever has a final name."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".downloading-") as to:
        with contextlib.redirect_stdout(io.StringIO()):
            fetch(to)
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(Path(to, name), folder / name)
