"""Two jobs in one folder, and what a job that was killed leaves there."""

import os
import re
import signal

import pytest
from forked import ForkedJob, compute
from launch import everything, wait_until
from recipes import ROOT, STEP, changed_copy

from common import checkpoint, files, lease
from common.errors import RunError
from common.process import launch

FLAGS = "--synthetic 320 --model lenet --device cpu --log-dir log"
SINGLE = f"python {ROOT}/mnist/single.py {FLAGS}"
ENDLESS = "--epochs 100000"


def slow(to, host=None):
    """The command for an endless run, which takes its machine for `host`.

    A step takes 0.1 s more, and leaves the cores to other tests.
    """
    pause = "            __import__('time').sleep(0.1)\n"
    copy = changed_copy(to, "mnist/single.py", STEP, STEP + pause)
    if host:
        path = copy / "single.py"
        rename = f"import socket\nsocket.gethostname = lambda: {host!r}\n"
        path.write_text(path.read_text().replace("import torch\n", f"{rename}import torch\n", 1))
    return f"python {copy}/single.py {FLAGS} {ENDLESS}"


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A job that trains in the folder log of job.folder."""
    folder = tmp_path_factory.mktemp("running")
    job = ForkedJob(slow(folder / "copy"), folder)
    job.folder = folder
    job.wait_for("epoch 2/")
    yield job
    job.kill()
    job.finish()


@pytest.mark.parametrize("start", [SINGLE, f"{SINGLE} --resume auto"])
def test_a_folder_in_use_is_refused(start, running):
    said = compute(start, running.folder, status=2)
    assert re.fullmatch(
        rf"single.py: log is in use by process {running.process.pid} on \S+: "
        r"wait until it ends, or choose another --log-dir\n",
        said,
    )
    at = running.output().count("epoch")
    running.wait_for(f"epoch {at + 2}/")


def test_one_line_of_several_ranks(running):
    """The ranks that wait for rank 0 print no traceback."""
    torchrun = f"torchrun --standalone --nproc-per-node=2 {ROOT}/mnist/ddp_launch.py {FLAGS}"
    refused = ForkedJob(f"{torchrun} --resume auto", running.folder)
    assert refused.finish() == 1
    said = refused.output()
    assert said.count("ddp_launch.py: log is in use by process") == 1
    assert said.count("traceback : log is in use by process") == 1, "torchrun's last lines"
    assert said.count("is in use by process") == 2
    assert "[rank1]: Traceback" not in said


def test_a_killed_job_does_not_lock_out_its_successor(tmp_path):
    killed = ForkedJob(f"{SINGLE} {ENDLESS}", tmp_path)
    killed.wait_for("epoch 1/")
    killed.process.kill()
    killed.finish()
    assert (tmp_path / "log" / ".in-use").exists()
    said = compute(f"{SINGLE} --resume auto --max-steps 1", tmp_path)
    assert "nothing left to do" in said
    assert not (tmp_path / "log" / ".in-use").exists(), "its successor elsewhere would wait"


def test_nothing_is_left_in_the_folder_of_a_run_of_mp_spawn(tmp_path):
    """Its processes run no exit handlers of atexit."""
    compute(SINGLE.replace("single", "ddp_spawn") + " --epochs 1", tmp_path)
    assert not (tmp_path / "log" / ".in-use").exists()


def test_on_another_machine(tmp_path):
    """A process there cannot be looked at, but once it has died its file no longer changes.

    If it was only suspended, it ends before it writes anything more.
    """
    here = slow(tmp_path / "copy")
    there = ForkedJob(slow(tmp_path / "other", "there"), tmp_path)
    there.wait_for("epoch 2/")
    said = compute(here, tmp_path, status=2)
    assert re.search(rf"in use by process {there.process.pid} on there: wait", said)
    there.process.send_signal(signal.SIGSTOP)
    successor = ForkedJob(f"{here} --resume auto", tmp_path)
    successor.wait_for("resumed from")
    # The first evaluation may come before a step, and until then SIGTERM ends it without a save.
    wait_until(lambda: successor.output().count("| val ") == 2, successor)
    successor.process.send_signal(signal.SIGTERM)
    assert successor.finish() == 0
    before = everything(tmp_path / "log")
    there.process.send_signal(signal.SIGCONT)
    assert there.finish() == 1
    assert "another process has taken log" in there.output()
    assert everything(tmp_path / "log") == before


def test_a_download_that_another_process_has_begun(tmp_path):
    """Who waits says for whom."""
    command = f"python {ROOT}/mnist/single.py --data-dir {tmp_path}/data"
    (tmp_path / "data" / "MNIST" / "raw").mkdir(parents=True)
    with lease.held(tmp_path / "data" / ".download.lock"):
        job = ForkedJob(command, tmp_path)
        job.wait_for(f"waiting for process {os.getpid()} on ")
        job.process.send_signal(signal.SIGTERM)
        assert job.finish() == -signal.SIGTERM


OTHER = "filelock/2\npid=99999999\nhost=other\nmode=lease\ntoken={}\nduration=60.0\nstart=1\n"


@pytest.mark.check
@pytest.mark.parametrize("touched", [0, 4_000_000_000])
@pytest.mark.parametrize("content", ["", OTHER.format("5" * 32), "junk"])
def test_a_file_that_names_no_owner(content, touched, tmp_path):
    """A power cut leaves an empty one. It counts as left behind, but not while it is new.

    proper-lockfile 109: a clock that was ahead leaves it in the future.
    """
    path = tmp_path / ".in-use"
    path.write_text(content)
    os.utime(path, (touched, touched))
    with lease.held(path):
        assert path.read_text() != content
    path.write_text(content)
    lease.remove_if_left_behind(lease.SoftFileLease(path, lease_duration=lease.EXPIRES))
    assert path.read_text() == content


@pytest.mark.check
def test_nothing_is_written_in_a_folder_that_another_process_has_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(lease.time, "sleep", lambda seconds: None)
    folder = tmp_path / "log"
    lease.hold(folder)
    checkpoint.save(folder, {"position": 1}, {})
    partial = files.write_beside(folder / "other", lambda file: None)
    held = (folder / ".in-use").read_text()
    (folder / ".in-use").write_text(OTHER.format("5" * 32))
    before = everything(folder)
    for write in (
        lambda: checkpoint.save(folder, {"position": 2}, {}),
        lambda: files.write_atomically(folder / "results.jsonl", b"mine"),
        lambda: files.replace(partial, folder / "last.pt"),
        lambda: files.link_or_copy(folder / "last.pt", folder / "best.pt"),
    ):
        with pytest.raises(RunError, match=r"process 99999999 on other has taken .*log from this"):
            write()
    assert everything(folder) == before
    (folder / ".in-use").write_text(held)
    checkpoint.save(folder, {"position": 2}, {})
    launch.to_give_back.pop()()
    checkpoint.save(folder, {"position": 3}, {})
