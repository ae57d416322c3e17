"""A checkpoint is whole or absent, and a file that differs from what was saved is never loaded."""

import builtins
import errno
import io
import multiprocessing
import os
import pathlib
import pickle
import random
import re
import time
import zipfile

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launch import assert_same, random_seed

from common import checkpoint
from common.data import EpochSampler
from common.errors import InputError
from common.position import Position
from common.ranks import World

pytestmark = pytest.mark.check

FUZZ = int(os.environ.get("FUZZ", 100))  # examples; make fuzz sets more
FLIPS = 500
# OSError: an offset before the start of a damaged archive.
REFUSED = (checkpoint.CorruptCheckpoint, OSError)
MODEL = torch.nn.Linear(40, 25)
CONFIG = {"lr": 0.1, "weight_decay": None}
ALONE = World(torch.device("cpu"))


def save(folder, epoch, weights=None, best=False):
    state = {"position": {"epoch": epoch}, "model": weights or MODEL.state_dict()}
    checkpoint.save(folder, state, CONFIG, best)


def position_of_a_run():
    return Position(EpochSampler(100, 7), epochs=5)


def epoch_of(saved):
    return saved["position"]["epoch"]


def save_forever(folder, epoch, said):
    """Save as fast as possible, and report each epoch in `said` once it is saved."""
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    while True:
        save(folder, epoch, {"weight": torch.full((200_000,), float(epoch))}, best=epoch % 2 == 0)
        said.value = epoch
        epoch += 1


def test_kill_in_a_loop_that_saves(tmp_path):
    """At 20 random moments: `auto` finds a whole checkpoint, as new as the last one reported."""
    moments, said, epoch = random.Random(0), multiprocessing.Value("q", -1, lock=False), 0
    for _ in range(20):
        before = said.value
        saver = multiprocessing.get_context("fork").Process(
            target=save_forever, args=(tmp_path, epoch + 1, said)
        )
        saver.start()
        while said.value == before:
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.1))
        saver.kill()
        saver.join()
        found = checkpoint.find("auto", tmp_path)
        epoch = epoch_of(found.saved)
        assert epoch in (said.value, said.value + 1)
        assert torch.equal(found.saved["model"]["weight"], torch.full((200_000,), float(epoch)))
        assert not found.damaged
        # The second save is the first of the best.
        if epoch > 2:
            checkpoint.read(tmp_path / "best.pt")
    # Three checkpoints; what kills leave behind does not pile up.
    assert len(list(tmp_path.iterdir())) <= 5


class Crash(BaseException):
    pass


def crash_at(number, monkeypatch):
    """Let the file-system call with this number, and each later one, raise Crash; the patches."""
    calls = [
        (os, "replace"),
        (os, "fsync"),
        (os, "open"),
        (os, "link"),
        (pathlib.Path, "unlink"),
        (builtins, "open"),
    ]
    count = 0

    def counted(function):
        def call(*args, **named):
            nonlocal count
            count += 1
            if count >= number:
                raise Crash
            return function(*args, **named)

        return call

    patches = monkeypatch.context()
    patch = patches.__enter__()
    for owner, name in calls:
        patch.setattr(owner, name, counted(getattr(owner, name)))
    return patches


@pytest.mark.parametrize("earlier", [0, 1, 2])
def test_crash_between_any_two_steps(earlier, tmp_path, monkeypatch):
    """At each file-system call of a save of last.pt and best.pt in turn, after `earlier` saves.

    The newest checkpoint is good; if there is none yet, nothing prevents a run from starting.
    best.pt is good, too, and as new as last.pt; the next save does not change it, although a crash
    can leave a partial file that is another name of it.
    """
    two_names = False
    for number in range(1, 30):
        folder = tmp_path / str(number)
        folder.mkdir()
        last, best, partial = folder / "last.pt", folder / "best.pt", folder / ".last.pt.partial"
        for epoch in range(earlier):
            save(folder, epoch, best=True)
        patches = crash_at(number, monkeypatch)
        try:
            save(folder, earlier, best=True)
            crashed = False
        except Crash:
            crashed = True
        finally:
            patches.__exit__(None, None, None)
        found = checkpoint.find("auto", folder)
        assert not found.damaged
        if earlier:
            assert found.path == last, "it is never absent"
        if found.path or not crashed or earlier:
            expected = (earlier - 1, earlier) if crashed else (earlier,)
            assert epoch_of(found.saved) in expected
        if last.exists():
            assert epoch_of(checkpoint.read(best)[0]) in (epoch_of(found.saved), earlier)
        if partial.exists() and best.exists():
            two_names = two_names or partial.samefile(best)
        before = best.read_bytes() if best.exists() else None
        save(folder, 9)  # the resumed run
        assert epoch_of(checkpoint.find("auto", folder).saved) == 9
        assert (best.read_bytes() if best.exists() else None) == before
        assert not list(folder.glob(".last*"))
        if not crashed:
            assert number > 8
            assert two_names
            return
    pytest.fail("it never finished")


@pytest.fixture
def folder(tmp_path):
    """A folder with a good last.pt, previous.pt and best.pt."""
    for epoch in (1, 2):
        save(tmp_path, epoch, best=True)
    return tmp_path


def test_bit_flips(folder):
    """Each of 500 files is refused, and `auto` takes previous.pt, or read as it was saved."""
    draw, newest = random.Random(random_seed()), folder / "last.pt"
    whole, saved = newest.read_bytes(), checkpoint.read(newest)[0]
    refused = 0
    # In its directory: the bit that makes torch take an entry for a folder.
    with zipfile.ZipFile(newest) as archive:
        entries = re.finditer(b"PK\x01\x02", whole[archive.start_dir :])
        folders = [8 * (archive.start_dir + entry.start() + 38) + 4 for entry in entries]
    assert len(folders) > 5
    for bit in folders + [draw.randrange(8 * len(whole)) for _ in range(FLIPS)]:
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        newest.write_bytes(content)
        try:
            assert_same(checkpoint.read(newest)[0], saved)
            # Where torch does not map the file, it reads such an entry as whatever is in memory.
            assert bit not in folders
        except REFUSED as error:
            assert "\n" not in str(error)
            found = checkpoint.find("auto", folder)
            assert (found.path, epoch_of(found.saved)) == (folder / "previous.pt", 1)
            assert [one for one, _ in found.damaged] == [newest]
            refused += 1
    # Most flips do harm.
    assert refused > FLIPS / 2


def test_truncated(folder):
    """At every 1/100 of its length."""
    newest = folder / "last.pt"
    whole = newest.read_bytes()
    for length in range(0, len(whole), len(whole) // 100):
        newest.write_bytes(whole[:length])
        found = checkpoint.find("auto", folder)
        assert (found.path, epoch_of(found.saved)) == (folder / "previous.pt", 1)
        assert [one for one, _ in found.damaged] == [newest]


def test_a_damaged_file_that_is_named(folder):
    """--resume FILE takes that file or none."""
    newest = folder / "last.pt"
    newest.write_bytes(newest.read_bytes()[:-100])
    with pytest.raises(InputError) as raised:
        checkpoint.find(str(newest), None)
    assert "\n" not in str(raised.value)
    assert str(newest) in str(raised.value)


@pytest.mark.parametrize("harm", ["damaged", "set aside"])
def test_auto_when_all_are_bad(harm, folder):
    """It stops, and does not begin again."""
    for path in folder.glob("*.pt"):
        if harm == "damaged":
            path.write_bytes(path.read_bytes()[:-1])
        else:
            path.rename(f"{path}.damaged")
    with pytest.raises(InputError) as raised:
        checkpoint.find("auto", folder)
    assert "\n" not in str(raised.value)


def test_a_folder_that_cannot_be_read(folder):
    """last.pt exists but is not a file: that differs from having no checkpoint."""
    (folder / "last.pt").unlink()
    (folder / "last.pt").mkdir()
    found = checkpoint.find("auto", folder)
    assert found.path == folder / "previous.pt"
    assert len(found.damaged) == 1


def test_pickle_that_runs_code(folder, tmp_path):
    """Refused, though undamaged: a checksum does not say who saved a file."""

    class Harm:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/canary",)

    buffer = io.BytesIO()
    torch.save({"format": checkpoint.FORMAT, "model": Harm()}, buffer)
    for content in (buffer.getvalue(), pickle.dumps(Harm())):
        (folder / "last.pt").write_bytes(content)
        with pytest.raises(checkpoint.CorruptCheckpoint):
            checkpoint.read(folder / "last.pt")
        assert checkpoint.find("auto", folder).path == folder / "previous.pt"
    assert not (tmp_path / "canary").exists()
    torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert (tmp_path / "canary").exists(), "without weights_only it runs"


@pytest.mark.parametrize("hard_links", [True, False])
def test_what_stays(hard_links, tmp_path, monkeypatch):
    """The two newest, and that of the best epoch, also where the file system has no hard links."""

    def refuses(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if not hard_links:
        monkeypatch.setattr(os, "link", refuses)
    for epoch in range(1, 7):
        save(tmp_path, epoch, best=epoch in (1, 3))
        if epoch in (1, 3):
            assert (tmp_path / "best.pt").samefile(tmp_path / "last.pt") == hard_links
    assert {path.name: epoch_of(checkpoint.read(path)[0]) for path in tmp_path.iterdir()} == {
        "last.pt": 6,
        "previous.pt": 5,
        "best.pt": 3,
    }


def test_interrupted_anywhere_in_a_save(tmp_path):
    """Ctrl-C in a notebook, where it is a KeyboardInterrupt: torch ends its file all the same."""

    class Interrupted(io.FileIO):
        writes = 0

        def write(self, data):
            self.writes += 1
            written = super().write(data)
            if self.writes == interrupt_at:
                raise KeyboardInterrupt
            return written

    interrupt_at = 1
    while True:
        with Interrupted(tmp_path / "last.pt", "w") as file:
            try:
                checkpoint.write_tensors({"model": MODEL.state_dict()}, file)
                break
            except KeyboardInterrupt:
                interrupt_at += 1
    # At each of its writes; then it was saved.
    assert file.writes > 20
    assert interrupt_at == file.writes + 1


WHOLE = io.BytesIO()
torch.save({"format": checkpoint.FORMAT, "config": CONFIG, "model": MODEL.state_dict()}, WHOLE)
WHOLE = WHOLE.getvalue()
EDITS = st.lists(
    st.tuples(st.integers(0, len(WHOLE) - 1), st.binary(max_size=8), st.integers(0, 64)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=FUZZ, suppress_health_check=list(HealthCheck))
@given(edits=EDITS)
def test_fuzz(edits, tmp_path_factory):
    """A file of any bytes: read as a checkpoint, or CorruptCheckpoint with one line."""
    content = bytearray(WHOLE)
    for position, inserted, removed in edits:
        content[position : position + removed] = inserted
    path = tmp_path_factory.getbasetemp() / "fuzz.pt"
    path.write_bytes(content)
    try:
        loaded, fingerprint = checkpoint.read(path)
        assert isinstance(loaded["format"], int)
        assert isinstance(fingerprint, int)
    except REFUSED as error:
        assert "\n" not in str(error)


def state_of(model):
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1, 0.9),
        "position": position_of_a_run(),
    }


def resume(file, folder, state, config, may_change=(), optional=()):
    return checkpoint.resume(file, folder, state, config, may_change, optional, ALONE)


def save_state(folder, state, config):
    """Save these objects, as run.Run does."""
    parts = {name: part.state_dict() for name, part in state.items()}
    checkpoint.save(folder, parts, config)


def test_a_checkpoint_is_loaded_and_compared_flag_by_flag(tmp_path):
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    state, there = state_of(model), state_of(other)
    state["position"].advance()
    save_state(tmp_path, state, {"hidden": 64, "lr": 0.1})
    config = {"hidden": 64, "lr": 0.2, "new": 1}
    found = resume("auto", tmp_path, there, config, {"lr"})
    assert found.path == tmp_path / "last.pt"
    assert torch.equal(model.weight, other.weight)
    assert there["position"].samples == 7
    with pytest.raises(InputError, match=r"hidden 64 \(and this run 32\)"):
        resume("auto", tmp_path, there, {"hidden": 32}, {"lr"})
    with pytest.raises(InputError, match=r"lr 0.1 \(and this run 0.2\)"):
        resume("auto", tmp_path, there, config)
    with pytest.raises(InputError, match="average: "):
        resume("auto", tmp_path, {**there, "average": model}, config, {"lr"})
    resume("auto", tmp_path, {**there, "average": model}, config, {"lr"}, optional={"average"})


def test_resume_auto_looks_only_for_its_own_files(tmp_path):
    """Another file in a new folder does not keep a run from its start."""
    torch.save({"weights": 1}, tmp_path / "teacher.pt")
    model = torch.nn.Linear(2, 2)
    found = resume("auto", tmp_path, state_of(model), {})
    assert found.path is None
    checkpoint.claim(tmp_path, found)


def test_an_older_checkpoint_goes_on_in_a_new_folder(tmp_path):
    """In its own it would overwrite a newer one, and the message says so."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    model = torch.nn.Linear(2, 2)
    for _ in range(2):
        save_state(old, state_of(model), {})
    found = resume(str(old / "previous.pt"), None, state_of(model), {})
    model.weight.data += 1
    save_state(old, state_of(model), {})
    with pytest.raises(InputError, match="choose another --log-dir"):
        checkpoint.claim(old, found)
    checkpoint.claim(new, found)


def test_what_is_loaded_does_not_need_its_file(tmp_path):
    """The file is mapped while it is read. The next save replaces it, which NFS takes away."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path, {"optimizer": optimizer.state_dict()}, {})
    saved, _ = checkpoint.read(tmp_path / "last.pt")
    checkpoint.load(saved, {"optimizer": optimizer}, set())
    del saved
    assert "last.pt" not in pathlib.Path("/proc/self/maps").read_text()
