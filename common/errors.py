"""The two errors that a recipe reports in one line, without a traceback (launch.plain_exits)."""


class InputError(ValueError):
    """What the user gave does not fit: a flag, a file, a launcher. The message says what to do."""

    status = 2


class RunError(RuntimeError):
    """The run cannot go on: a full disk, a loss that is not finite. The message says what to do."""

    status = 1
