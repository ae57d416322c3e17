"""A checkpoint is whole or not there, and a file that is not what was saved never becomes a model."""

import argparse
import io
import multiprocessing
import os
import pickle
import random
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common import checkpoint

FUZZ = int(os.environ.get("FUZZ", 300))  # examples; make fuzz sets more
SAVED = {"epoch": 1, "step": 0, "model": {"weight": torch.arange(1000.0)}, "arguments": {"lr": 0.1, "wd": None},
         "epochs": [{"val": {"accuracy": 0.5}}], "world_size": 1}


def save(folder, epoch, step=0, keep=100, best=(), weights=SAVED["model"]["weight"]):
    checkpoint.save(folder, {**SAVED, "epoch": epoch, "step": step, "model": {"weight": weights}}, keep, best)
    return checkpoint.committed(folder)[0]


def names(folder):
    return sorted(path.name.rpartition("-")[0] or path.name for path in folder.iterdir())


def save_for_ever(folder, step, said):
    """Save as fast as it goes, and say each step once it is saved."""
    torch.set_num_threads(1)  # OpenMP's threads did not come along in the fork
    while True:
        save(folder, 0, step, keep=2, weights=torch.full((200_000,), float(step)))
        said.value = step
        step += 1


def test_kill_in_a_loop_that_saves(tmp_path):
    """SIGKILL at 50 random moments: what is there always loads, and is never older than what was said to be saved."""
    moments, said, step = random.Random(0), multiprocessing.Value("q", -1, lock=False), 0
    for _ in range(50):
        before = said.value
        saver = multiprocessing.get_context("fork").Process(target=save_for_ever, args=(tmp_path, step + 1, said))
        saver.start()
        while said.value == before:
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.03))
        saver.kill()
        saver.join()
        _, content, broken = checkpoint.find("auto", tmp_path)
        loaded = checkpoint.unpack(content)
        step = loaded["step"]
        assert step in (said.value, said.value + 1)
        assert torch.equal(loaded["model"]["weight"], torch.full((200_000,), float(step)))
        assert not broken
        checkpoint.read(tmp_path / "last.pt")  # the link may be one behind, but never leads nowhere
    assert step > 100
    checkpoint.tidy(tmp_path, 2, [])
    assert len(list(tmp_path.iterdir())) == 3, "two checkpoints and last.pt: the partial ones are swept"


@pytest.mark.parametrize("harm", ["truncated", "flipped"])
def test_every_kth_byte(harm, tmp_path, capsys):
    """Each is detected, and the previous one used."""
    good, newest = save(tmp_path, 1), save(tmp_path, 2)
    whole = newest.read_bytes()
    positions = range(0, len(whole), len(whole) // 250)
    assert len(positions) >= 250
    for position in positions:
        flipped = bytes([whole[position] ^ (1 << position % 8)])
        newest.write_bytes(whole[:position] + (flipped + whole[position + 1:] if harm == "flipped" else b""))
        path, _, broken = checkpoint.find("auto", tmp_path)
        assert (path, broken) == (good, [newest])
        assert f"skipped {newest}: it is broken" in capsys.readouterr().err
        with pytest.raises(SystemExit, match="2"):
            checkpoint.find(newest, None)
    capsys.readouterr()


def test_auto_when_all_are_bad(tmp_path, capsys):
    """It stops, and does not begin again; where there never was a checkpoint it begins."""
    assert checkpoint.find("auto", tmp_path) is None
    assert checkpoint.find("auto", tmp_path / "not made yet") is None
    for epoch in (1, 2):
        path = save(tmp_path, epoch)
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SystemExit, match="2"):
        checkpoint.find("auto", tmp_path)
    assert "no checkpoint in" in capsys.readouterr().err
    for path in checkpoint.committed(tmp_path):
        path.rename(f"{path}.broken")
    with pytest.raises(SystemExit, match="2"):
        checkpoint.find("auto", tmp_path)


def test_pickle_that_runs_code(tmp_path):
    """Refused although the digest in its name is right: the digest says that a file is whole, not who wrote it."""

    class Harm:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/canary",)

    buffer = io.BytesIO()
    torch.save({"format": checkpoint.FORMAT, "model": Harm()}, buffer)
    for content in (buffer.getvalue(), pickle.dumps(Harm())):
        path = tmp_path / f"epoch-0009-step-000000-{checkpoint.digest(content)}.pt"
        path.write_bytes(content)
        with pytest.raises(checkpoint.Broken, match="not a checkpoint"):
            checkpoint.read(path)
        save(tmp_path, 1)
        assert "epoch-0001" in checkpoint.find("auto", tmp_path)[0].name
    assert not (tmp_path / "canary").exists()
    torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert (tmp_path / "canary").exists(), "without weights_only it runs"


def test_what_stays(tmp_path):
    for epoch in range(1, 7):
        save(tmp_path, epoch, 0, keep=2, best=[2, 1] if epoch > 1 else [1])
        save(tmp_path, epoch, 7, keep=2, best=[2, 1] if epoch > 1 else [1])
    assert names(tmp_path) == ["best.pt", "epoch-0002-step-000000", "epoch-0006-step-000000", "epoch-0006-step-000007",
                               "last.pt"]
    assert "epoch-0006-step-000007" in (tmp_path / "last.pt").resolve().name
    assert "epoch-0002-step-000000" in (tmp_path / "best.pt").resolve().name


def test_crash_between_any_two_steps(tmp_path, monkeypatch):
    """Where each call to the file system in turn is the last one, the folder still has a good newest checkpoint."""
    calls = [(os, "replace"), (os, "fsync"), (type(tmp_path), "symlink_to"), (type(tmp_path), "unlink")]

    class Crash(BaseException):
        pass

    for crash_at in range(1, 30):
        folder = tmp_path / str(crash_at)
        folder.mkdir()
        save(folder, 1, keep=1, best=[1])
        count = 0

        def counted(function):
            def call(*args, **named):
                nonlocal count
                count += 1
                if count == crash_at:  # noqa: B023 - it is called in this very round
                    raise Crash
                return function(*args, **named)

            return call

        with monkeypatch.context() as patch:
            for owner, name in calls:
                patch.setattr(owner, name, counted(getattr(owner, name)))
            try:
                save(folder, 2, keep=1, best=[2, 1])
                crashed = False
            except Crash:
                crashed = True
        _, content, broken = checkpoint.find("auto", folder)
        assert checkpoint.unpack(content)["epoch"] in ((1, 2) if crashed else (2,))
        assert not broken
        checkpoint.read(folder / "last.pt")
        checkpoint.tidy(folder, 1, [2, 1])
        assert len(checkpoint.committed(folder)) == 1
        assert not list(folder.glob(".*"))
        if not crashed:
            return
    pytest.fail("it never ran to its end")


def test_clock_set_back(tmp_path):
    """The newest is that of the last step, whatever the clock said when it was written."""
    for epoch in (1, 2, 3):
        os.utime(save(tmp_path, epoch, keep=2), (10**9 - epoch, 10**9 - epoch))
    assert names(tmp_path) == ["epoch-0002-step-000000", "epoch-0003-step-000000", "last.pt"]
    assert "epoch-0003" in checkpoint.find("auto", tmp_path)[0].name


def test_a_name_without_digest(tmp_path):
    path = save(tmp_path, 1)
    copied = tmp_path / "mine.pt"
    copied.write_bytes(path.read_bytes())
    with pytest.raises(checkpoint.Broken, match="does not end with a digest"):
        checkpoint.read(copied)
    assert checkpoint.read(tmp_path / "last.pt") == path.read_bytes()


WHOLE = io.BytesIO()
torch.save({"format": checkpoint.FORMAT, **SAVED}, WHOLE)
WHOLE = WHOLE.getvalue()


@settings(max_examples=FUZZ, deadline=None, suppress_health_check=list(HealthCheck))
@given(edits=st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.binary(max_size=8), st.integers(0, 64)),
                      min_size=1, max_size=5))
def test_fuzz(edits, tmp_path_factory):
    """Whatever bytes a file has, with the right digest in its name: the dict of a checkpoint, or Broken."""
    content = bytearray(WHOLE)
    for position, inserted, removed in edits:
        content[position:position + removed] = inserted
    path = tmp_path_factory.getbasetemp() / f"fuzz-{checkpoint.digest(content)}.pt"
    path.write_bytes(content)
    try:
        checkpoint.read(path)
        loaded = checkpoint.unpack(content)
        assert isinstance(loaded["format"], int)
    except checkpoint.Broken as error:
        assert "\n" not in str(error)
    finally:
        path.unlink()


@settings(max_examples=FUZZ, deadline=None)
@given(st.recursive(st.none() | st.integers() | st.text(max_size=5) | st.floats(), max_leaves=10,
                    extend=lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner)))
def test_fuzz_of_the_content(values):
    """Any values where a checkpoint has others: refused in one line, or what was there is right for this run."""
    args = argparse.Namespace(**dict.fromkeys((*checkpoint.SAME, *checkpoint.SAME_ON_AS_MANY_RANKS), 1), evaluate=False)
    good = {"format": checkpoint.FORMAT, "world_size": 1, "step": 0, "arguments": vars(args)}
    checkpoint.check(good, "x", args, 1)
    for key in ("world_size", "step", "arguments"):  # unpack lets no format through that is not an int
        try:
            checkpoint.check({**good, key: values}, "x", args, 1)
        except SystemExit as end:
            assert end.code == 2
