"""results.jsonl, the figures of a run: one JSON line per event."""

import json
from pathlib import Path

from common.files import read_regular, write_atomically


def read(path: Path) -> list[dict]:
    """The events in a results.jsonl; skips truncated lines and those of other programs."""
    events = []
    for line in read_regular(path).splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and {"event", "step"} <= event.keys():
            events.append(event)
    return events


def keep_until(path: Path, position) -> None:
    """Drop the lines that a run resumed at `position` will write again."""
    if not path.exists():
        return
    kept = []
    for event in read(path):
        is_evaluation = event["event"] == "evaluation"
        last = position.evaluated_at if is_evaluation else position.steps
        if event["step"] <= last:
            kept.append(json.dumps(event) + "\n")
    # Atomic: on a full disk the old file stays.
    write_atomically(path, "".join(kept).encode())
