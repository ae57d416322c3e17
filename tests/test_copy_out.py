"""A recipe that is copied into another project, with common/ beside it, runs there, also with its model and data."""

import json
import re
import shutil
import time

import pytest
import torch
from forked import ForkedJob, compute
from launch import Job, checkpoint, need_horovod
from recipes import RECIPES, ROOT, carried, name_of, small

STARTS = {
    "single.py": "python {}", "dp.py": "python {}", "ddp_spawn.py": "python {} -g 2", "hvd.py":
    "horovodrun --gloo -np 2 python {}", "ddp_launch.py": "torchrun --standalone --nproc-per-node=2 {}",
    "fsdp.py": "torchrun --standalone --nproc-per-node=2 {}",
    "ddp_amp.py": "torchrun --standalone --nproc-per-node=2 {}", "apex_amp.py": "python {}",
}


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_copy_out(recipe, tmp_path):
    """MNIST's flat, as train.py beside common/; the others nested, in a folder beside common/."""
    if recipe.name == "hvd.py":
        need_horovod("gloo")
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    copy = project / "train.py" if recipe.parent.name == "mnist" else project / "training" / recipe.name
    for folder in (elsewhere, copy.parent, project / "common"):
        folder.mkdir(parents=True, exist_ok=True)
    for path in carried(recipe):
        shutil.copy(path, {recipe: copy}.get(path, project / "common" / path.name if path.parent.name == "common"
                                             else copy.parent / path.name))
    command = f"{STARTS[recipe.name].format(copy)} {small(recipe.parent.name)} --synthetic 512 --dry-run"
    if recipe.name == "apex_amp.py":  # fails without Apex, or else without a launcher
        job = Job(command, cwd=elsewhere)
        assert job.finish() != 0
        assert "from apex import amp" in job.output() or "torchrun" in job.output()
    else:
        assert compute(f"{command} --model lenet", cwd=elsewhere).count("epoch 1/1: ") == 1


MINE = '''
import math

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset


class Stripes(Dataset):
    """Float images [1, 12, 12] of stripes in four directions, with a new offset and new noise each time."""

    def __init__(self, count, seed):
        self.labels = np.random.default_rng(seed).integers(4, size=count)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        x, y = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
        along = (x, y, x + y, x - y)[self.labels[index]]
        return torch.cos(along + np.random.uniform(6.28)).unsqueeze(0) + torch.randn(1, 12, 12), self.labels[index]


def net():
    return nn.Sequential(nn.Conv2d(1, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveMaxPool2d(2), nn.Flatten(),
                         nn.Dropout(0.2), nn.Linear(64, 4))


class Factor:
    """A factor for LambdaLR, which saves its attributes; here a function, which cannot be loaded."""

    def __init__(self):
        self.shape = math.cos

    def __call__(self, step):
        return self.shape(step / 100)
'''
# The lines of the copied recipe and what they become, for any strategy ...
REPLACED = {
    "from common import datasets, ": "from common import ",
    ", models, processes": ", processes",
    "\ndef parse_args():": "from mine import Factor, Stripes, net\n\n\ndef parse_args():",
    'dataset="mnist"': 'dataset="mine"',
    "    flags.add_data(parser)\n": "",
    '    flags.add_training(parser, lrs={"convnet": 0.02, "lenet": 0.02}, epochs=5, batch_size=64)\n'
    "    flags.add_sgd(parser, weight_decay=0)":
    '    flags.add_training(parser, lrs={"mine": 0.01}, epochs=3, batch_size=16)',
    "datasets.mnist(args)": "Stripes(1000, seed=1), Stripes(200, seed=2)",
    "batch_size, device)": "batch_size, device, workers=1)",
    "models.MODELS[args.model](channels=1, size=28)": "net()",
    "torch.optim.SGD(model.parameters(), lr, args.momentum, weight_decay=args.weight_decay, fused=True)":
    "torch.optim.AdamW(model.parameters(), lr)",
    '    state = {"model": model, "optimizer": optimizer}':
    "    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=args.epochs * len(train))\n"
    '    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}',
    "        for group in optimizer.param_groups:  # in each step: warm-up, then a cosine to 0\n"
    '            group["lr"] = schedule.warmup_cosine(run.args, lr, run.epoch + run.samples / len(train.dataset))': "",
}
# ... and for each
STEP = {
    "ddp_launch.py": """        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.state["scheduler"].step()""",
    "hvd.py": """        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        run.state["scheduler"].step()""",
}
BY_HAND = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": "0"}  # as torchrun for one process, without its output


def own_script(folder, recipe):
    """Make `folder` a project with train.py, which is a copied recipe of MNIST with lines replaced, and mine.py."""
    shutil.copytree(ROOT / "common", folder / "common", ignore=shutil.ignore_patterns("__pycache__"))
    text = (ROOT / "mnist" / recipe).read_text()
    for line, replacement in {**REPLACED, "        optimizer.step()": STEP[recipe]}.items():
        assert text.count(line) == (2 if "batch_size, device" in line else 1), line
        text = text.replace(line, replacement)
    (folder / "train.py").write_text(text)
    (folder / "mine.py").write_text(MINE)
    return STARTS[recipe].format("train.py")


@pytest.mark.parametrize("recipe", STEP)
def test_own_script(recipe, tmp_path):
    """It learns; killed within an epoch and resumed, it ends with the weights of an undisturbed run."""
    if recipe == "hvd.py":
        need_horovod("gloo")
    command = f"{own_script(tmp_path, recipe)} --device cpu --checkpoint-every 3 --resume auto"
    shown = compute(f"{command} --log-dir whole", cwd=tmp_path)
    assert re.match(r"mine: .* world size 2 .* 32 global \| lr 0\.02\n", shown)
    whole = json.loads((tmp_path / "whole" / "results.json").read_text())["epochs"]
    assert [(epoch["train"]["images"], epoch["val"]["images"]) for epoch in whole] == [(992, 200)] * 3
    assert whole[-1]["val"]["accuracy"] > 0.8, "chance is 0.25"

    job = ForkedJob(f"{command} --log-dir part", cwd=tmp_path)
    end = time.monotonic() + 90
    while not (tmp_path / "part" / "last.pt").exists():
        assert time.monotonic() < end and job.running(), job.output()
        time.sleep(0.01)
    job.kill()
    assert job.finish() != 0
    killed = checkpoint(tmp_path / "part")
    assert (killed["epoch"], killed["samples"] % 96) == (0, 0)
    assert f"resumed from part/last.pt at epoch 1, sample {killed['samples']}" in \
        compute(f"{command} --log-dir part", cwd=tmp_path)
    undisturbed, resumed = checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "part")
    for name in ("model", "optimizer"):
        torch.testing.assert_close(resumed[name], undisturbed[name], rtol=0, atol=0)
    for split in ("train", "val"):
        for name in ("loss", "accuracy", "images"):
            assert resumed["history"][0][split][name] == undisturbed["history"][0][split][name]

    # OneCycleLR counts steps and sets the rate: it resumes only with the same global batch and scaled rate
    alone = "python train.py --device cpu --epochs 3 --resume whole/previous.pt --dry-run"
    line, = compute(f"{alone} -b 16", cwd=tmp_path, status=2, **BY_HAND).splitlines()
    assert "scheduler" in line
    assert "'global_batch': 32" in line and "'global_batch': 16" in line
    line, = compute(f"{alone} -b 32", cwd=tmp_path, status=2, **BY_HAND).splitlines()
    assert "'lr': 0.02" in line and "'lr': 0.01" in line
    assert "resumed from" in compute(f"{alone} -b 32 --lr 0.02", cwd=tmp_path, **BY_HAND)


def test_own_script_says_what_it_takes(tmp_path):
    """A flag that it leaves out is not in its --help; a scheduler that no run could read back is refused when saved."""
    own_script(tmp_path, "ddp_launch.py")
    shown = compute("python train.py --help", cwd=tmp_path)
    assert "--batch-size" in shown
    assert "--synthetic" not in shown
    assert "--data-dir" not in shown
    text = (tmp_path / "train.py").read_text()
    line, = re.findall(r"torch\.optim\.lr_scheduler\.OneCycleLR\(.*\)", text)
    (tmp_path / "train.py").write_text(text.replace(line, "torch.optim.lr_scheduler.LambdaLR(optimizer, Factor())"))
    assert "math.cos" in compute("python train.py --device cpu --log-dir log", cwd=tmp_path, status=1, **BY_HAND)
    assert not (tmp_path / "log" / "last.pt").exists()
