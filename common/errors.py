"""Errors, which launch.plain_exits() reports in one line, and safe printing."""

import os
import reprlib
import sys


class InputError(ValueError):
    """A wrong flag, file or launcher: the user has to change it. The message says what to do."""

    status = 2


class RunError(RuntimeError):
    """The run has failed: a full disk, a loss that is not finite. The message says what to do."""

    status = 1


def in_one_line(error: Exception) -> str:
    """The type and the beginning of the message of an error."""
    message = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {message}"


def brief(value) -> str:
    """The beginning of a value from an untrusted file, which can be of any size."""
    short = reprlib.Repr()
    short.maxlevel = 2
    return value[:200] if isinstance(value, str) else short.repr(value)


def printable(text: str) -> str:
    """`text` in one line, with control characters escaped, such as \\x1b."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def show(line: str) -> None:
    """Print a line. The run continues if stdout is a closed terminal, or a file on a full disk.

    Many lines quote untrusted files, such as class names in a checkpoint: so they are escaped.
    """
    try:
        # In one write, so that the lines of several ranks do not mix.
        print(f"{printable(line)}\n", end="", flush=True)
    except OSError:
        # Else Python fails again when it flushes stdout at exit.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
