"""scripts/prove.py: a right script passes, and each fault in a wrong one is noticed by its row."""

import os
import re
import shlex
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from forked import ForkedJob, refused
from launch import need_horovod
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

    def of(command, agent=False):
        def forked(words, env, stdin, stdout, stderr):
            variables = {name: value for name, value in env.items() if name.startswith("PROVE")}
            job = ForkedJob(shlex.join(words), tmp_path, agent=agent, **variables)
            status = job.finish()
            stdout.write(job.output())
            return SimpleNamespace(returncode=status)

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
    ids=["DDP", "Horovod", "FSDP", "example"],
)
def test_a_right_script(command, proved):
    if command.startswith("horovodrun"):
        need_horovod("gloo")
    status, results, said = proved(command.format(ROOT))
    assert status == 0, said
    assert results["two runs"] == "same bits"
    assert results["SIGKILL after step 7, resumed"] == "same bits"
    assert results["SIGTERM after step 7, resumed"] == "same bits"
    assert results["changes, and is in no checkpoint"].startswith("no model")
    is_asked = "BatchNorm" not in results and "fsdp" not in command
    answered = ", and give one batch the same answer" if is_asked else ""
    assert results["the 2 ranks hold the same"] == f"yes{answered}"
    assert results["one process in place of 2"].startswith("same to rounding")
    assert results["evaluated on one process"].startswith("same to rounding: val/loss, val/")


# The first column of each row, by its key in prove.MEANINGS.
CHECKS = {
    "two runs": "two runs",
    "SIGKILL": "SIGKILL after step 7, resumed",
    "SIGTERM": "SIGTERM after step 7, resumed",
    "outside": "changes, and is in no checkpoint",
    "replicas": "the 2 ranks hold the same",
    "one process": "one process in place of 2",
    "figures": "evaluated on one process",
}


@dataclass
class Fault:
    """What is written in place of which line of a script, and what prove.py has to say of it.

    `says` has a regular expression for the result of each row: first the row whose meaning leads
    to the cause.
    """

    name: str
    line: str
    replacement: str
    says: dict[str, str]


STEP = "    def step(images, labels):\n"
BACKWARD = "        loss.backward()\n        optimizer.step()\n"
LOSS = "        loss = F.cross_entropy(logits, labels)\n" + BACKWARD
# The scripts, each with faults that do not hide each other.
WRONG = [
    [
        Fault(
            "a generator without a seed",
            LOSS,
            "        noise = __import__('numpy').random.default_rng().normal()\n"
            "        loss = F.cross_entropy(logits * (1 + 0.01 * noise), labels)\n" + BACKWARD,
            {"two runs": r"\*\*differs\*\* from step 1: model.* of rank 0"},
        ),
        Fault(
            "a second model that is not in the state",
            STEP,
            "    critic = torch.nn.Linear(10, 10)\n"
            "    slow = torch.optim.SGD(critic.parameters(), 0.1, 0.9)\n"
            "    def update(module, inputs, logits):\n"
            "        if logits.requires_grad:\n"
            "            critic(logits.detach()).square().mean().backward()\n"
            "            slow.step()\n"
            "        return logits + 0.1 * critic(logits).detach()\n"
            "    model.register_forward_hook(update)\n" + STEP,
            {"outside": r"(?=.*Linear critic)(?=.*SGD slow)"},
        ),
        Fault(
            "a run that does not save within an epoch",
            "    run = Run(args, world, state, sums, rates, train)\n",
            "    args.checkpoint_every = None\n"
            "    run = Run(args, world, state, sums, rates, train)\n",
            {"SIGKILL": r"\*\*it began again at step 1\*\*"},
        ),
        Fault(
            "a state of each rank",
            "    while not run.over:\n",
            "    run.best.update(world.rank)\n    while not run.over:\n",
            {"replicas": r"\*\*no\*\* from step 1: best.\w+ of rank 1 is not that"},
        ),
    ],
    [
        Fault(
            "a run that does not hear the signal",
            "    while not run.over:\n",
            "    run.stop.carried_by = lambda all_reduce: all_reduce\n    while not run.over:\n",
            {"SIGTERM": r"\*\*it went on to its end\*\*"},
        ),
        # Not in the first step, as with a rate of 0 there, or where its batches have no padding.
        Fault(
            "a loss that each rank weighs otherwise",
            LOSS,
            "        weight = 1.5 - dist.get_rank() if optimizer.state else 1.0\n"
            "        loss = F.cross_entropy(logits, labels) * weight\n" + BACKWARD,
            {"one process": r"\*\*differs\*\* by .e-0[5-9] of the first update.* in .*weight"},
        ),
        Fault(
            "figures of one rank",
            "    return sums.result(dist.all_reduce)\n",
            "    return sums.result()\n",
            {"figures": r"\*\*differs\*\*: val/\w+ is [\d.]+ on 2 processes, [\d.]+ on one"},
        ),
    ],
    [
        Fault(
            "a gradient of several steps",
            BACKWARD,
            "        loss.backward()\n"
            "        global kept, calls\n"
            "        calls += 1\n"
            "        optimizer.step()\n"
            "        weights = list(model.parameters())\n"
            "        for weight, grad in zip(weights, kept):\n"
            "            weight.data -= 0.01 * grad\n"
            "        kept = [w.grad.clone() for w in weights] if calls % 2 else []\n",
            {
                "SIGKILL": r"\*\*differs\*\* from step 6: model.* of rank 0",
                "SIGTERM": r"\*\*differs\*\* from step 8: model.* of rank 0",
            },
        ),
        # All ranks draw the same noise for one batch, but the figures are not those of one process.
        Fault(
            "noise in evaluation",
            STEP,
            "    def draw(module, inputs, logits):\n"
            "        return logits if module.training else logits + torch.randn_like(logits)\n"
            "    model.register_forward_hook(draw)\n" + STEP,
            {
                "figures": r"\*\*differs\*\*: val/\w+ is [\d.]+ on 2 processes, [\d.]+ on one",
                "replicas": "yes, and give one batch the same answer",
                "one process": "same to rounding",
            },
        ),
    ],
    [
        # As the scales of torchvision's Faster R-CNN are.
        Fault(
            "a scale that is guessed from the first batch",
            STEP,
            "    guessed = {}\n"
            "    def scale(module, inputs):\n"
            "        guessed.setdefault('scale', inputs[0].std().item())\n"
            "        return (inputs[0] / guessed['scale'],)\n"
            "    model.register_forward_pre_hook(scale)\n" + STEP,
            {
                "SIGKILL": r"\*\*differs\*\* from step 6: model.* of rank 0",
                "replicas": r"\*\*no\*\* from step 4: the answer to one batch",
            },
        ),
        Fault(
            "a scaler that is not in the state",
            BACKWARD,
            "        scaler.scale(loss).backward()\n"
            "        scaler.step(optimizer)\n"
            "        scaler.update()\n",
            {"outside": r"\*\*GradScaler scaler\*\*"},
        ),
    ],
]
# Dropout, which must not hide what is wrong.
MODEL = "    model = digits.build(args.model).to(world.device)\n"
MORE = """    model.append(torch.nn.Dropout(0.1))
    global kept, calls, scaler
    kept = []
    calls = 0
    scaler = torch.amp.GradScaler("cpu")
"""


@pytest.mark.parametrize(
    "faults", WRONG, ids=lambda faults: ", ".join(fault.name for fault in faults)
)
def test_a_wrong_script(faults, proved, tmp_path):
    copy = changed_copy(tmp_path, "mnist/ddp_launch.py", MODEL, MODEL + MORE)
    script = copy / "ddp_launch.py"
    text = script.read_text()
    for fault in faults:
        assert text.count(fault.line) == 1
        text = text.replace(fault.line, fault.replacement)
    script.write_text(text)
    # BatchNorm must not hide a wrong loss either.
    has_a_wrong_loss = any("weighs" in fault.name for fault in faults)
    flags = WITH_BATCH_NORM if has_a_wrong_loss else FLAGS
    status, results, said = proved(f"{TORCHRUN} {script} {flags}")
    assert status == 1
    for fault in faults:
        for key, result in fault.says.items():
            assert re.match(result, results[CHECKS[key]]), f"{fault.name}:\n{said}"
        key = next(iter(fault.says))
        assert f"{CHECKS[key]}: {prove.MEANINGS[key]}" in said


def test_a_script_that_ends_early(proved, tmp_path):
    """With status 0: the rows would compare what there is."""
    line = "            step(images, labels)\n"
    early = "            if run.position.steps == 8:\n                sys.exit()\n"
    copy = changed_copy(tmp_path, "mnist/ddp_launch.py", line, line + early)
    with pytest.raises(RunError, match="ended before step 12"):
        proved(f"{TORCHRUN} {copy}/ddp_launch.py {FLAGS}")


def test_a_real_process(tmp_path, monkeypatch):
    """It is watched because of its PYTHONPATH, without help from the fork server."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = [sys.executable, f"{ROOT}/mnist/single.py", *FLAGS.split()]
    proof = prove.Proof(command, steps=3, folder=tmp_path)
    recorded = proof.run("whole")
    assert list(prove.trace(recorded)) == [1, 2, 3]
    assert prove.weights(recorded / "end.pt")


def test_a_command_that_fails(proved, tmp_path):
    """It says the line that the script has printed before torchrun's summary. Nothing is left."""
    said = "ended with status 1: ddp_launch.py: unrecognized arguments: --epoch 3"
    with pytest.raises(RunError, match=said):
        proved(f"{TORCHRUN} {ROOT}/mnist/ddp_launch.py --epoch 3", agent=True)
    assert not os.listdir(tmp_path)


def test_no_command(tmp_path):
    assert "give the command" in refused(f"python {ROOT}/scripts/prove.py", tmp_path)
