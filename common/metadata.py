"""Class names and the like, saved with the model: what its inputs and outputs mean."""

import json

from common.errors import InputError, brief


class Metadata(dict):
    """Such as Metadata(classes=["cat", "dog"], mean=[0.5]): any JSON values.

    It is part of the state of a run, so whoever gets a checkpoint knows what its classes are, and a
    run that resumes from it must have the same ones.
    """

    def __init__(self, **values):
        # As they come back from a file: tuples become lists.
        super().__init__(json.loads(json.dumps(values)))

    def differences(self, saved: dict) -> list[str]:
        """What differs in `saved`, in words. Names that only one of the two has are ignored."""
        both = [name for name in self if name in saved]
        return [
            difference(name, saved[name], self[name]) for name in both if saved[name] != self[name]
        ]

    def state_dict(self) -> dict:
        return dict(self)

    def load_state_dict(self, saved: dict) -> None:
        """Raise InputError if `saved` differs."""
        if differences := self.differences(saved):
            raise InputError("; ".join(differences))


def difference(name: str, saved, own) -> str:
    """How `saved` differs from the `own` value of that name; for lists, the first difference."""
    if isinstance(saved, list) and isinstance(own, list):
        if len(saved) != len(own):
            return f"it has {len(saved)} {name}, and this run {len(own)}"
        number = next(n for n in range(len(own)) if saved[n] != own[n])
        return (
            f"its {name}[{number}] is {quoted(saved[number])}, "
            f"and in this run {quoted(own[number])}"
        )
    return f"its {name} is {quoted(saved)}, and in this run {quoted(own)}"


def quoted(value) -> str:
    """The beginning of a value; a string is in quotes."""
    return repr(brief(value)) if isinstance(value, str) else brief(value)
