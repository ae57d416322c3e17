"""A wrong input: one line that says what is wrong and what to do, status 2, and nothing written or lost."""

import io
import os
import pickle
import shutil
import socket
import subprocess
import sys

import pytest
import torch
from launch import ROOT, Job, checkpoint, commands, need_horovod, run

from common import checkpoint as checkpoints
from common import files

SINGLE = f"python {ROOT}/mnist/single.py"
SPAWN = f"python {ROOT}/mnist/ddp_spawn.py"


def refused(command, cwd, **environment):
    """The one line that a command prints before it ends with status 2."""
    before = sorted(cwd.rglob("*"))
    lines = run(command, cwd, status=2, **environment).splitlines()
    assert len(lines) == 1, lines
    assert sorted(cwd.rglob("*")) == before, "a refused run leaves nothing behind"
    return lines[0]


def test_no_data_and_no_network(tmp_path):
    line = refused(f"{SINGLE} --data-dir {tmp_path}/nonexistent", tmp_path)
    for part in ("nonexistent/MNIST/raw/train-images-idx3-ubyte", "download failed", "bring the files", "--synthetic"):
        assert part in line


@pytest.mark.parametrize(("command", "says"), [
    (f"{SINGLE} --batch-size 0", "-b/--batch-size: 0 is not at least 1"),
    (f"{SINGLE} --epochs -1", "--epochs: -1 is not at least 1"),
    (f"{SINGLE} --lr nan", "--lr: nan is not above 0"),
    (f"{SINGLE} --lr 0", "--lr: 0 is not above 0"),
    (f"{SINGLE} --epoch 3", "unrecognized arguments: --epoch 3"),
    (f"{SINGLE} --workers two", "invalid whole number value: 'two'"),
    (f"{SINGLE} --model resnet5", "there is no resnet5; did you mean lenet?"),
    (f"{SINGLE} --batch-size 10000", "do not fill one batch of 10000"),
    (f"{SINGLE} --resume nowhere.pt", "--resume nowhere.pt: No such file"),
    (f"{SINGLE} --resume auto", "say where with --log-dir"),
    (f"{SINGLE} --profile --dry-run", "--dry-run and --evaluate write none"),
    (f"{SINGLE} --checkpoint-every 0", "0 is not at least 1"),
    (f"{SINGLE} --keep 0", "0 is not at least 1"),
    (f"{SINGLE} --export nowhere/weights", "the folder of nowhere/weights is not there"),
    (f"{SPAWN} -g 4 -b 100", "do not fill one batch of 100 on each of 4"),
    (f"{SINGLE} --log-dir /dev/null/log", "cannot write to /dev/null/log"),
    (f"{SINGLE} --checkpoint-dir /proc/here", "cannot write to /proc/here"),
    (f"{SPAWN} -g {4 * os.cpu_count() + 1}", "processes"),
    (f"{SINGLE} --seed 20000000000000", "is more than 4294967295"),
    (f"{SPAWN} -n 2 -nr 2", "numbered from 0 to 1"),
    (f"{SPAWN} -n 2 -nr 1", "MASTER_ADDR"),
    (f"{SPAWN} -g 2 --resume nowhere.pt", "No such file"),
], ids=lambda value: value.partition(".py ")[2] or None)
def test_wrong_flag(command, says, tmp_path):
    assert says in refused(f"{command} --synthetic 320", tmp_path)


def test_no_gpu(tmp_path):
    assert "--device cpu" in refused(f"{SINGLE} --synthetic 320 --device cuda", tmp_path, CUDA_VISIBLE_DEVICES="")


def test_without_a_launcher(tmp_path):
    line = refused(f"python {ROOT}/mnist/ddp_launch.py --synthetic 320", tmp_path)
    assert "torchrun --nproc-per-node=2" in line


@pytest.mark.parametrize("recipe", ["single", "hvd"])
def test_a_launcher_of_another_recipe(recipe, tmp_path):
    if recipe == "hvd":
        need_horovod("gloo")
    shown = run(f"torchrun --standalone --nproc-per-node=2 {ROOT}/mnist/{recipe}.py --dry-run", tmp_path, status=1)
    assert f"\n{recipe}.py: a launcher started several of these, and each would train by itself" in f"\n{shown}"
    assert not list(tmp_path.iterdir())


def test_apex_of_another_kind(tmp_path):
    """PyPI's apex is another package: it can be imported, but has no amp."""
    (tmp_path / "site" / "apex").mkdir(parents=True)
    (tmp_path / "site" / "apex" / "__init__.py").touch()
    line = refused(f"python {ROOT}/mnist/apex_amp.py", tmp_path, PYTHONPATH=str(tmp_path / "site"),
                   PYTHONDONTWRITEBYTECODE="1")
    for part in ("25.05", "pip install", "PyPI's apex", "ddp_amp.py"):
        assert part in line


def test_without_horovod(tmp_path):
    (tmp_path / "site" / "horovod").mkdir(parents=True)
    (tmp_path / "site" / "horovod" / "__init__.py").write_text("raise ImportError('not here')")
    line = refused(f"python {ROOT}/mnist/hvd.py", tmp_path, PYTHONPATH=str(tmp_path / "site"),
                   PYTHONDONTWRITEBYTECODE="1")
    assert "scripts/install_horovod.sh" in line


def test_horovod_without_its_torch_extension(tmp_path):
    """Such a Horovod can be imported all the same."""
    (tmp_path / "site" / "horovod" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "horovod" / "__init__.py").touch()
    (tmp_path / "site" / "horovod" / "torch" / "__init__.py").write_text("print('Extension has not been built')")
    line = refused(f"python {ROOT}/mnist/hvd.py", tmp_path, PYTHONPATH=str(tmp_path / "site"),
                   PYTHONDONTWRITEBYTECODE="1")
    assert "scripts/install_horovod.sh" in line


@pytest.fixture
def log(tmp_path):
    """The folder of a run of two epochs, as it is after the test as well."""
    run(f"{SINGLE} --synthetic 320 --epochs 2 --log-dir log", cwd=tmp_path)
    return tmp_path / "log"


def altered(log, **values):
    """A checkpoint with other values, and the name that goes with them."""
    buffer = io.BytesIO()
    torch.save({**checkpoint(log), **values}, buffer)
    path = log.parent / f"altered-{checkpoints.digest(buffer.getvalue())}.pt"
    path.write_bytes(buffer.getvalue())
    return path


def test_checkpoint_of_another_run(log, tmp_path):
    on = f"{SINGLE} --synthetic 320 --resume log/last.pt"
    assert "dataset mnist" in refused(
        f"python {ROOT}/cifar10/single.py --synthetic 320 --model convnet --resume log/last.pt", tmp_path)
    assert "batch size 64" in refused(f"{on} -b 32", tmp_path)
    assert "weight decay 0" in refused(f"{on} --wd 0.1", tmp_path)
    line = refused(f"{on} --model lenet", tmp_path)
    assert "its model does not fit this run (" in line
    assert "weights differ, among them 0.weight" in line
    assert len(line) < 250
    newer = altered(log, format=checkpoints.FORMAT + 1)
    assert "take a newer common/" in refused(f"{SINGLE} --synthetic 320 --resume {newer}", tmp_path)
    older = altered(log, format=checkpoints.FORMAT - 1)
    assert f"this code reads {checkpoints.FORMAT}" in refused(f"{SINGLE} --synthetic 320 --resume {older}", tmp_path)
    for part in ("model", "optimizer", "scheduler", "random_states", "epochs"):
        path = altered(log, **{part: None})
        assert "does not fit" in refused(f"{SINGLE} --synthetic 320 --resume {path}", tmp_path)
    fewer = altered(log, scheduler={**checkpoint(log)["scheduler"], "steps_per_epoch": 4})
    assert "another number of images" in refused(f"{SINGLE} --synthetic 320 --resume {fewer}", tmp_path)
    for part in ("arguments", "world_size"):
        path = altered(log, **{part: {}})
        refused(f"{SINGLE} --synthetic 320 --resume {path}", tmp_path)


def test_broken_checkpoint(log, tmp_path):
    (tmp_path / "text.pt").write_text("This is not a checkpoint.")
    assert "does not end with a digest" in refused(f"{SINGLE} --synthetic 320 --resume text.pt", tmp_path)
    newest, previous = checkpoints.committed(log)
    canary = tmp_path / "canary"
    harm = b"cos\nsystem\n(S'touch %s'\ntR." % str(canary).encode()
    harmful = tmp_path / f"harm-{checkpoints.digest(harm)}.pt"
    harmful.write_bytes(harm)
    assert "not a checkpoint" in refused(f"{SINGLE} --synthetic 320 --resume {harmful}", tmp_path)
    assert not canary.exists()
    whole = newest.read_bytes()
    newest.write_bytes(whole[:-1000])
    for command in (SINGLE, f"{SPAWN} -g 2"):
        assert "it is broken" in refused(f"{command} --synthetic 320 --resume log/last.pt", tmp_path)
    output = run(f"{SINGLE} --synthetic 320 --epochs 3 --log-dir log --resume auto", cwd=tmp_path)
    assert f"skipped log/{newest.name}: it is broken" in output
    assert f"resumed from log/{previous.name} after epoch 1" in output
    assert (log / f"{newest.name}.broken").read_bytes() == whole[:-1000], "it is set aside, and not lost"
    for path in checkpoints.committed(log):
        path.write_bytes(b"")
    before = sorted(log.iterdir())
    output = run(f"{SPAWN} -g 2 --synthetic 320 --log-dir log --resume auto", cwd=tmp_path, status=2)
    assert output.count("skipped") == 3
    assert output.splitlines()[-1].endswith("take another folder for that")
    assert sorted(log.iterdir()) == before


def test_folders_of_another_run(log, tmp_path):
    assert "of another run" in refused(f"{SINGLE} --synthetic 320 --log-dir log", tmp_path)
    assert "of another run" in refused(f"{SINGLE} --synthetic 320 --checkpoint-dir log", tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "results.json").write_text("not by a recipe")
    assert "of another run" in refused(f"{SINGLE} --synthetic 320 --log-dir mine", tmp_path)
    shutil.copytree(log, tmp_path / "other", symlinks=True)
    (tmp_path / "other" / "results.json").write_text("of another run")
    assert "other/results.json is of another run" in refused(
        f"{SINGLE} --synthetic 320 --epochs 3 --log-dir other --checkpoint-dir log --resume log/last.pt", tmp_path)
    _, previous = checkpoints.committed(log)
    assert "is newer, and would be lost" in refused(
        f"{SINGLE} --synthetic 320 --epochs 3 --log-dir log --resume {previous}", tmp_path)
    (tmp_path / "weights").touch()
    assert "is there already" in refused(f"{SINGLE} --synthetic 320 --export weights", tmp_path)


LAUNCHED = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29507"}


@pytest.mark.parametrize(("name", "value", "says"), [
    *((name, "", f"{name} is '', and not a whole number") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")),
    ("RANK", "one", "RANK is 'one', and not a whole number"), ("LOCAL_RANK", "-1", "LOCAL_RANK is '-1'"),
    ("WORLD_SIZE", "2.0", "WORLD_SIZE is '2.0'"), ("MASTER_PORT", "abc", "MASTER_PORT is 'abc'"),
    ("RANK", "1", "rank 1 of 1"), ("LOCAL_RANK", "3", "local rank 3 of 1"), ("MASTER_PORT", "70000", "70000"),
    *((name, None, f"{name} is not set: start it with a launcher") for name in LAUNCHED),
])
def test_wrong_environment(name, value, says, tmp_path):
    """What torchrun sets, set by hand: the parser is that of every DDP recipe, so one of them and no torch start-up."""
    environment = {**LAUNCHED, **({} if value is None else {name: value})}
    if value is None:
        del environment[name]
    check = f"{sys.executable} -c 'from common import processes; processes.launched()'"
    environment = [f"{key}={text}" for key, text in environment.items()]
    shown = subprocess.run(["env", *environment, "sh", "-c", check], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 2, shown.stderr
    assert says in shown.stderr
    assert shown.stderr.count("\n") == 1


def test_port_in_use(tmp_path):
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        line = refused(f"{SPAWN} -g 2 --synthetic 320", tmp_path, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        assert f"MASTER_PORT={port} (EADDRINUSE)" in line
        where = {**LAUNCHED, "MASTER_PORT": port}
        line = refused(f"python {ROOT}/mnist/ddp_launch.py --synthetic 320", tmp_path, **where)
        assert f"MASTER_PORT={port} (EADDRINUSE)" in line


def test_adasum_on_gloo(tmp_path):
    need_horovod("gloo")
    job = Job(f"horovodrun --gloo -np 2 python {ROOT}/mnist/hvd.py --synthetic 320 --use-adasum", cwd=tmp_path)
    assert job.finish() != 0
    assert job.output().count("--use-adasum needs MPI") == 1


def test_one_line_from_several_processes(tmp_path):
    """Under a launcher that adds lines of its own, the recipe still says it once."""
    job = Job(f"torchrun --standalone --nproc-per-node=2 {ROOT}/mnist/ddp_launch.py -b 0", cwd=tmp_path)
    assert job.finish() != 0
    assert job.output().count("-b/--batch-size: 0 is not at least 1") == 1


def test_truncated_mnist(real_data, tmp_path):
    shutil.copytree(real_data("mnist") / "MNIST", tmp_path / "MNIST")
    images = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:1_000_000])
    for command in (SINGLE, f"{SPAWN} -g 2"):
        line = refused(f"{command} --data-dir {tmp_path}", tmp_path)
        assert f"{images} is broken" in line


def test_a_batch_of_another_kind(tmp_path):
    for name in files.CIFAR10_FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(pickle.dumps({"images": []}))
    assert "is broken (KeyError" in refused(f"python {ROOT}/cifar10/single.py --data-dir {tmp_path}", tmp_path)


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    canary = tmp_path / "canary"
    batch = b"cos\nsystem\n(S'touch %s'\ntR." % str(canary).encode()
    for name in files.CIFAR10_FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(batch)
    assert "os.system" in refused(f"python {ROOT}/cifar10/single.py --data-dir {tmp_path}", tmp_path)
    assert not canary.exists()


def test_help_shows_commands_groups_and_defaults(tmp_path):
    shown = run(f"{SINGLE} --help", cwd=tmp_path)
    for part in (*commands(ROOT / "mnist" / "single.py"), "data:", "training:", "device:", "output:", "(default: 64)"):
        assert part in shown
    assert "default: None" not in shown
