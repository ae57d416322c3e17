"""What a recipe says to people: its errors, which launch.plain_exits reports, and its lines."""

import os
import reprlib
import sys


class InputError(ValueError):
    """What the user gave does not fit: a flag, a file, a launcher. The message says what to do."""

    status = 2


class RunError(RuntimeError):
    """The run cannot go on: a full disk, a loss that is not finite. The message says what to do."""

    status = 1


def in_one_line(error: Exception) -> str:
    """The type and the beginning of the message of an error."""
    message = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {message}"


def brief(value) -> str:
    """The beginning of a value from a file, which can be of any size."""
    short = reprlib.Repr()
    short.maxlevel = 2
    return value[:200] if isinstance(value, str) else short.repr(value)


def printable(text: str) -> str:
    """`text` in one line, in which \\x1b stands for what a terminal would act on."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def show(line: str) -> None:
    """Print a line. A terminal that is gone, or a full disk behind it, does not end the run.

    Texts of files are a part of many lines: the names of classes, and what a checkpoint says.
    """
    try:
        print(printable(line), flush=True)
    except OSError:
        # Python would fail again when it flushes at its end.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
