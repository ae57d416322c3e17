"""--profile, of a loop that is left before its end."""

import gzip
import json

import pytest
import torch

from common.process import profiler

pytestmark = pytest.mark.check


@pytest.mark.parametrize("leave", ["break", "end"])
def test_a_trace_of_a_loop_that_ends_within_it(leave, tmp_path, capsys):
    """By a signal, or by --max-steps."""
    path = tmp_path / "trace.json.gz"
    for step in profiler.trace(range(1, 9 if leave == "end" else 100), path):
        torch.ones(2).add_(step)
        if step == 8 and leave == "break":
            break
    assert f"--profile: {path}\n" in capsys.readouterr().out
    with gzip.open(path) as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    # Of two steps after the six that it leaves out.
    assert names.count("aten::add_") == 2


def test_a_loop_that_ends_before_the_trace(tmp_path, capsys):
    path = tmp_path / "trace.json.gz"
    assert list(profiler.trace(range(5), path)) == list(range(5))
    assert "no trace: fewer than 7 steps" in capsys.readouterr().out
    assert not path.exists()
