"""A recipe that is copied into another project, with common/ beside it, runs there."""

import shutil

import pytest
from launch import RECIPES, ROOT, name_of, need_horovod, run

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
