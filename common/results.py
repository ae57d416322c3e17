"""results.jsonl, the figures of a run: a line of JSON for each event."""

import json
from pathlib import Path


def read(path: Path) -> list[dict]:
    """The events in a results.jsonl. A run that was killed may end with a part of a line."""
    events = []
    for line in path.read_text().splitlines():
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return events


def keep_until(path: Path, position) -> None:
    """Drop the lines that a run at `position` writes again."""
    if not path.exists():
        return
    kept = []
    for event in read(path):
        is_evaluation = event["event"] == "evaluation"
        last = position.evaluated_at if is_evaluation else position.steps
        if event["step"] <= last:
            kept.append(json.dumps(event) + "\n")
    path.write_text("".join(kept))
