"""What a run prints and writes: lines, results.jsonl, TensorBoard, traces."""

import gzip
import json
import os
import re

import pytest
import torch
from forked import compute
from launch import checkpoint, run, strategies
from recipes import ROOT

SINGLE = f"python {ROOT}/mnist/single.py --device cpu"


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """What a run of three epochs of 10 steps prints, and its folder."""
    folder = tmp_path_factory.mktemp("logged")
    flags = "--synthetic 640 --epochs 3 --log-interval 5 --checkpoint-every 4 --log-dir log"
    return compute(f"{SINGLE} {flags}", cwd=folder), folder / "log"


def results(log):
    return [json.loads(line) for line in (log / "results.jsonl").read_text().splitlines()]


def events(log, kind):
    """The lines of results.jsonl about evaluations, steps, or the start."""
    return [line for line in results(log) if line["event"] == kind]


def test_lines_within_an_epoch(logged):
    """With --log-interval 5 each fifth step is a line, and an event of results.jsonl."""
    printed, log = logged
    assert f"cpu ({os.cpu_count()} cores)" in printed
    expected = list(range(5, 35, 5))
    assert re.findall(r"^step (\d+)/30: ", printed, re.MULTILINE) == list(map(str, expected))
    steps = events(log, "step")
    assert [line["step"] for line in steps] == expected
    assert [line["samples"] for line in steps] == [320, 640] * 3
    assert {"train/loss", "train/accuracy", "train/lr", "perf/samples_per_sec"} <= set(steps[0])


def test_tensorboard_has_the_scalars(logged):
    """The same names, steps and values as results.jsonl, which also says what ran."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, log = logged
    scalars = EventAccumulator(str(log)).Reload()
    assert [line["step"] for line in events(log, "evaluation")] == [10, 20, 30]
    names = ["perf/data_wait", "perf/samples_per_sec", "perf/seconds"]
    names += ["train/accuracy", "train/loss", "train/lr", "val/accuracy", "val/loss"]
    assert sorted(scalars.Tags()["scalars"]) == names
    for name in names:
        lines = [line for line in results(log) if name in line]
        written = scalars.Scalars(name)
        assert [scalar.step for scalar in written] == [line["step"] for line in lines]
        assert [scalar.value for scalar in written] == pytest.approx([line[name] for line in lines])
    (start,) = events(log, "start")
    assert start["torch"] == torch.__version__
    assert start["config"]["epochs"] == 3


def test_the_best_epoch_is_kept(logged):
    _, log = logged
    accuracies = [line["val/accuracy"] for line in events(log, "evaluation")]
    assert len(set(accuracies)) > 1
    best = checkpoint(log, "best.pt")
    assert best["position"]["epoch"] == 1 + accuracies.index(max(accuracies))


def test_profile(tmp_path):
    """The trace has the steps of an epoch of 15 from the seventh on, with DDP's all-reduces."""
    command = f"{strategies(2, ROOT / 'mnist')['ddp_launch']} --model lenet --device cpu"
    compute(f"{command} --synthetic 960 -b 32 --epochs 2 --profile --log-dir log", cwd=tmp_path)
    # Named by the step at which its epoch begins, which is the first epoch.
    (trace,) = (tmp_path / "log").glob("trace-*")
    assert trace.name == "trace-0.json.gz"
    spans = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = [span.get("name", "") for span in spans]
    assert names.count("Optimizer.step#SGD.step") == 9
    assert names.count("gloo:all_reduce") >= 9


def test_progress_bar_on_a_terminal_only(logged, tmp_path):
    """Lines within an epoch are above the bar, if they are asked for."""
    printed, _ = logged
    assert "step/s" not in printed
    command = f"{SINGLE} --synthetic 2048 --epochs 1 --log-interval 16"
    shown = run(f"script -qec 'stty columns 100 rows 40; {command}' /dev/null", cwd=tmp_path)
    assert re.search("step/s.*loss", shown)
    assert re.findall(r"step (\d+)/32: ", shown) == ["16", "32"]
