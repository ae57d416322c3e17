"""What rank 0 logs: on a disk that fills up, and where TensorBoard is broken."""

import sys

import numpy as np
import pytest
import torch
from forked import compute
from recipes import ROOT

from common import log, results
from common.data import EpochSampler
from common.position import Position


def test_a_disk_that_was_full_for_a_moment(tmp_path):
    """tensorflow 8745: TensorBoard and results.jsonl go on."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, sys; sys.path.append({str(ROOT)!r})\n"
        "from pathlib import Path\n"
        "from common.data import EpochSampler\n"
        "from common.log import Log\n"
        "from common.position import Position\n"
        "folder = Path('disk')\n"
        "position = Position(EpochSampler(100, 1), epochs=1)\n"
        "log = Log(folder, position)\n"
        "log.start({}, [])\n"
        "for step in range(60):\n"
        "    if step == 20:\n"
        "        filler = open('disk/filler', 'wb', buffering=0)\n"
        "        try:\n"
        "            while filler.write(bytes(1000)) == 1000: pass\n"
        "        except OSError: pass\n"
        "    if step == 40:\n"
        "        os.unlink('disk/filler'); filler.close()\n"
        "    position.advance()\n"
        "    log.write('step', {'train/loss': 0.5, 'note': 'x' * 300})\n"
    )
    said = compute("python script.py", tmp_path, disk=("disk", "600k"))
    assert said.count("warning: no results are written") == 1
    assert "Traceback" not in said
    events = results.read(tmp_path / "copy" / "results.jsonl")
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert steps[:20] == list(range(1, 21))
    assert steps[-20:] == list(range(41, 61))
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator(str(tmp_path / "copy"))
    accumulator.Reload()
    assert accumulator.Scalars("train/loss")[-1].step == 60


@pytest.mark.parametrize("error", ["TypeError('other protobuf')", "AttributeError('np.bool8')"])
def test_a_tensorboard_of_other_versions(error, tmp_path, monkeypatch, capsys):
    """It is said once, before training, which goes on: tensorboard 6808 and 5708."""
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "__init__.py").write_text(f"raise {error}\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in list(sys.modules):
        if name.startswith(("tensorboard", "torch.utils.tensorboard")):
            monkeypatch.delitem(sys.modules, name)
    written = log.Log(tmp_path / "log", Position(EpochSampler(100, 1), epochs=1))
    written.start({}, [])
    assert capsys.readouterr().out.count("no TensorBoard events") == 1
    written.write("step", {"train/loss": 0.5})
    events = results.read(tmp_path / "log" / "results.jsonl")
    assert events[-1]["train/loss"] == 0.5


def test_progress_without_a_terminal(capsys):
    """It is a line, and a short wait has none."""
    with log.Progress(total=4, desc="train.tar") as bar:
        bar.update(2)
        assert capsys.readouterr() == ("", "")
        bar.display()
        assert capsys.readouterr().out.startswith("train.tar:  50%")
    assert capsys.readouterr() == ("", "")


def test_figures_of_torch_and_numpy(tmp_path):
    """transformers 10632: JSON has no float32; TensorBoard had none of them, without a word."""
    position = Position(EpochSampler(100, 10), epochs=1)
    run_log = log.Log(tmp_path, position)
    run_log.start({}, [])
    run_log.begin()
    position.advance()
    run_log.end(0)
    figures = {"a": np.float32(0.5), "b": torch.tensor(0.5), "c": np.int64(2), "d": 0.5}
    run_log.evaluation({}, {}, figures)
    event = results.read(tmp_path / "results.jsonl")[-1]
    assert [event[f"val/{name}"] for name in figures] == [0.5, 0.5, 2, 0.5]
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator(str(tmp_path))
    accumulator.Reload()
    assert [accumulator.Scalars(f"val/{name}")[0].value for name in figures] == [0.5, 0.5, 2, 0.5]


def test_folders_of_runs_that_start_at_once(monkeypatch):
    """hydra 2925: in the same second; in containers also with the same number of process."""
    monkeypatch.setattr(log.time, "strftime", lambda _: "20261129-120000")
    assert log.new_folder("mnist") != log.new_folder("mnist")
