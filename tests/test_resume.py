"""A run that was killed and resumed ends with the very weights of one that was not."""

import json
import random
import re
import signal
import time

import pytest
import torch
from launch import ROOT, Job, changed_copy, checkpoint, largest_difference, need_horovod, run, small, strategies
from safetensors.torch import load_file

from common import checkpoint as checkpoints

RUNS = {"single": "mnist", "ddp_spawn": "cifar10", "ddp_launch": "imagenet", "hvd_gloo": "cifar10", "hvd_mpi": "mnist"}
FLAGS = {"mnist": "", "cifar10": "", "imagenet": f"{small('imagenet')} -b 64 --lr 0.005"}
EPOCHS, STEPS = 6, 32  # of 4096 images in global batches of 128
SPAWN = f"python {ROOT}/mnist/ddp_spawn.py"


def position(folder):
    """How many steps the newest checkpoint in a folder has behind it."""
    newest = checkpoints.committed(folder)
    if not newest:
        return 0
    _, epoch, _, step, _ = newest[0].name.split("-")
    return int(epoch) * STEPS + int(step)


@pytest.mark.parametrize("strategy", RUNS)
def test_ten_kills(strategy, tmp_path):
    """SIGKILL at ten random steps of one run, which --resume auto takes up again each time."""
    if strategy.startswith("hvd"):
        need_horovod(strategy)
    recipes = ROOT / RUNS[strategy]
    command = {"single": f"python {recipes}/single.py -b 128 --lr 0.04", **strategies(2, recipes)}[strategy]
    command += f" --synthetic 4096 --epochs {EPOCHS} --model convnet --wd 5e-4 --device cpu --checkpoint-every 3"
    command += f" {FLAGS[RUNS[strategy]]}"
    command += " --resume auto"
    assert "starting from the beginning" in run(f"{command} --log-dir whole", cwd=tmp_path)
    for target in sorted(random.sample(range(1, EPOCHS // 2 * STEPS), k=10)):  # far enough from the end to be in time
        killed = Job(f"{command} --log-dir part", cwd=tmp_path)
        end = time.monotonic() + 90
        while position(tmp_path / "part") < target:
            assert time.monotonic() < end and killed.process.poll() is None, killed.output()
            time.sleep(0.002)
        killed.signal(signal.SIGKILL)  # at once what started the ranks, which end with it ...
        killed.signal(signal.SIGKILL, everyone=True)  # ... and whoever is in a group of its own
        assert killed.finish() != 0
    output = run(f"{command} --log-dir part", cwd=tmp_path)
    assert "resumed from part/epoch-000" in output
    assert "skipped" not in output
    whole, resumed = checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "part")
    assert whole["epoch"] == resumed["epoch"] == EPOCHS
    assert checkpoints.digest(weights(whole)) == checkpoints.digest(weights(resumed))
    for part in ("random_states", "optimizer", "scheduler"):
        assert_same(whole[part], resumed[part])
    for pass_ in ("train", "val"):  # the figures of an epoch that was interrupted are those of the whole epoch
        for figure in ("loss", "accuracy", "images"):
            assert [epoch[pass_][figure] for epoch in whole["epochs"]] == \
                   [epoch[pass_][figure] for epoch in resumed["epochs"]]
    assert json.loads((tmp_path / "part" / "results.json").read_text())["epochs"] == resumed["epochs"]


@pytest.mark.parametrize("strategy", ["single", "ddp_spawn", "ddp_launch --workers 1", "hvd_gloo", "hvd_mpi"])
def test_warned_and_resumed(strategy, tmp_path):
    """SIGUSR1 to one of the ranks stops all of them, after the same step, with a checkpoint and status 0."""
    strategy, _, flag = strategy.partition(" ")
    if strategy.startswith("hvd"):
        need_horovod(strategy)
    recipes = ROOT / RUNS[strategy]
    command = {"single": f"python {recipes}/single.py", **strategies(2, recipes)}[strategy]
    command += f" --synthetic 4096 --epochs 8 --model lenet --device cpu --resume auto --timeout 60 {flag}"
    command += f" {FLAGS[RUNS[strategy]]}"
    run(f"{command} --log-dir whole", cwd=tmp_path)
    job = Job(f"exec {command} --log-dir part", cwd=tmp_path)
    job.wait_for("epoch 2/")
    told = job.process  # passes it on to the ranks, or is the only one
    if strategy in ("ddp_launch", "hvd_gloo"):  # their launchers do not, and SLURM reaches the ranks behind them
        told = next(process for process in job.alive()
                    if re.search(r"python\S*( -u)? \S*/(ddp_launch|hvd)\.py", " ".join(process.cmdline()[:3]))
                    and not process.name().startswith("sh")
                    and process.cmdline() != process.parent().cmdline())  # which a loader worker's is
    told.send_signal(signal.SIGUSR1)
    assert job.finish(30) == 0, job.output()
    assert job.output().count("stopped by SIGUSR1 after epoch") == 1
    assert "Traceback" not in job.output()
    stopped = (tmp_path / "part" / "last.pt").resolve().name
    assert f"resumed from part/{stopped}" in run(f"{command} --log-dir part", cwd=tmp_path)
    whole, resumed = checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "part")
    assert_same(whole["model"], resumed["model"])
    losses, again = ([epoch["train"]["loss"] for epoch in saved["epochs"]] for saved in (whole, resumed))
    assert losses == again
    assert len(losses) == 8


@pytest.mark.parametrize(("warned", "stops"), [(3, "after epoch 0 and 3 steps"), (4, "after epoch 0 and 4 steps"),
                                               (8, "after epoch 1 and 4 steps")])
def test_warned_at_the_end_of_an_epoch(warned, stops, tmp_path):
    """It stops after that very step; after the last of the 4 steps of an epoch the evaluation is still to come."""
    line = "        metrics.update(loss, logits, labels)\n"
    slow = "        __import__('time').sleep(0.06)\n"
    raised = f"        if scheduler.last_epoch == {warned}: __import__('signal').raise_signal(10)\n"
    copy = changed_copy(tmp_path, "mnist/single.py", line, line + slow + raised)
    flags = "--synthetic 256 --epochs 2 --model lenet --device cpu"
    run(f"python {ROOT}/mnist/single.py {flags} --log-dir whole", cwd=tmp_path)
    output = run(f"python {copy}/single.py {flags} --log-dir part", cwd=tmp_path)
    assert f"stopped by SIGUSR1 {stops}:" in output
    run(f"python {ROOT}/mnist/single.py {flags} --log-dir part --resume auto", cwd=tmp_path)
    whole, part = checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "part")
    assert_same(whole["model"], part["model"])
    assert [epoch["train"]["loss"] for epoch in whole["epochs"]] == [epoch["train"]["loss"] for epoch in part["epochs"]]


def weights(saved):
    return b"".join(tensor.numpy().tobytes() for tensor in saved["model"].values())


def assert_same(a, b):
    """Bit by bit, through dicts and lists."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    else:
        assert a == b


def test_another_world_size(tmp_path):
    """Between two epochs: 2 processes with batch 32, then 1 with 64, end where 2 processes end. Within one: refused."""
    common = "--synthetic 640 --model lenet --scale-lr none --lr 0.04 --epochs 4 --device cpu"
    run(f"{SPAWN} -g 2 -b 32 {common} --log-dir two", cwd=tmp_path)
    two = Job(f"{SPAWN} -g 2 -b 32 {common} --log-dir part --keep 100 --checkpoint-every 4", cwd=tmp_path)
    assert two.finish() == 0
    boundary, within = (next((tmp_path / "part").glob(f"epoch-0002-step-{step}-*")) for step in ("000000", "000004"))
    one = f"python {ROOT}/mnist/single.py -b 64 {common} --log-dir one"
    assert "resume it on 2" in run(f"{one} --resume {within}", cwd=tmp_path, status=2)
    output = run(f"{one} --resume {boundary}", cwd=tmp_path)
    assert "world size 1" in output
    assert "epoch 3/4" in output
    saved = checkpoint(tmp_path / "one")
    assert largest_difference(saved["model"], checkpoint(tmp_path / "two")["model"]) < 1e-5
    assert saved["scheduler"]["last_epoch"] == 4 * 10
    # and with the usual scaling on more ranks: the rate is that of the new run at the same epoch
    linear = common.replace("none", "linear")
    run(f"{SPAWN} -g 3 -b 32 {linear} --log-dir three", cwd=tmp_path)
    third = next((tmp_path / "three").glob("epoch-0003-*"))
    run(f"{SPAWN} -g 1 -b 32 {linear} --resume {third} --log-dir back", cwd=tmp_path)
    run(f"python {ROOT}/mnist/single.py -b 32 {linear} --log-dir whole", cwd=tmp_path)
    assert [epoch["lr"] for epoch in checkpoint(tmp_path / "back")["epochs"]][3:] == \
           [epoch["lr"] for epoch in checkpoint(tmp_path / "whole")["epochs"]][3:]


def test_other_ranks_need_not_see_the_file(tmp_path):
    """Rank 0 reads it for all: the second machine has other folders."""
    for machine in ("first", "second"):
        (tmp_path / machine).mkdir()
    common = "--synthetic 640 --model lenet --device cpu --log-dir log"
    run(f"{SPAWN} -g 2 {common} --epochs 1", cwd=tmp_path / "first")
    from common.processes import free_port

    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    jobs = [Job(f"{SPAWN} -n 2 -g 1 -nr {k} {common} --epochs 2 --resume auto", cwd=tmp_path / machine, **where)
            for k, machine in enumerate(("first", "second"))]
    assert [job.finish() for job in jobs] == [0, 0], [job.output() for job in jobs]
    assert "after epoch 1" in jobs[0].output()
    assert jobs[1].output() == ""
    assert not list((tmp_path / "second").iterdir())
    assert checkpoint(tmp_path / "first" / "log")["epoch"] == 2


def test_export(tmp_path):
    """The weights of the best epoch, as safetensors; a run that has nothing left to train exports as well."""
    single = f"python {ROOT}/mnist/single.py --synthetic 640 --epochs 3 --log-dir log --export weights.safetensors"
    assert "exported epoch-" in run(single, cwd=tmp_path)
    best = torch.load(tmp_path / "log" / "best.pt", weights_only=True)
    assert best["epoch"] == max(best["epochs"], key=lambda epoch: epoch["val"]["accuracy"])["epoch"]
    assert_same(load_file(tmp_path / "weights.safetensors"), dict(best["model"]))
    (tmp_path / "weights.safetensors").unlink()
    output = run(f"{single} --resume auto", cwd=tmp_path)
    assert "--epochs asks for no more" in output
    assert_same(load_file(tmp_path / "weights.safetensors"), dict(best["model"]))
