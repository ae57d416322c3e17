"""What a recipe says to people: its errors, which launch.plain_exits reports, and its lines."""

import os
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


def show(text: str) -> None:
    """Print `text`. A terminal that is gone, or a full disk behind it, does not end the run."""
    try:
        print(text, flush=True)
    except OSError:
        # Python would fail again when it flushes at its end.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
