"""A recipe that is copied into another project, with what it imports, runs there."""

import pytest
from forked import ForkedJob, compute
from launch import need_horovod
from recipes import ROOT, small

from scripts import take

TORCHRUN = "torchrun --standalone --nproc-per-node=2 {}"
# The recipes of the other data sets import the same (test_siblings.py), and what is beside them.
STARTS = {
    "mnist/single.py": "python {}",
    "cifar10/dp.py": "python {}",
    "imagenet/ddp_spawn.py": "python {} -g 2",
    "mnist/hvd.py": "horovodrun --gloo -np 2 python {}",
    "cifar10/ddp_launch.py": TORCHRUN,
    "imagenet/fsdp.py": TORCHRUN,
    "mnist/ddp_amp.py": TORCHRUN,
    "cifar10/apex_amp.py": "python {}",
}


@pytest.mark.parametrize("name", STARTS)
def test_copy_out(name, tmp_path):
    """MNIST's flat, as train.py beside common/; the others nested, in a folder beside common/."""
    if name.endswith("hvd.py"):
        need_horovod("gloo")
    recipe = ROOT / name
    project = tmp_path / "project"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if recipe.parent.name == "mnist":
        copy = project / "train.py"
        take.take(recipe, project, copy.name)
    else:
        copy = project / "training" / recipe.name
        take.take(recipe, copy.parent, copy.name)
        for package in take.PACKAGES:
            (copy.parent / package).rename(project / package)
    flags = f"{small(recipe.parent.name)} --synthetic 512 --model lenet --dry-run"
    command = f"{STARTS[name].format(copy)} {flags}"
    if recipe.name == "apex_amp.py":
        # It fails without Apex, or else without a launcher.
        job = ForkedJob(command, elsewhere)
        assert job.finish() != 0
        assert "Apex with amp is not installed" in job.output() or "torchrun" in job.output()
    else:
        assert compute(command, elsewhere).count(" | val loss ") == 1


def test_an_example_needs_only_common(tmp_path):
    for name in ("regression", "language_model"):
        recipe = ROOT / "examples" / f"{name}.py"
        folders = {path.relative_to(ROOT).parts[0] for path in take.needed(recipe)}
        assert folders == {"examples", "common"}
    take.take(recipe, tmp_path, "train.py")
    output = compute(f"{TORCHRUN.format('train.py')} --device cpu --dry-run", cwd=tmp_path)
    assert output.startswith(f"{name}: DDP | world size 2")
