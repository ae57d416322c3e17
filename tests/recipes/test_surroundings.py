"""Machines and environments that differ from ours: it works, or one line says why not."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from forked import compute, refused
from launch import Job, as_nobody, need, run
from recipes import ROOT, changed_copy

from common import checkpoint

SINGLE = f"python {ROOT}/mnist/single.py --synthetic 320 --epochs 1 --device cpu --model lenet"
# What a file system may refuse: a copy of the recipe begins with it.
NO_SYNC_OF_FOLDERS = """
import errno, itertools, os, stat
errors = itertools.cycle([errno.EINVAL, errno.EOPNOTSUPP])
def fsync(descriptor):
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        number = next(errors)
        raise OSError(number, os.strerror(number))
os.fsync = fsync
"""
NO_LOCKS_AND_LINKS = """
import errno, fcntl, os
def refuses(*_, **__):
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))
fcntl.flock = fcntl.lockf = os.link = os.symlink = refuses
"""
NO_RENAME_OVER_A_FILE = """
import errno, os
rename = os.rename
def rename_to_a_new_name(old, new):
    if os.path.exists(new):
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
    rename(old, new)
os.rename = os.replace = rename_to_a_new_name
"""


def command_where(code, to):
    """SINGLE, of a copy that begins with `code`."""
    line = "import torch\n"
    copy = changed_copy(to, "mnist/single.py", line, code + line)
    return SINGLE.replace(str(ROOT / "mnist"), str(copy))


@pytest.mark.parametrize(
    "code", [NO_SYNC_OF_FOLDERS, NO_LOCKS_AND_LINKS], ids=["no sync", "no locks and links"]
)
def test_a_file_system_that_can_do_less(code, tmp_path):
    """CIFS and some FUSE: borg 1287, libgit2 5356, gocryptfs 587."""
    compute(f"{command_where(code, tmp_path)} --log-dir log", tmp_path)
    assert (tmp_path / "log" / "last.pt").exists()
    assert (tmp_path / "log" / "previous.pt").exists()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (NO_SYNC_OF_FOLDERS.replace("EINVAL", "EIO"), "Input/output error"),
        (NO_RENAME_OVER_A_FILE, "File exists"),
    ],
    ids=["sync fails", "no rename over a file"],
)
def test_a_file_system_that_cannot_save(code, reason, tmp_path):
    output = compute(f"{command_where(code, tmp_path)} --log-dir log", tmp_path, status=2)
    assert output == f"single.py: cannot write to log ({reason}): choose another --log-dir\n"


def test_results_survive_a_full_disk_at_a_resume(tmp_path):
    """tensorflow 8745: lines are not lost when they cannot be written again."""
    compute(f"{SINGLE} --log-dir log", tmp_path)
    path = tmp_path / "log" / "results.jsonl"
    line = json.dumps({"step": 1, "event": "step", "note": "x" * 90}) + "\n"
    path.write_text(path.read_text() + 9000 * line)
    before = path.read_bytes()
    # 600 KB at most, in place of a quota.
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))\n"
    again = command_where(limit, tmp_path).replace("--epochs 1", "--epochs 2")
    said = compute(f"{again} --log-dir log --resume auto", tmp_path, status=2)
    assert said.endswith("cannot write to log (File too large): choose another --log-dir\n")
    assert path.read_bytes() == before


def test_a_checkpoint_that_may_not_be_read(tmp_path):
    """TencentDB-Agent-Memory 772: it may be good, and is not set aside."""
    folder = tmp_path / "log"
    folder.mkdir()
    folder.chmod(0o777)
    checkpoint.save(folder, {"position": 1}, {})
    (folder / "last.pt").chmod(0)
    said = as_nobody(tmp_path, checkpoint.find, "auto", Path("log"))
    assert said == "InputError: --resume auto: log/last.pt: Permission denied"
    assert (folder / "last.pt").exists()


@pytest.mark.parametrize(
    ("environment", "recipe", "says"),
    [
        ({"WORLD_SIZE": "4"}, "single", "or unset WORLD_SIZE"),
        ({"WORLD_SIZE": "many"}, "single", "WORLD_SIZE=many in the environment is not a number"),
        ({"LOCAL_RANK": "0"}, "ddp_launch", "LOCAL_WORLD_SIZE is not set: start it with a launch"),
        ({}, "ddp_launch", "a launcher, torchrun --nproc-per-node=2 "),
    ],
)
def test_environments(environment, recipe, says, tmp_path):
    """Before any data set is downloaded, which would print another line here."""
    variables = " ".join(f"{name}={value}" for name, value in environment.items())
    line = refused(f"{variables} python {ROOT}/mnist/{recipe}.py --data-dir none", tmp_path)
    assert re.search(says, line)


def test_an_empty_rank_of_slurm(tmp_path):
    assert "| val loss" in compute(f"PMIX_RANK= {SINGLE} --dry-run", tmp_path)


def test_an_address_that_another_tool_left(tmp_path):
    """mp.spawn on one machine meets on this machine."""
    spawn = SINGLE.replace("single.py", "ddp_spawn.py")
    environment = "MASTER_ADDR=nowhere.invalid MASTER_PORT=1"
    assert "world size 2" in compute(f"{environment} {spawn} -g 2 --dry-run", tmp_path)


@pytest.mark.parametrize(
    "start",
    [
        "python cifar10/single.py --synthetic 320 --model lenet",
        "torchrun --standalone --nproc-per-node=1 examples/regression.py",
    ],
)
def test_names_that_others_have(start, tmp_path):
    """A queue.py beside common/ is not Python's, and `common` of another project is not ours."""
    for folder in ("common", "images", "cifar10", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    theirs = [tmp_path / "theirs" / name / "__init__.py" for name in ("common", "images")]
    for path in [tmp_path / "queue.py", *theirs]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise SystemExit('this is imported')\n")
    first = f"{tmp_path}/theirs:{os.environ['PYTHONPATH']}"
    assert "| val loss" in run(f"{start} --device cpu --dry-run", tmp_path, PYTHONPATH=first)


@pytest.mark.parametrize(
    ("start", "output"),
    [("python -P {}/cifar10/single.py", ">&- 2>&-"), ("python -m cifar10.single", "| head -n 1")],
)
def test_output_that_goes_nowhere(start, output, tmp_path):
    """Training goes on: fabric 1583, tqdm 1196. With -P and -m its folder is not in sys.path."""
    flags = f"--synthetic 320 --epochs 1 --device cpu --model lenet --log-dir {tmp_path}/log"
    run(f"set -o pipefail; {start.format(ROOT)} {flags} {output}", ROOT)
    saved = torch.load(tmp_path / "log" / "last.pt", weights_only=True)
    assert saved["position"]["epoch"] == 1


def test_a_name_that_is_not_utf8(tmp_path):
    """A Latin-1 byte in the name of the folder, which TensorBoard refuses."""
    line = refused(f"{SINGLE} --log-dir caf\udce9", tmp_path)
    assert line == "single.py: --log-dir caf\\udce9: TensorBoard needs a name in UTF-8"


def test_ctrl_c_as_process_1(tmp_path):
    """In a container: moby 12022. All recipes begin so."""
    need(os.geteuid() == 0 and shutil.which("unshare"), "root, to make a namespace of processes")
    (tmp_path / "script.py").write_text(
        f"import sys, time; sys.path.append({str(ROOT)!r})\n"
        "from common.process import launch\n"
        "with launch.plain_exits():\n"
        "    print('waits', flush=True)\n"
        "    time.sleep(10_000)\n"
    )
    job = Job("exec unshare --pid --fork python script.py", tmp_path)
    job.wait_for("waits")
    (process_1,) = [process for process in job.alive() if process.cmdline()[0] == "python"]
    process_1.send_signal(signal.SIGINT)
    # Linux ignores a default SIGINT to process 1, but not while its main thread blocks SIGINT, as
    # during the handler.
    assert job.finish() in (128 + signal.SIGINT, -signal.SIGINT)
