"""A wrong input: one line that says what to do, status 2, and nothing written or lost."""

import os
import pickle
import runpy
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from forked import compute, refused
from launch import checkpoint, need_horovod, refused_here
from recipes import ROOT, commands
from torch.torch_version import TorchVersion
from torchvision.datasets import MNIST

from cifar10 import cifar
from common import checkpoint as checkpoints
from common.process.launch import OLDEST_TORCH

SINGLE = f"python {ROOT}/mnist/single.py"
SPAWN = f"python {ROOT}/mnist/ddp_spawn.py"


def test_no_data_and_no_network(tmp_path, monkeypatch):
    monkeypatch.setattr(MNIST, "mirrors", ["http://127.0.0.1:9/"])
    line = refused_here("mnist/single.py --data-dir nonexistent", tmp_path)
    for part in (
        "nonexistent/MNIST/raw/train-images-idx3-ubyte",
        "Connection refused",
        "--synthetic",
    ):
        assert part in line


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--batch-size 0", ["-b/--batch-size: 0"]),
        ("--lr nan", ["--lr: nan"]),
        ("--epoch 3", ["--epoch 3"]),
        ("--model resnet5", ["resnet5", "convnet", "lenet"]),
        ("--batch-size 10000", ["one batch of 10000"]),
        ("--resume nowhere.pt", ["--resume nowhere.pt", os.strerror(2)]),
        ("--resume auto", ["--log-dir"]),
        ("--log-dir /dev/null/log", ["/dev/null/log", os.strerror(20)]),
        ("--seed 20000000000000", ["--seed: 20000000000000"]),
        ("--device xpu", ["0 xpu devices", "--device cpu"]),
        ("--device nonsense", ["--device nonsense"]),
        ("--compile", ["--compile needs a C++ compiler"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_flag(flags, says, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-compiler")
    line = refused_here(f"mnist/single.py --synthetic 320 {flags}", tmp_path)
    for part in says:
        assert part in line


def test_an_old_torch(tmp_path, monkeypatch):
    assert f"torch>={OLDEST_TORCH}\n" in (ROOT / "requirements.txt").read_text()
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.7.1+cu126"))
    assert "torch 2.7.1+cu126 is too old" in refused_here("mnist/ddp_spawn.py", tmp_path)
    # That of a container is new enough.
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.8.0a0+5228986c39.nv25.6"))
    assert "--batch-size" in refused_here("mnist/ddp_spawn.py --batch-size 0", tmp_path)


@pytest.mark.parametrize(
    "flags", ["-n 2 -nr 2", "-n 2 -nr 1"], ids=["no such machine", "no address of the first"]
)
def test_wrong_machines(flags, tmp_path, monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1") if flags.endswith("2") else monkeypatch.delenv(
            name, raising=False
        )
    assert "MASTER_ADDR" in refused_here(f"mnist/ddp_spawn.py --synthetic 320 {flags}", tmp_path)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("-g 4 -b 100", "one batch of 100 on each of 4"),
        ("-g 2 --resume nowhere.pt", "--resume nowhere.pt"),
    ],
)
def test_one_line_of_all_processes(flags, says, tmp_path):
    assert says in refused(f"{SPAWN} --synthetic 320 {flags}", tmp_path)


@pytest.mark.parametrize("folder", ["minimal", "mnist", "cifar10", "imagenet"])
@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ("apex_amp", "Apex with amp is not installed: see docs/install.md"),
        ("hvd", "Horovod is not installed: run scripts/install_horovod.sh"),
    ],
)
def test_a_package_that_is_missing(recipe, says, folder, tmp_path, monkeypatch, capsys):
    """A start says how to get it; --help works without it."""
    for package in ("apex", "horovod", "horovod.torch"):
        monkeypatch.setitem(sys.modules, package, None)
    command = f"{folder}/{recipe}.py"
    assert refused_here(command, tmp_path) == f"{recipe}.py: {says}"
    with mock.patch.object(sys, "argv", [command, "--help"]), pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(ROOT / command), run_name="__main__")
    assert "--epochs" in capsys.readouterr().out


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    compute(f"{SINGLE} --synthetic 320 --epochs 2 --log-dir log", cwd=folder)
    return folder / "log"


@pytest.fixture
def log(trained, tmp_path):
    """The folder of a run of two epochs."""
    return Path(shutil.copytree(trained, tmp_path / "log"))


def altered(log, **values):
    """The path of a checkpoint with these values replaced."""
    torch.save({**checkpoint(log), **values}, log / "altered.pt")
    return "log/altered.pt"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("cifar10/single.py --model convnet", "task mnist"),
        ("mnist/single.py --wd 0.1", "weight_decay 0"),
        ("mnist/single.py --model lenet", "model convnet"),
    ],
)
def test_checkpoint_of_another_run(command, says, log, tmp_path):
    name, _, flags = command.partition(" ")
    line = refused_here(f"{name} --synthetic 320 --resume log/last.pt {flags}", tmp_path)
    assert says in line


@pytest.mark.parametrize(
    "part",
    [
        {"format": checkpoints.FORMAT + 1},
        {"format": checkpoints.FORMAT - 1},
        {"model": {}},
        {"config": None},
    ],
    ids=str,
)
def test_checkpoint_of_another_kind(part, log, tmp_path):
    line = refused_here(
        f"mnist/single.py --synthetic 320 --resume {altered(log, **part)}", tmp_path
    )
    assert "does not fit" in line


@pytest.mark.parametrize(
    "flags",
    [
        "--log-dir log",
        "--log-dir mine",
        "--log-dir log --resume log/previous.pt",
        "--log-dir log --resume log/best.pt",
        "--log-dir log --resume elsewhere.pt",
    ],
)
def test_folder_of_another_run(flags, log, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "results.jsonl").write_text('{"event": "evaluation"}')
    torch.save({**checkpoint(log), "best": {"value": 1.0}}, tmp_path / "elsewhere.pt")
    torch.save({**checkpoint(log), "best": {"value": 1.0}}, log / "best.pt")
    assert "choose another --log-dir" in refused_here(
        f"mnist/single.py --synthetic 320 --epochs 3 {flags}", tmp_path
    )


def test_adasum_with_a_scaled_loss(tmp_path):
    need_horovod("gloo")
    flags = "--synthetic 320 --use-adasum --amp-dtype fp16"
    line = refused(f"horovodrun --gloo -np 1 python {ROOT}/mnist/hvd.py {flags}", tmp_path)
    assert "--amp-dtype bf16" in line


def test_adasum_on_gloo(tmp_path):
    need_horovod("gloo")
    command = f"horovodrun --gloo -np 2 python {ROOT}/mnist/hvd.py --synthetic 320 --use-adasum"
    assert "hvd.py: --use-adasum needs MPI" in compute(command, tmp_path, status=2)


def test_truncated_mnist(real_data, tmp_path):
    shutil.copytree(real_data("mnist") / "MNIST", tmp_path / "MNIST")
    name = "MNIST/raw/train-images-idx3-ubyte"
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:1_000_000])
    assert name in refused_here("mnist/single.py --data-dir .", tmp_path)


def test_a_cifar10_batch_of_another_kind(tmp_path):
    for content in (pickle.dumps({"images": []}), b""):
        for name in (*cifar.TRAIN_FILES, *cifar.VAL_FILES):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(content)
        assert cifar.TRAIN_FILES[0] in refused_here("cifar10/single.py --data-dir .", tmp_path)


def test_help_shows_commands_groups_and_defaults(tmp_path):
    shown = compute(f"{SINGLE} --help", cwd=tmp_path)
    of_recipe = commands(ROOT / "mnist" / "single.py")
    for part in (*of_recipe, "run:", "checkpoints:", "output:", "(default: 64)"):
        assert part in shown
    assert "default: None" not in shown
