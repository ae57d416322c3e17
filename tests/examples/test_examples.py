"""The examples: the same run on any number of processes and after a kill; what each shows."""

import pytest
import torch
from forked import compute
from launch import assert_same, checkpoint, evaluations, largest_difference
from recipes import ROOT, STEP, changed_copy, in_float64

NAMES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
# Small runs of several steps per epoch and two epochs, with a global batch of 16
SIZES = {
    "finetune": "--synthetic 80 --image-size 32 --workers 0",
    "language_model": "--synthetic 600 --context 32 --width 16 --layers 1 --dropout 0",
    "regression": "--synthetic 120",
    "segmentation": "--synthetic 80 --image-size 32 --width 4 --workers 0",
}
FLAGS = "--device cpu -G 16 --epochs 2 --warmup-epochs 0.5"
# What is best, and whether it is the lowest
BEST = {
    "finetune": ("val/accuracy", max),
    "language_model": ("val/loss", min),
    "regression": ("val/rmse", min),
    "segmentation": ("val/iou", max),
}


# In float64. AdamW divides by gradients near 0, and so magnifies the differences of rounding.
TOLERANCE = 1e-9


def command(processes, script):
    return f"torchrun --standalone --nproc-per-node={processes} {script}"


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A function: (the folder of an example in float64, its weights after one process)."""
    runs = {}

    def run(name):
        if name not in runs:
            to = tmp_path_factory.mktemp(name)
            folder = in_float64(to, "examples")
            flags = f"{SIZES[name]} {FLAGS}"
            compute(f"{command(1, folder / name)}.py {flags} --log-dir log", cwd=to)
            runs[name] = folder, checkpoint(to / "log")["model"]
        return runs[name]

    return run


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_compute_what_one_does(name, single, tmp_path):
    folder, expected = single(name)
    flags = f"{SIZES[name]} {FLAGS} --log-dir {tmp_path / 'log'}"
    compute(f"{command(2, folder / name)}.py {flags}", cwd=tmp_path)
    assert largest_difference(checkpoint(tmp_path / "log")["model"], expected) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_run_goes_on_to_the_same_bits(name, tmp_path):
    """SIGKILL within the second epoch, and --resume auto, with loader workers."""
    flags = f"{SIZES[name]} {FLAGS} --checkpoint-every 2".replace("--workers 0", "--workers 2")
    example = ROOT / "examples" / f"{name}.py"
    compute(f"{command(2, example)} {flags} --log-dir whole", cwd=tmp_path)
    saved = checkpoint(tmp_path / "whole")
    step = saved["position"]["steps"] - 1
    kill = f"        if position.steps == {step}:\n            import os, signal\n\n"
    kill += "            os.kill(os.getpid(), signal.SIGKILL)\n"
    folder = changed_copy(tmp_path / "copy", f"examples/{name}.py", STEP, kill + STEP)
    compute(f"{command(2, folder / name)}.py {flags} --log-dir part", cwd=tmp_path, status=9)
    assert checkpoint(tmp_path / "part")["position"]["samples"] > 0, "within an epoch"
    compute(f"{command(2, example)} {flags} --log-dir part --resume auto", cwd=tmp_path)
    for part in ("position", "model", "optimizer", "best"):
        assert_same(checkpoint(tmp_path / "part")[part], saved[part])
    metric, _ = BEST[name]
    ends = [[line[metric] for line in evaluations(tmp_path / run)] for run in ("whole", "part")]
    assert ends[0] == ends[1]


@pytest.mark.parametrize("name", NAMES)
def test_best_is_what_the_example_says(name, tmp_path):
    """best.pt is that of the best evaluation, the highest or the lowest."""
    metric, best = BEST[name]
    flags = f"{SIZES[name]} -G 16 --device cpu --max-steps 8 --eval-every 1 --lr 1e-9"
    compute(f"{command(1, ROOT / 'examples' / name)}.py {flags} --log-dir log", cwd=tmp_path)
    values = [line[metric] for line in evaluations(tmp_path / "log")]
    saved = torch.load(tmp_path / "log" / "best.pt", weights_only=True)
    assert len(values) == 8
    assert saved["best"]["value"] == best(values)
    assert saved["position"]["evaluated_at"] == values.index(best(values)) + 1


@pytest.mark.parametrize("name", NAMES)
def test_defaults_learn(name, tmp_path):
    """The command of the docstring: the loss falls."""
    script = ROOT / "examples" / f"{name}.py"
    compute(f"{command(2, script)} --device cpu --eval-every 20 --log-dir log", cwd=tmp_path)
    losses = [line["val/loss"] for line in evaluations(tmp_path / "log")]
    # Of random weights only the last layers learn.
    bound = 1 if name == "finetune" else 0.9
    assert losses[-1] < bound * losses[0]


def test_tokens_stay_integers(tmp_path):
    """The embedding would refuse others. Bits per character count characters, not bytes."""
    (tmp_path / "text").write_text("äöü€" * 3000)
    flags = "--text text --context 32 --width 16 --layers 1 --device cpu --max-steps 1"
    compute(
        f"{command(1, ROOT / 'examples' / 'language_model.py')} {flags} --log-dir log", cwd=tmp_path
    )
    (line,) = evaluations(tmp_path / "log")
    # Three characters of two bytes and one of three
    ratio = line["val/bits_per_char"] / (line["val/loss"] / torch.tensor(2.0).log().item())
    assert ratio == pytest.approx(9 / 4, rel=0.01)


def test_frozen_layers_stay_frozen_and_rates_stay_apart(tmp_path):
    """Weights and BatchNorm's statistics. --init-partial leaves out a head with other classes."""
    from torchvision.models import resnet18

    before = resnet18(num_classes=7).state_dict()
    torch.save(before, tmp_path / "pretrained.pth")
    flags = f"{SIZES['finetune']} {FLAGS} --init-from pretrained.pth --init-partial --log-dir log"
    script = ROOT / "examples" / "finetune.py"
    output = compute(f"{command(2, script)} {flags} --max-steps 3", cwd=tmp_path)
    assert "left out: fc.bias ([7] in the file), fc.weight ([7, 512] in the file)" in output
    saved = checkpoint(tmp_path / "log")
    for name, value in saved["model"].items():
        frozen = name.startswith(("conv1", "bn1", "layer1", "layer2")) or "running_" in name
        if "num_batches" not in name and not name.startswith("fc."):
            assert torch.equal(value, before[name]) == frozen, name
    body, head = saved["optimizer"]["param_groups"]
    assert head["lr"] == pytest.approx(10 * body["lr"])
