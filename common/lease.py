"""What one process at a time may use: a small file names its owner, which touches it every 10 s.

Not flock, which some file systems lack. The file of a process that died is taken over: at once on
the same machine, on another one when nobody has touched it for 30 s.
"""

import multiprocessing.util
import os
import socket
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import SoftFileLease, Timeout

from common.errors import InputError, RunError, show
from common.process import launch

# Seconds without a touch after which a file counts as left behind.
EXPIRES = 30
# The same for a file that does not say so: longer, as the clocks of machines differ.
FORGOTTEN = 600
# What hold() holds, and the token in the file that says so
mine: dict[Path, tuple[SoftFileLease, str]] = {}


def hold(folder: Path) -> None:
    """Create `folder`, and hold it until this process ends.

    A job that was queued again and its copy would write the same files. Raises InputError if
    another process holds it, or if it cannot be written.
    """
    lease = SoftFileLease(folder / ".in-use", lease_duration=EXPIRES, on_compromise=end_if_taken)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_if_left_behind(lease)
        acquire_or_raise(lease)
    except Timeout as error:
        raise InputError(
            f"{folder} is in use by {owner_of(lease)}: wait for its end, "
            "or choose another --log-dir"
        ) from error
    except OSError as error:
        raise InputError(
            f"cannot write to {folder} ({error.strerror}): choose another --log-dir"
        ) from error
    mine[folder] = lease, lease.token
    # Unlike atexit, this also works in a process of mp.spawn.
    at_exit = multiprocessing.util.Finalize(None, release, (folder,), exitpriority=0)
    launch.to_give_back.append(at_exit)


def remove_if_left_behind(lease: SoftFileLease) -> None:
    """Remove a file that no process of these recipes can have, and that nobody has touched lately.

    A power cut leaves an empty one, which filelock would keep for ever.
    """
    owner = lease.owner
    if owner and owner.lease_duration == EXPIRES:
        # filelock takes it over.
        return
    with suppress(OSError):
        # A clock that was wrong may have left a time to come.
        if abs(time.time() - os.stat(lease.lock_file).st_mtime) > FORGOTTEN:
            lease.force_break()


def require(folder: Path) -> None:
    """Raise RunError if this process holds `folder`, and another one has taken it meanwhile.

    It may have been suspended: then it must not write over what the other one has written.
    """
    if folder not in mine:
        return
    lease, token = mine[folder]
    for _ in range(10):
        owner = lease.owner
        if owner and owner.token == token:
            return
        # Who wants the folder can move the file aside for a moment.
        time.sleep(0.1)
    raise RunError(
        f"{owner_of(lease)} has taken {folder} from this one, which writes no more there"
    )


def release(folder: Path) -> None:
    """Delete its file; where that fails, it counts as left behind after a while."""
    lease, _ = mine.pop(folder)
    with suppress(OSError):
        lease.release()


def acquire_or_raise(lease: SoftFileLease) -> None:
    """Acquire `lease`; raises Timeout if its owner still runs."""
    try:
        # A predecessor may still be ending.
        lease.acquire(timeout=2)
    except Timeout:
        owner = lease.owner
        if owner and owner.hostname == socket.gethostname():
            raise
        show(f"{lease.lock_file} is of {owner_of(lease)}: looking for {EXPIRES} s if it still runs")
        lease.acquire(timeout=EXPIRES + 5)


@contextmanager
def held(path: Path):
    """Hold the file `path` within a `with` block, which begins when no other process does."""
    lease = SoftFileLease(path, lease_duration=EXPIRES)
    remove_if_left_behind(lease)
    try:
        lease.acquire(timeout=10)
    except Timeout:
        show(f"waiting for {owner_of(lease)}, which holds {path}")
        lease.acquire()
    try:
        yield
    finally:
        lease.release()


def owner_of(lease: SoftFileLease) -> str:
    """Its process and host, for people."""
    owner = lease.owner
    return f"process {owner.pid} on {owner.hostname}" if owner else "another process"


def end_if_taken(loss) -> None:
    """End this process: it stood still for so long that another one has taken its folder."""
    # Where it only cannot touch the file, a save will say why.
    if loss.reason != "refresh-failed":
        show(f"another process has taken {loss.lock_file}, so this one ends")
        os._exit(1)
