"""Lock files, for a folder or a file. Each names its owner, which touches it every 10 s.

Not flock, which some file systems lack. The lock of a process that died is taken over: at once on
the same machine, and from another machine once nobody has touched it for 30 s.
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

# Seconds without a touch after which a lock file counts as stale.
EXPIRES = 30
# The same for a lock file that is empty or not ours: longer, as clocks of machines differ.
FORGOTTEN = 600
# The folders that hold() has locked, each with its lease and the token in its lock file
mine: dict[Path, tuple[SoftFileLease, str]] = {}


def hold(folder: Path) -> None:
    """Create `folder`, and lock it until this process ends.

    Else a requeued job and its old copy could write the same files. Raises InputError if another
    process holds the lock, or the folder cannot be written.
    """
    lease = SoftFileLease(folder / ".in-use", lease_duration=EXPIRES, on_compromise=end_if_taken)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_if_left_behind(lease)
        acquire_or_raise(lease)
    except Timeout as error:
        raise InputError(
            f"{folder} is in use by {owner_of(lease)}: wait until it ends, "
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
    """Remove a lock file that no recipe can own, and that nobody has touched lately.

    A power cut leaves an empty one, which filelock would respect for ever.
    """
    owner = lease.owner
    if owner and owner.lease_duration == EXPIRES:
        # filelock takes over a stale one of ours.
        return
    with suppress(OSError):
        # abs: a wrong clock may have left a time in the future.
        if abs(time.time() - os.stat(lease.lock_file).st_mtime) > FORGOTTEN:
            lease.force_break()


def require(folder: Path) -> None:
    """Raise RunError if this process has locked `folder`, but another one has taken the lock.

    This process may have been suspended, and must not overwrite the files of the other one.
    """
    if folder not in mine:
        return
    lease, token = mine[folder]
    for _ in range(10):
        owner = lease.owner
        if owner and owner.token == token:
            return
        # A process that tries to get the lock can move the file aside for a moment.
        time.sleep(0.1)
    raise RunError(
        f"{owner_of(lease)} has taken {folder} from this process, which no longer writes to it"
    )


def release(folder: Path) -> None:
    """Delete the lock file; if that fails, it counts as stale after a while."""
    lease, _ = mine.pop(folder)
    with suppress(OSError):
        lease.release()


def acquire_or_raise(lease: SoftFileLease) -> None:
    """Acquire `lease`; raises Timeout if its owner still runs."""
    try:
        # The previous run may still be ending.
        lease.acquire(timeout=2)
    except Timeout:
        owner = lease.owner
        if owner and owner.hostname == socket.gethostname():
            raise
        show(
            f"{lease.lock_file} belongs to {owner_of(lease)}: checking for {EXPIRES} s "
            "whether it still runs"
        )
        lease.acquire(timeout=EXPIRES + 5)


@contextmanager
def held(path: Path):
    """Hold the lock file `path` within a `with` block; waits until no other process holds it."""
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
    """The process and host that own the lock, for messages."""
    owner = lease.owner
    return f"process {owner.pid} on {owner.hostname}" if owner else "another process"


def end_if_taken(loss) -> None:
    """End this process: it was suspended for so long that another one has taken its lock."""
    # If only the touch failed, the next save says why.
    if loss.reason != "refresh-failed":
        show(f"another process has taken {loss.lock_file}, so this one ends")
        os._exit(1)
