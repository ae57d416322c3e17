"""A recipe that is copied into another project, with what it imports, runs there."""

import pytest
from forked import compute
from launch import Job, need_horovod
from recipes import RECIPES, ROOT, name_of, small

from scripts import take

TORCHRUN = "torchrun --standalone --nproc-per-node=2 {}"
STARTS = {
    "single.py": "python {}",
    "dp.py": "python {}",
    "ddp_spawn.py": "python {} -g 2",
    "hvd.py": "horovodrun --gloo -np 2 python {}",
    "ddp_launch.py": TORCHRUN,
    "fsdp.py": TORCHRUN,
    "ddp_amp.py": TORCHRUN,
    "apex_amp.py": "python {}",
}


def room(path):
    """The name of the folder of this repository that holds `path`, however deep."""
    return path.relative_to(ROOT).parts[0]


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_copy_out(recipe, tmp_path):
    """MNIST's flat, as train.py beside common/; the others nested, in a folder beside common/."""
    if recipe.name == "hvd.py":
        need_horovod("gloo")
    project = tmp_path / "project"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if recipe.parent.name == "mnist":
        copy = project / "train.py"
        take.take(recipe, project, copy.name)
    else:
        copy = project / "training" / recipe.name
        take.take(recipe, copy.parent, copy.name)
        for name in take.PACKAGES:
            (copy.parent / name).rename(project / name)
    flags = f"{small(recipe.parent.name)} --synthetic 512 --dry-run"
    command = f"{STARTS[recipe.name].format(copy)} {flags}"
    if recipe.name == "apex_amp.py":
        # It fails without Apex, or else without a launcher.
        job = Job(command, cwd=elsewhere)
        assert job.finish() != 0
        assert "from apex import amp" in job.output() or "torchrun" in job.output()
    else:
        assert compute(f"{command} --model lenet", cwd=elsewhere).count(" | val loss ") == 1


@pytest.mark.parametrize("name", ["language_model", "regression"])
def test_an_example_needs_only_common(name, tmp_path):
    recipe = ROOT / "examples" / f"{name}.py"
    assert {room(path) for path in take.needed(recipe)} == {"examples", "common"}
    take.take(recipe, tmp_path, "train.py")
    output = compute(f"{TORCHRUN.format('train.py')} --device cpu --dry-run", cwd=tmp_path)
    assert output.startswith(f"{name}: DDP, torchrun | world size 2")
