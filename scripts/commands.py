"""Start commands as a user types them, and end the scripts that start them."""

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

from common import results
from common.errors import InputError, RunError


@contextmanager
def plain_exits():
    """End a script with one line on an InputError or RunError.

    SIGTERM and Ctrl-C raise an exception, so that it also ends what it has started.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    except (InputError, RunError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(error.status)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


class Command:
    """A running command line; it may begin with variables, as in a shell.

    `threads` is the number of threads of each of its processes. Leaving a `with` block ends it.
    After finish() or end() it has a `status`, the `seconds` it took, and `gib`, the memory of its
    largest process.
    """

    def __init__(self, line: str, threads: int | None = None, cwd=None, **variables):
        self.line = line
        self.status = None
        # (seconds since the start, line)
        self.printed = []
        own = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        # mpirun refuses to run as root, as in a container, without these.
        own |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if threads:
            own["OMP_NUM_THREADS"] = str(threads)
        self.began = time.perf_counter()
        self.process = subprocess.Popen(
            # env sets the variables that stand before the program.
            ["env", *shlex.split(line)],
            cwd=cwd,
            env=os.environ | own | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def _read(self):
        for line in self.process.stdout:
            self.printed.append((time.perf_counter() - self.began, line.rstrip()))

    def has_ended(self) -> bool:
        # poll() would reap the process, so that wait4(), which reports its memory, would fail.
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self.status is not None or os.waitid(os.P_PID, self.process.pid, options) is not None

    def finish(self, limit: float | None = None) -> None:
        """Wait until it has ended; kill it after `limit` seconds."""
        self.reader.join(limit)
        if self.reader.is_alive():
            os.kill(self.process.pid, signal.SIGKILL)
        self._take_status()

    def end(self) -> None:
        """Send it SIGTERM if it runs: a recipe saves, and ends without an evaluation."""
        if self.status is None:
            os.kill(self.process.pid, signal.SIGTERM)
            self._take_status()

    def _take_status(self):
        _, status, used = os.wait4(self.process.pid, 0)
        self.status = self.process.returncode = os.waitstatus_to_exitcode(status)
        self.seconds = time.perf_counter() - self.began
        # Linux counts in KiB.
        self.gib = used.ru_maxrss / 2**20
        # A process that it left behind can keep the pipe open.
        self.reader.join(5)

    def lines(self) -> list[str]:
        """The lines it printed, except blank ones."""
        return [line for _, line in self.printed if line.strip()]

    def last_words(self) -> str:
        """The last line that begins with "script.py: ", or else the last: torchrun prints more."""
        own = [line for line in self.lines() if re.match(r"\w+\.py: ", line)]
        return (own or self.lines() or [""])[-1]


def logged(log_dir: Path, kind: str) -> list[dict]:
    """The events of this kind that a recipe has written to results.jsonl so far."""
    file = Path(log_dir, "results.jsonl")
    events = results.read(file) if file.exists() else []
    return [event for event in events if event["event"] == kind]
