"""scripts/fastest.py: its trials are real runs, and the line that it recommends can be typed."""

import re

import pytest
from forked import refused
from launch import run
from recipes import ROOT

from scripts import fastest

FASTEST = f"python {ROOT}/scripts/fastest.py"
SMALL = "--synthetic 6400 --model lenet --device cpu --seconds 0.2 --turns 1"


def test_recommended_line(tmp_path):
    shown = run(f"{FASTEST} {ROOT}/mnist/single.py {SMALL}", tmp_path)
    rows = re.findall(r"^\| (.+?) \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \| (\d+) \|$", shown, re.M)
    names = [row[0] for row in rows]
    assert names[0] == "default"
    assert {"bf16", "--channels-last"} <= set(names)
    assert any("processes: 2" in name or "OMP_NUM_THREADS" in name for name in names)
    first = float(rows[0][1].replace(",", ""))
    for _, speed, ratio, memory, _ in rows:
        assert float(speed.replace(",", "")) / first == pytest.approx(float(ratio), abs=0.02)
        assert 0.1 < float(memory) < 10
    recommended = re.findall(r"^    (.+)$", shown, re.M)
    assert len(recommended) == ("the fastest trained" in shown)
    for line in recommended:
        assert "epoch 1/" in run(f"env {line} --epochs 1 --dry-run", tmp_path)
    assert not (tmp_path / "runs").exists()


def test_settings_train_the_same():
    """Another number of processes gets the default's global batch and rate."""
    default = fastest.Setting("fp32", 4)
    search = fastest.Search(ROOT / "mnist", ["-b", "8"], default, 1)
    search.same_training = ["-G", "32", "--lr", "0.08"]
    assert search.command(default).endswith(
        "--nproc-per-node=4 " + f"{ROOT}/mnist/ddp_launch.py -b 8"
    )
    one = fastest.Setting("bf16", 1, channels_last=True)
    assert search.command(one).endswith(
        "mnist/ddp_amp.py -b 8 -G 32 --lr 0.08 --amp-dtype bf16 --channels-last"
    )


def event(epoch, samples, seconds):
    return {"epoch": epoch, "samples": samples, "perf/images_per_sec": samples / seconds}


def test_speed_between_lines():
    """Without what came before the first line of an epoch: a start, or an evaluation."""
    events = [event(0, 10, 5), event(0, 30, 6), event(1, 10, 7), event(1, 20, 8)]
    assert fastest.trained(events) == (30, 2, 2)
    assert fastest.trained(events[:1]) == (0, 0, 0)


def test_wrong_input(tmp_path):
    assert "give one of single.py" in refused(f"{FASTEST} {ROOT}/mnist/hvd.py", tmp_path)
    assert "give one of single.py" in refused(f"{FASTEST} none/single.py", tmp_path)
    # What the recipe says.
    assert "unrecognized arguments: --no-such-flag" in refused(
        f"{FASTEST} {ROOT}/mnist/single.py --no-such-flag", tmp_path
    )
