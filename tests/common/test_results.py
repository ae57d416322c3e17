"""results.jsonl, of a run that goes on."""

import json

import pytest

from common import results
from common.data import EpochSampler
from common.position import Position


@pytest.mark.parametrize("line", [b'{"step": 10, "ep\0\xff\xfe', b'{"note": "mine"}\n', b"[1]\n"])
def test_lines_of_others_in_the_results(line, tmp_path):
    """A run that goes on drops them, and keeps its own."""
    position = Position(EpochSampler(100, 7), epochs=5)
    position.steps = 10
    own = [{"step": step, "event": "step"} for step in (5, 10)]
    path = tmp_path / "results.jsonl"
    path.write_bytes(json.dumps(own[0]).encode() + b"\n" + line)
    results.keep_until(path, position)
    with path.open("a") as file:
        file.write(json.dumps(own[1]) + "\n")
    assert [json.loads(text) for text in path.read_text().splitlines()] == own
