"""A recipe that is copied into another project, with common/ beside it, runs there, also with its model and data."""

import json
import re
import shutil

import pytest
import torch
from launch import RECIPES, ROOT, name_of, need_horovod, run

from common import data

STARTS = {
    "single.py": "python {}", "dp.py": "python {}", "ddp_spawn.py": "python {} -g 2", "hvd.py":
    "horovodrun --gloo -np 2 python {}", "ddp_launch.py": "torchrun --standalone --nproc-per-node=2 {}",
    "ddp_amp.py": "torchrun --standalone --nproc-per-node=2 {}", "apex_amp.py": "python {}",
}


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_copy_out(recipe, tmp_path):
    """Data set by data set in turn: flat, as train.py beside common/, and nested, in a folder beside common/."""
    if recipe.name == "hvd.py":
        need_horovod("gloo")
    flat = recipe.parent.name == "mnist"
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copytree(ROOT / "common", project / "common", ignore=shutil.ignore_patterns("__pycache__"))
    copy = project / "train.py" if flat else project / "training" / recipe.name
    copy.parent.mkdir(exist_ok=True)
    shutil.copy(recipe, copy)
    command = f"{STARTS[recipe.name].format(copy)} --synthetic 512 --dry-run"
    if recipe.name == "apex_amp.py":  # without a launcher, if not without Apex or a GPU: a line of its own, at least
        assert run(command, cwd=elsewhere, status=2).startswith(f"{copy.name}: ")
    else:
        assert run(f"{command} --model lenet", cwd=elsewhere).count("epoch ") == 1


@pytest.mark.parametrize("name", ["ddp_launch.py", "hvd.py"])
def test_own_model_and_data(name, tmp_path):
    """What the README says to put in place of two lines; a run that goes on within an epoch counts each image once."""
    if name == "hvd.py":
        need_horovod("gloo")
    code = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    rank = {"ddp_launch.py": ("rank", "world_size"), "hvd.py": ("hvd.rank()", "hvd.size()")}[name]
    text = (ROOT / "mnist" / name).read_text().replace('dataset="mnist"', 'dataset="mine"')
    for start, block in zip(("    model =", "    train, val ="), code, strict=True):
        lines = block.replace("rank, world_size,", f"{rank[0]}, {rank[1]},")
        text = re.sub(rf"^{start}.*\n", lambda _, lines=lines: re.sub("^", "    ", lines, flags=re.M).rstrip(" "), text,
                      count=1, flags=re.MULTILINE)
    shutil.copytree(ROOT / "common", tmp_path / "common", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "train.py").write_text(text)
    shown = run(f"{STARTS[name].format('train.py')} -b 50 --epochs 2 --log-dir log", tmp_path)
    assert shown.startswith(("mine: DDP", "mine: Horovod"))
    results = json.loads((tmp_path / "log" / "results.json").read_text())["epochs"]
    assert [(epoch["train"]["images"], epoch["val"]["images"]) for epoch in results] == [(1000, 200)] * 2


def test_what_counts_wrong_is_refused():
    images, labels = torch.zeros(10, 1, 4, 4), torch.zeros(10)
    with pytest.raises(TypeError, match="images are uint8"):
        data.ImageTensor(images, labels)
    dataset = data.ImageTensor(images.to(torch.uint8), labels)
    sampler = torch.utils.data.DistributedSampler(dataset, num_replicas=1, rank=0)
    with pytest.raises(TypeError, match="DistributedSampler repeats samples"):
        data.DataObject(dataset, sampler, None, None, None, 10, None)
