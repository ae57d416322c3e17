"""What a run prints and writes: lines, results.jsonl, TensorBoard, traces."""

import gzip
import json
import os
import re

import pytest
import torch
from forked import compute
from launch import (
    evaluations,
    run,
    strategies,
)
from recipes import ROOT


def start_of(folder):
    """The first line of results.jsonl."""
    return json.loads((folder / "results.jsonl").read_text().splitlines()[0])


def test_tensorboard_has_the_scalars(tmp_path):
    """The same names, steps and values as results.jsonl, which also says what ran."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    command = f"python {ROOT}/mnist/single.py --synthetic 512 --epochs 3 --log-dir log"
    assert f"cpu ({os.cpu_count()} cores)" in compute(command, cwd=tmp_path)
    events = EventAccumulator(str(tmp_path / "log")).Reload()
    names = ["perf/data_wait", "perf/images_per_sec", "perf/seconds"]
    names += ["train/accuracy", "train/loss", "train/lr", "val/accuracy", "val/loss"]
    assert sorted(events.Tags()["scalars"]) == names
    results = evaluations(tmp_path / "log")
    assert [result["step"] for result in results] == [8, 16, 24]
    for name in names:
        logged = events.Scalars(name)
        assert [event.step for event in logged] == [8, 16, 24]
        expected = [result[name] for result in results]
        assert [event.value for event in logged] == pytest.approx(expected)
    start = start_of(tmp_path / "log")
    assert start["torch"] == torch.__version__
    assert start["config"]["epochs"] == 3
    accuracies = [result["val/accuracy"] for result in results]
    assert len(set(accuracies)) > 1
    best = torch.load(tmp_path / "log" / "best.pt", weights_only=True)
    assert best["position"]["epoch"] == 1 + accuracies.index(max(accuracies))


def test_lines_within_an_epoch(tmp_path):
    """With --log-interval 5 each fifth step is a line, an event of results.jsonl and a scalar."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    command = f"python {ROOT}/mnist/single.py --synthetic 1280 --epochs 1 --log-dir log"
    output = compute(f"{command} --log-interval 5 --checkpoint-every 4", cwd=tmp_path)
    assert re.findall(r"^step (\d+)/20: ", output, re.MULTILINE) == ["5", "10", "15", "20"]
    lines = map(json.loads, (tmp_path / "log" / "results.jsonl").read_text().splitlines())
    steps = [line for line in lines if line["event"] == "step"]
    assert [line["step"] for line in steps] == [5, 10, 15, 20]
    assert [line["samples"] for line in steps] == [320, 640, 960, 1280]
    assert {"train/loss", "train/accuracy", "train/lr", "perf/images_per_sec"} <= set(steps[0])
    events = EventAccumulator(str(tmp_path / "log")).Reload().Scalars("train/loss")
    # the evaluation has the step of the last line
    assert [event.step for event in events] == [5, 10, 15, 20, 20]


# an epoch of 15 steps, and one of 40
@pytest.mark.parametrize(("images", "steps"), [(960, 9), (2560, 10)])
def test_profile(images, steps, tmp_path):
    """The trace has up to ten steps from the seventh on, with DDP's all-reduces."""
    command = strategies(2, ROOT / "mnist")["ddp_launch"]
    compute(
        f"{command} --synthetic {images} -b 32 --epochs 2 --profile --log-dir log", cwd=tmp_path
    )
    # named by the step at which its epoch begins, which is the first epoch
    traces = sorted((tmp_path / "log").glob("trace-*"))
    assert [path.name for path in traces] == ["trace-0.json.gz"]
    events = json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert names.count("Optimizer.step#SGD.step") == steps
    assert names.count("gloo:all_reduce") >= steps


def test_progress_bar_on_a_terminal_only(tmp_path):
    """Lines within an epoch are above the bar, if they are asked for."""
    command = f"python {ROOT}/mnist/single.py --synthetic 2048 --epochs 1"
    assert "step/s" not in run(f"{command} --log-dir plain", cwd=tmp_path)
    shown = run(
        f"script -qec 'stty columns 100 rows 40; {command} --log-interval 16' /dev/null",
        cwd=tmp_path,
    )
    assert "step/s" in shown
    assert "loss=" in shown
    assert re.findall(r"step (\d+)/32: ", shown) == ["16", "32"]
