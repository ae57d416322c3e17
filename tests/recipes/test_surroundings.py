"""Machines and environments that differ from ours: it works, or one line says why not."""

import json
import os
import re
import shutil
import signal
import subprocess

import pytest
import torch
from forked import compute, refused
from launch import Job, need, need_horovod, refused_here, run
from recipes import ROOT

from images.models import LeNet

SINGLE = f"python {ROOT}/mnist/single.py --synthetic 320 --epochs 1 --device cpu --model lenet"
# What a file system may refuse, in C: preloaded, it answers in place of the C library.
FSYNC = """
int calls = 0;
int fsync(int fd) {
    struct stat found;
    fstat(fd, &found);
    if (S_ISDIR(found.st_mode)) { errno = ERROR; return -1; }
    return 0;
}
"""
FLOCK_AND_LINK = """
int flock(int fd, int operation) { errno = ENOSYS; return -1; }
int link(const char *from, const char *to) { errno = EPERM; return -1; }
int linkat(int a, const char *from, int b, const char *to, int flags) { errno = EPERM; return -1; }
"""
RENAME_OVER_A_FILE = """
int rename(const char *from, const char *to) {
    if (access(to, F_OK) == 0) { errno = EEXIST; return -1; }
    return renameat(AT_FDCWD, from, AT_FDCWD, to);
}
"""
HEADERS = "".join(
    f"#include <{name}.h>\n" for name in ("errno", "fcntl", "stdio", "sys/stat", "unistd")
)


def preloaded(code, folder):
    """Compile C functions to a library for LD_PRELOAD."""
    need(shutil.which("gcc"), "apt-get install gcc")
    (folder / "refuses.c").write_text(HEADERS + code)
    command = ["gcc", "-shared", "-fPIC", "-w", "refuses.c", "-o", "refuses.so"]
    subprocess.run(command, cwd=folder, check=True)
    return str(folder / "refuses.so")


def test_a_file_system_that_cannot_sync_folders(tmp_path):
    """CIFS and some FUSE: borg 1287, libgit2 5356, gocryptfs 587."""
    by_turns = "calls++ % 2 ? EINVAL : EOPNOTSUPP"
    library = preloaded(FSYNC.replace("ERROR", by_turns), tmp_path)
    run(f"{SINGLE} --log-dir log", tmp_path, LD_PRELOAD=library)
    assert (tmp_path / "log" / "last.pt").exists()


def test_a_file_system_without_locks_and_hard_links(tmp_path):
    library = preloaded(FLOCK_AND_LINK, tmp_path)
    compute(f"{SINGLE} --log-dir log", tmp_path)
    (tmp_path / "log" / "previous.pt").unlink()
    again = f"{SINGLE.replace('--epochs 1', '--epochs 2')} --log-dir log --resume auto"
    run(again, tmp_path, LD_PRELOAD=library)
    assert (tmp_path / "log" / "previous.pt").exists()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (FSYNC.replace("ERROR", "EIO"), "Input/output error"),
        (RENAME_OVER_A_FILE, "File exists"),
    ],
)
def test_a_file_system_that_cannot_save(code, reason, tmp_path):
    library = preloaded(code, tmp_path)
    output = run(f"{SINGLE} --log-dir log", tmp_path, status=2, LD_PRELOAD=library)
    assert output == (f"single.py: cannot write to log ({reason}): choose another --log-dir\n")


def test_results_survive_a_full_disk_at_a_resume(tmp_path):
    """tensorflow 8745: lines are not lost when they cannot be written again."""
    compute(f"{SINGLE} --log-dir log", tmp_path)
    path = tmp_path / "log" / "results.jsonl"
    line = json.dumps({"step": 1, "event": "step", "note": "x" * 90}) + "\n"
    path.write_text(path.read_text() + 9000 * line)
    before = path.read_bytes()
    again = SINGLE.replace("--epochs 1", "--epochs 2")
    # 600 KB at most, in place of a quota.
    command = f"ulimit -f 600; {again} --log-dir log --resume auto"
    said = run(command, tmp_path, status=2)
    assert said.endswith("cannot write to log (File too large): choose another --log-dir\n")
    assert path.read_bytes() == before


def test_a_checkpoint_that_may_not_be_read(tmp_path):
    """TencentDB-Agent-Memory 772: it may be good, and is not set aside."""
    need(os.geteuid() == 0, "root, to become another user")
    compute(f"{SINGLE} --log-dir log", tmp_path)
    path = tmp_path / "log" / "last.pt"
    path.chmod(0)
    # Root of a namespace of its own, to which the file is another's.
    again = f"{SINGLE} --log-dir log --resume auto"
    namespace = "unshare --user --map-user=12345 --map-group=12345"
    said = run(f"{namespace} {again}", tmp_path, status=2)
    assert "last.pt: Permission denied" in said
    assert path.exists()


@pytest.mark.parametrize(
    ("environment", "recipe", "says"),
    [
        ({"WORLD_SIZE": "4"}, "single", "or unset WORLD_SIZE"),
        ({"PMI_SIZE": "2"}, "single", r"a launcher started 2 of these \(PMI_SIZE\)"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "single", r"started 2 of these \(SLURM_STEP_NUM_TASKS\)"),
        ({"WORLD_SIZE": "many"}, "single", "WORLD_SIZE=many in the environment is not a number"),
        ({"LOCAL_RANK": "0"}, "ddp_launch", "LOCAL_WORLD_SIZE is not set: start it with a launch"),
        ({}, "ddp_launch", "LOCAL_RANK is not set: start it with a launcher"),
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


@pytest.mark.parametrize("start", ["python -P {}/cifar10/single.py", "python -m cifar10.single"])
def test_other_ways_to_start_a_script(start, tmp_path):
    """Its neighbour cifar.py is found without the folder of the script in sys.path."""
    flags = "--synthetic 320 --device cpu --model lenet --dry-run"
    folder = ROOT if " -m " in start else tmp_path
    assert "| val loss" in run(f"{start.format(ROOT)} {flags}", folder)


def test_a_file_with_the_name_of_a_module_of_python(tmp_path):
    """queue.py of the user, beside the folders that were copied: torch imports Python's own."""
    for folder in ("common", "images", "mnist"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "queue.py").write_text("raise SystemExit('this is not what torch imports')\n")
    command = SINGLE.replace(f"{ROOT}/", "")
    assert "| val loss" in run(f"{command} --dry-run", tmp_path)


@pytest.mark.parametrize("output", ["> /dev/full", ">&- 2>&-", "| head -n 1"])
def test_output_that_goes_nowhere(output, tmp_path):
    """Training goes on: fabric 1583, tqdm 1196."""
    run(f"set -o pipefail; {SINGLE} --log-dir log {output}", tmp_path)
    saved = torch.load(tmp_path / "log" / "last.pt", weights_only=True)
    assert saved["position"]["epoch"] == 1


def test_a_name_that_is_not_utf8(tmp_path):
    """A Latin-1 byte in the name of the folder, which TensorBoard refuses."""
    line = refused(f"{SINGLE} --log-dir caf\udce9", tmp_path)
    assert line == "single.py: --log-dir caf\\udce9: TensorBoard needs a name in UTF-8"


def test_a_home_that_the_shell_does_not_expand(tmp_path):
    """tensorflow 44264: --log-dir=~/log makes no folder of the name ~."""
    compute(f"{SINGLE} --log-dir='~/log'", tmp_path, HOME=str(tmp_path / "home"))
    assert (tmp_path / "home" / "log" / "last.pt").exists()
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("script", ["mnist/single.py", "mnist/hvd.py"])
def test_ctrl_c_as_process_1(script, tmp_path):
    """In a container: moby 12022."""
    need(os.geteuid() == 0 and shutil.which("unshare"), "root, to make a namespace of processes")
    if "hvd" in script:
        need_horovod("mpi")
    flags = "--synthetic 3200 --epochs 100000 --model lenet --device cpu"
    job = Job(f"exec unshare --pid --fork python {ROOT}/{script} {flags}", tmp_path)
    job.wait_for("epoch 1/")
    (process_1,) = (process for process, words in job.command_lines() if words[0] == "python")
    process_1.send_signal(signal.SIGINT)
    assert job.finish() == 128 + signal.SIGINT


@pytest.mark.parametrize("content", [[1], torch.ones(2), None, {1: torch.ones(2)}])
def test_a_file_that_is_no_state_dict(content, tmp_path):
    torch.save(content, tmp_path / "weights.pt")
    line = refused_here("mnist/single.py --synthetic 64 --init-from weights.pt", tmp_path)
    assert "it is not a state_dict, a dict of tensors" in line


def test_weights_of_a_compiled_model(tmp_path):
    """pytorch 101107, nanoGPT 325."""
    weights = LeNet(channels=1, size=28).state_dict()
    renamed = {f"module._orig_mod.{name}": value for name, value in weights.items()}
    torch.save(renamed, tmp_path / "weights.pt")
    said = compute(f"{SINGLE} --init-from weights.pt --dry-run", tmp_path)
    assert f"weights from weights.pt: {len(weights)} of {len(weights)} loaded" in said
