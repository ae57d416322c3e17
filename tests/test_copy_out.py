"""A recipe that is copied into another project, with common/ beside it, runs there."""

import shutil

import pytest
from forked import compute
from launch import Job, need_horovod
from recipes import RECIPES, carried, name_of, small

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
