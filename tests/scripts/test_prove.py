"""scripts/prove.py: a right script passes, and each wrong one is noticed where it begins."""

import os
import re
import shlex
from types import SimpleNamespace

import pytest
from forked import ForkedJob
from launch import need_horovod, one_line, run
from recipes import ROOT, changed_copy

from common.errors import RunError
from scripts import prove

# The default model has BatchNorm.
WITH_BATCH_NORM = "--synthetic 640 -b 8 --device cpu"
FLAGS = f"{WITH_BATCH_NORM} --model lenet"
TORCHRUN = "torchrun --nproc-per-node=2"


@pytest.fixture
def proved(tmp_path, monkeypatch, capsys):
    """A function that proves a command, and returns (its status, {check: result}, all it said)."""

    def forked(words, env, stdin, stdout, stderr):
        variables = {name: value for name, value in env.items() if name.startswith("PROVE")}
        job = ForkedJob(shlex.join(words), tmp_path, **variables)
        status = job.finish()
        stdout.write(job.output())
        return SimpleNamespace(returncode=status)

    def of(command):
        monkeypatch.setattr(prove, "subprocess", SimpleNamespace(run=forked, DEVNULL=None))
        monkeypatch.setattr("sys.argv", ["prove.py", *shlex.split(command)])
        status = prove.main()
        said = capsys.readouterr().out
        return status, dict(re.findall(r"^\| (.+?) \| (.+) \|$", said, re.M)), said

    return of


@pytest.mark.parametrize(
    "command",
    [
        f"{TORCHRUN} {{}}/mnist/ddp_launch.py {WITH_BATCH_NORM}",
        f"horovodrun --gloo -np 2 python {{}}/mnist/hvd.py {FLAGS}",
        f"{TORCHRUN} {{}}/mnist/fsdp.py {FLAGS}",
        f"{TORCHRUN} {{}}/examples/regression.py --synthetic 1000 -b 16 --device cpu",
    ],
)
def test_a_right_script(command, proved):
    if command.startswith("horovodrun"):
        need_horovod("gloo")
    status, results, said = proved(command.format(ROOT))
    assert status == 0, said
    assert results["two runs"] == "same bits"
    assert results["SIGKILL after step 7, resumed"] == "same bits"
    assert results["SIGTERM after step 6, resumed"] == "same bits"
    assert results["changes, and is in no checkpoint"].startswith("no model")
    is_asked = "BatchNorm" not in results and "fsdp" not in command
    answered = ", and give one batch the same answer" if is_asked else ""
    assert results["the 2 ranks hold the same"] == f"yes{answered}"
    assert results["one process in place of 2"].startswith("same to rounding")
    assert results["evaluated on one process"].startswith("same to rounding: val/loss, val/")


STEP = "    step = make_step(model, optimizer, sums)\n"
NOISE = (
    "    def draw(module, inputs, logits):\n"
    "        return logits if module.training else logits + torch.randn_like(logits)\n"
    "    model.module.register_forward_hook(draw)\n"
)


def test_noise_in_evaluation(proved, tmp_path):
    """All ranks draw the same for the answer to one batch. The figures are none that one has."""
    copy = changed_copy(tmp_path, "mnist/ddp_launch.py", STEP, NOISE + STEP)
    status, results, said = proved(f"{TORCHRUN} {copy}/ddp_launch.py {FLAGS}")
    assert "give one batch the same answer" in results["the 2 ranks hold the same"]
    assert re.fullmatch(
        r"\*\*differs\*\*: val/loss is [\d.]+ on 2 processes, [\d.]+ on one",
        results["evaluated on one process"],
    ), said
    assert status == 1


LOSS = "        loss = F.cross_entropy(logits, labels)\n        loss.backward()\n"
# What is written, and what the checks say of it: first the one that leads to the cause.
WRONG = {
    "a generator without a seed": (
        LOSS,
        "        noise = __import__('numpy').random.default_rng().normal()\n"
        "        loss = F.cross_entropy(logits * (1 + 0.01 * noise), labels)\n"
        "        loss.backward()\n",
        {"two runs": r"\*\*differs\*\* from step 1: model.* of rank 0"},
    ),
    "a second model that is not in the state": (
        STEP,
        "    critic = torch.nn.Linear(10, 10)\n"
        "    slow = torch.optim.SGD(critic.parameters(), 0.1, 0.9)\n"
        "    def update(module, inputs, logits):\n"
        "        if logits.requires_grad:\n"
        "            critic(logits.detach()).square().mean().backward()\n"
        "            slow.step()\n"
        "        return logits + 0.1 * critic(logits).detach()\n"
        "    model.module.register_forward_hook(update)\n" + STEP,
        {"changes, and is in no checkpoint": r"(?=.*Linear critic)(?=.*SGD slow)"},
    ),
    "a gradient of several steps": (
        "        optimizer.step()\n",
        "        step.calls = getattr(step, 'calls', 0) + 1\n"
        "        optimizer.step()\n"
        "        kept = [w.grad.clone() for w in model.parameters()] if step.calls % 2 else []\n"
        "        for weight, grad in zip(model.parameters(), step.kept):\n"
        "            weight.data -= 0.01 * grad\n"
        "        step.kept = kept\n",
        {
            "SIGKILL after step 7, resumed": r"\*\*differs\*\* from step 6: model.* of rank 0",
            "SIGTERM after step 6, resumed": r"\*\*differs\*\* from step 8: model.* of rank 0",
        },
    ),
    "a scaler that is not in the state": (
        LOSS + "        optimizer.step()\n",
        "        loss = F.cross_entropy(logits, labels)\n"
        "        step.scaler.scale(loss).backward()\n"
        "        step.scaler.step(optimizer)\n"
        "        step.scaler.update()\n",
        {
            "changes, and is in no checkpoint": r"\*\*GradScaler\*\*",
            "one process in place of 2": "same to rounding",
        },
    ),
    # As the scales of torchvision's Faster R-CNN are.
    "a scale that is guessed from the first batch": (
        STEP,
        "    guessed = {}\n"
        "    def scale(module, inputs):\n"
        "        guessed.setdefault('scale', inputs[0].std().item())\n"
        "        return (inputs[0] / guessed['scale'],)\n"
        "    model.module.register_forward_pre_hook(scale)\n" + STEP,
        {
            "SIGKILL after step 7, resumed": r"\*\*differs\*\* from step 6: model.* of rank 0",
            "the 2 ranks hold the same": r"\*\*no\*\* from step 4: the answer to one batch",
        },
    ),
    "a run that does not hear the signal": (
        "            if run.stop.agreed:\n",
        "            if False:\n",
        {"SIGTERM after step 6, resumed": r"\*\*it went on to its end\*\*"},
    ),
    "a run that does not save within an epoch": (
        "            if run.save_due:\n",
        "            if False:\n",
        {"SIGKILL after step 7, resumed": r"\*\*it began again at step 1\*\*"},
    ),
    "a state of each rank": (
        '        "position": position,\n',
        '        "position": position,\n        "mine": Mine(rank),\n',
        {"the 2 ranks hold the same": r"\*\*no\*\* from step 1: mine.value of rank 1 is not that"},
    ),
    "a loss that each rank weighs otherwise": (
        LOSS,
        "        loss = F.cross_entropy(logits, labels) * (1.5 - dist.get_rank())\n"
        "        loss.backward()\n",
        {"one process in place of 2": r"\*\*differs\*\* by .*; most in .*weight"},
    ),
    # As with a rate of 0 in the first step, or where the first batches have no padding.
    "a loss that each rank weighs otherwise from the second step on": (
        LOSS,
        "        step.calls = getattr(step, 'calls', 0) + 1\n"
        "        weight = 1.5 - dist.get_rank() if step.calls > 1 else 1.0\n"
        "        loss = F.cross_entropy(logits, labels) * weight\n"
        "        loss.backward()\n",
        {"one process in place of 2": r"\*\*differs\*\* by .e-0[5-9] of the first update"},
    ),
    "figures of one rank": (
        "    return averages(sums.total(dist.all_reduce))\n",
        "    return averages(sums.total())\n",
        {
            "evaluated on one process": r"\*\*differs\*\*: val/loss is .* on 2 processes",
            "one process in place of 2": "same to rounding",
        },
    ),
}
MINE = """
class Mine:
    def __init__(self, rank):
        self.value = rank

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def main():
"""
# Each has dropout, which must not hide what is wrong.
MORE = """    model.module.append(torch.nn.Dropout(0.1))
    step.kept = []
    step.scaler = torch.amp.GradScaler("cpu")
    return step
"""


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_script(name, proved, tmp_path):
    line, replacement, expected = WRONG[name]
    copy = changed_copy(tmp_path, "mnist/ddp_launch.py", line, replacement)
    script = copy / "ddp_launch.py"
    text = script.read_text().replace("\ndef main():\n", MINE)
    script.write_text(text.replace("    return step\n", MORE))
    # Which must not hide it either.
    flags = WITH_BATCH_NORM if "weighs" in name else FLAGS
    status, results, said = proved(f"{TORCHRUN} {script} {flags}")
    assert status == 1
    for check, result in expected.items():
        assert re.search(result, results[check]), said
    # The first leads to the cause.
    check = next(iter(expected))
    assert f"{check}: {prove.MEANINGS[meaning_of(check)]}" in said


def meaning_of(check):
    by_first_word = {
        "two": "two runs",
        "changes,": "outside",
        "the": "replicas",
        "one": "one process",
        "evaluated": "figures",
    }
    word = check.split()[0]
    return by_first_word.get(word, word)


def test_a_script_that_ends_early(proved, tmp_path):
    """With status 0: the rows would compare what there is."""
    line = "        position.advance()\n"
    early = "        if position.steps == 8:\n            sys.exit()\n"
    copy = changed_copy(tmp_path, "mnist/ddp_launch.py", line, line + early)
    with pytest.raises(RunError, match="ended before step 12"):
        proved(f"{TORCHRUN} {copy}/ddp_launch.py {FLAGS}")


def test_real_processes(tmp_path):
    """By their PYTHONPATH, and not from the fork server."""
    command = f"python {ROOT}/scripts/prove.py python {ROOT}/mnist/single.py {FLAGS}"
    said = run(command, tmp_path)
    assert said.count("| same bits |") == 3
    assert "| changes, and is in no checkpoint | no model, " in said


def test_a_command_that_fails(tmp_path):
    """In one line, which the script has printed before torchrun's summary. Nothing is left."""
    command = f"python {ROOT}/scripts/prove.py {TORCHRUN} {ROOT}/mnist/ddp_launch.py --epoch 3"
    line = one_line(run(command, tmp_path, status=1))
    assert "ended with status 1: ddp_launch.py: unrecognized arguments: --epoch 3" in line
    assert "give the command" in one_line(
        run(f"python {ROOT}/scripts/prove.py", tmp_path, status=2)
    )
    assert not os.listdir(tmp_path)
