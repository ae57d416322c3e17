"""What gives the inputs and outputs of a model their meaning, in its checkpoint."""

import json

from common.errors import InputError, brief


class Metadata(dict):
    """Such as Metadata(classes=["cat", "dog"], mean=[0.5]): any values that JSON has.

    It is a part of the state of a run. Whoever gets a checkpoint finds the names in it, and a run
    that goes on from one has to have the same.
    """

    def __init__(self, **values):
        # As they come back from a file: lists, no tuples.
        super().__init__(json.loads(json.dumps(values)))

    def differences(self, saved: dict) -> list[str]:
        """What differs in `saved`, in words. What only one of both has does not count."""
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
    """How `saved` differs from the `own` value of that name; of lists, the first place."""
    if isinstance(saved, list) and isinstance(own, list):
        if len(saved) != len(own):
            return f"it has {len(saved)} {name}, and this run {len(own)}"
        number = next(n for n in range(len(own)) if saved[n] != own[n])
        return (
            f"of its {name} number {number} is {quoted(saved[number])}, "
            f"and in this run {quoted(own[number])}"
        )
    return f"its {name} is {quoted(saved)}, and in this run {quoted(own)}"


def quoted(value) -> str:
    """The beginning of a value, a text in quotes."""
    return repr(brief(value)) if isinstance(value, str) else brief(value)
