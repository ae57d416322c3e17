"""scripts/prove.py: a right script passes, and each fault in a wrong one is noticed by its row."""

import os
import re
import shlex
import signal
import sys
import threading
from dataclasses import dataclass

import psutil
import pytest
from forked import ForkedJob, refused
from launch import need_horovod
from recipes import ROOT, changed_copy

from common.errors import RunError
from scripts import commands, prove

# The default model has BatchNorm.
WITH_BATCH_NORM = "--synthetic 640 -b 8 --device cpu"
FLAGS = f"{WITH_BATCH_NORM} --model lenet"
TORCHRUN = "torchrun --nproc-per-node=2"


@pytest.fixture
def forked(tmp_path, monkeypatch):
    """Let prove.py start forked processes, with these options of ForkedJob."""
    options = {"agent": False}

    def start_and_wait(words, environment, output):
        ours = re.compile("PROVE|CHECK|TORCHDYNAMO")
        variables = {name: value for name, value in environment.items() if ours.match(name)}
        job = ForkedJob(shlex.join(words), tmp_path, **options, **variables)
        status = job.finish()
        output.write(job.output())
        output.flush()
        return status

    monkeypatch.setattr(prove, "start_and_wait", start_and_wait)
    # What failed runs have printed is kept there.
    monkeypatch.setattr(prove.tempfile, "tempdir", str(tmp_path))
    return options


@pytest.fixture
def proved(forked, monkeypatch, capsys):
    """A function that proves a command, and returns (its status, {check: result}, all it said)."""

    def of(command):
        monkeypatch.setattr("sys.argv", ["prove.py", *shlex.split(command)])
        status = prove.main()
        said = capsys.readouterr().out
        return status, table(said), said

    return of


@pytest.fixture
def looked(forked, tmp_path, capsys):
    """A function that returns the rows that one run of a command shows, and their explanations."""

    def of(command):
        proof = prove.Proof(shlex.split(command), steps=12, folder=tmp_path)
        prove.look(proof, proof.run("whole"))
        return table(capsys.readouterr().out), proof.explanations()

    return of


def table(said):
    return dict(re.findall(r"^\| (.+?) \| (.+) \|$", said, re.M))


MODEL = "    model = digits.build(args.model).to(world.device)\n"
# What each rank draws by itself, with and without a module.
WITH_DROPOUT = (
    MODEL
    + """    class Drop(torch.nn.Module):
        def forward(self, logits):
            q = logits.unsqueeze(1)
            p = 0.1 if self.training else 0.0
            q = F.scaled_dot_product_attention(q, q, q, dropout_p=p)
            return F.dropout(q.squeeze(1), 0.1, self.training)

    model.append(torch.nn.Dropout(0.1)).append(Drop())
"""
)


@pytest.mark.parametrize(
    "command",
    [
        f"{TORCHRUN} {{copy}}/ddp_launch.py {WITH_BATCH_NORM}",
        f"horovodrun --gloo -np 2 python {{root}}/mnist/hvd.py {FLAGS}",
        f"{TORCHRUN} {{root}}/mnist/fsdp.py {FLAGS}",
        f"python {{root}}/mnist/ddp_spawn.py -g 2 {FLAGS}",
        f"{TORCHRUN} {{root}}/examples/regression.py --synthetic 1000 -b 16 --device cpu",
    ],
    ids=["DDP with dropout", "Horovod", "FSDP", "mp.spawn", "example"],
)
def test_a_right_script(command, proved, tmp_path):
    if command.startswith("horovodrun"):
        need_horovod("gloo")
    copy = changed_copy(tmp_path, "mnist/ddp_launch.py", MODEL, WITH_DROPOUT)
    status, results, said = proved(command.format(root=ROOT, copy=copy))
    assert status == 0, said
    assert "look: " not in said
    assert results["two runs"] == "same bits"
    assert results["SIGKILL after step 7, resumed"] == "same bits"
    assert results["SIGTERM after step 7, resumed"] == "same bits"
    assert results["changes, and is in no checkpoint"].startswith("no model")
    is_asked = "BatchNorm" not in results and "fsdp" not in command
    answered = ", and compute the same output for one batch" if is_asked else ""
    assert results["the 2 ranks hold the same"] == f"yes{answered}"
    draws = "each draws its own in a step" if "{copy}" in command else "none draws in a step"
    assert results["random numbers of the ranks"] == draws
    assert results["batches"] == "different in each epoch and on each rank"
    assert re.fullmatch(r"all \d+", results["each weight changes"])
    assert results["an evaluation"].startswith("in evaluation mode")
    assert results["training after an evaluation"] == "in the mode of the first step"
    assert "times those of one process, in the only group" in results["rates on 2 processes"]
    assert results["one process in place of 2"].startswith("same up to rounding")
    figures = r"same up to rounding \(\S+\): train/loss, .*val/loss, val/"
    assert re.match(figures, results["evaluated on one process"])


# The first column of each row, by its key in prove.MEANINGS.
CHECKS = {
    "two runs": "two runs",
    "SIGKILL": "SIGKILL after step 7, resumed",
    "SIGTERM": "SIGTERM after step 7, resumed",
    "outside": "changes, and is in no checkpoint",
    "replicas": "the 2 ranks hold the same",
    "batches": "batches",
    "random numbers": "random numbers of the ranks",
    "weights": "each weight changes",
    "evaluation": "an evaluation",
    "training": "training after an evaluation",
    "rates": "rates on 2 processes",
    "one process": "one process in place of 2",
    "figures": "evaluated on one process",
    "variables": "variables after a resume",
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


def write(faults, tmp_path):
    """Write a copy of mnist/ddp_launch.py that has them, and dropout, which must hide none."""
    copy = changed_copy(tmp_path, "mnist/ddp_launch.py", MODEL, WITH_DROPOUT)
    script = copy / "ddp_launch.py"
    text = script.read_text()
    for fault in faults:
        assert text.count(fault.line) == 1
        text = text.replace(fault.line, fault.replacement)
    script.write_text(text)
    return script


STEP = "    def step(images, labels):\n"
LOOP = "    while not run.over:\n"
RUN = "    run = Run(args, world, state, sums, rates, train)\n"
TRAIN = "        model.train()\n"
EVAL = "    model.eval()\n"
RATES = "    rates = schedule.WarmupCosine(args.warmup_epochs, optimizer)\n"
RECORD = '            run.record(result, best=result["accuracy"])\n'
BACKWARD = "        loss.backward()\n        optimizer.step()\n"
LOSS = "        loss = F.cross_entropy(logits, labels)\n" + BACKWARD
ADD = "        sums.add(loss=loss * len(labels), correct=correct, images=len(labels))\n"
# One run shows them.
SEEN_AT_ONCE = [
    Fault(
        "a state of each rank",
        LOOP,
        "    run.best.update(world.rank)\n" + LOOP,
        {"replicas": r"\*\*no\*\*, from step 1: best.\w+ of rank 1 differs from rank 0"},
    ),
    Fault(
        "the same dropout on all ranks",
        "        optimizer.zero_grad()\n",
        "        optimizer.zero_grad()\n        torch.manual_seed(0)\n",
        {"random numbers": r"\*\*the same\*\* from step 1, from torch"},
    ),
    Fault(
        "a sampler that does not know the epoch",
        RUN,
        "    set_epoch = train.sampler.set_epoch\n"
        "    train.sampler.set_epoch = lambda epoch, *place: set_epoch(0, *place)\n" + RUN,
        {"batches": r"\*\*the second epoch has the batches of the first"},
    ),
    Fault(
        "a sampler without a rank",
        "batch_size, world.rank, world.size, seed=args.seed)\n",
        "batch_size, 0, world.size, seed=args.seed)\n",
        {"batches": r"\*\*rank 1 has the batches of rank 0\*\*"},
    ),
    Fault(
        "a model that never trains",
        BACKWARD,
        "        loss.backward()\n        optimizer.zero_grad()\n        optimizer.step()\n",
        {"weights": r"\*\*none\*\* of 10"},
    ),
    Fault(
        "a layer in no optimizer",
        RATES,
        "    optimizer.param_groups[0]['params'].pop()\n" + RATES,
        {"weights": r"\*\*not model\.\d+.bias\*\*: with a gradient, but in no optimizer"},
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
        "an evaluation in training mode",
        EVAL,
        "",
        {"evaluation": r"\*\*in training mode\*\*: dropout draws"},
    ),
    Fault(
        "an evaluation that counts itself",
        STEP,
        "    model[0].register_buffer('seen', torch.zeros(1))\n"
        "    model.register_forward_hook(lambda *_: model[0].seen.add_(1) and None)\n" + STEP,
        {"evaluation": r"\*\*it changes\*\* model\.0\.seen"},
    ),
    Fault(
        "an evaluation of the first weights",
        EVAL,
        "    import copy\n    model = vars(run).setdefault('first', copy.deepcopy(model)).eval()\n",
        {"evaluation": r"\*\*with weights that nothing trains\*\*: Conv2d.bias, "},
    ),
    Fault(
        "an evaluation mode that stays",
        TRAIN,
        "",
        {"training": r"\*\*in evaluation mode\*\* from step 5: model, "},
    ),
]


@pytest.mark.parametrize("fault", SEEN_AT_ONCE, ids=lambda fault: fault.name)
def test_what_one_run_shows(fault, looked, tmp_path):
    script = write([fault], tmp_path)
    results, explanations = looked(f"{TORCHRUN} {script} {FLAGS}")
    [(key, result)] = fault.says.items()
    assert re.match(result, results[CHECKS[key]]), results
    assert f"{CHECKS[key]}: {prove.MEANINGS[key]}" in explanations


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
            "a run that does not save within an epoch",
            RUN,
            "    args.checkpoint_every = None\n" + RUN,
            {"SIGKILL": r"\*\*it resumes at step 5, not at 6\*\*"},
        ),
        Fault(
            "a group whose rate is not scaled",
            RATES,
            "    bias = optimizer.param_groups[0]['params'].pop()\n"
            "    optimizer.add_param_group({'params': [bias], 'lr': args.lr})\n" + RATES,
            {"rates": r"\*\*differ\*\*: optimizer group 1 has 1 times that of one .* group 0 2"},
        ),
        # As the scales of torchvision's Faster R-CNN are.
        Fault(
            "a scale that is guessed from the first batch",
            STEP,
            "    guessed = {}\n"
            "    def scale(module, inputs):\n"
            "        guessed.setdefault('scale', inputs[0].std().item())\n"
            "        return (inputs[0] / guessed['scale'],)\n"
            "    model.register_forward_pre_hook(scale)\n" + STEP,
            {"replicas": r"\*\*no\*\*, from step 4: the output for one batch"},
        ),
    ],
    [
        Fault(
            "a run that does not hear the signal",
            LOOP,
            "    run.stop.carried_by = lambda all_reduce: all_reduce\n" + LOOP,
            {"SIGTERM": r"\*\*it ran to its end\*\*"},
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
            "an average of the averages of the ranks",
            "    return sums.result(dist.all_reduce)\n",
            "    own = sums.result()\n"
            "    values = torch.tensor(list(own.values()))\n"
            "    dist.all_reduce(values)\n"
            "    values /= dist.get_world_size()\n"
            "    return dict(zip(own, values.tolist()))\n",
            {"figures": r"\*\*differs\*\*: val/\w+ is [\d.]+ on 2 processes, [\d.]+ on one"},
        ),
        Fault(
            "patience that is not in the state",
            RECORD,
            RECORD + "            counted = globals().setdefault('counted', [0])\n"
            "            counted[0] += 1\n"
            "            if counted[0] == 2:\n"
            "                rates.peaks = [rate / 10 for rate in rates.peaks]\n",
            {
                "SIGKILL": r"\*\*differs\*\* from step 9: ",
                "variables": r"look: these numbers differ: counted.0",
            },
        ),
    ],
    [
        Fault(
            "weights that are evaluated and in no checkpoint",
            EVAL,
            EVAL + "    average = vars(run).setdefault('average', {})\n"
            "    for name, value in model.state_dict().items():\n"
            "        average[name] = 0.5 * (average.get(name, value) + value)\n"
            "    import copy\n"
            "    model = copy.deepcopy(model)\n"
            "    model.load_state_dict(average)\n",
            {
                "SIGKILL": r"\*\*differs\*\* from step 8: val/loss of its evaluation, ",
                "evaluation": r"look: with weights that are in no checkpoint: Conv2d.bias, ",
            },
        ),
        Fault(
            "a mean of the means of batches",
            ADD,
            "        sums.add(loss=loss, correct=correct / len(labels), images=1)\n",
            {"figures": r"\*\*differs\*\*: val/\w+ is [\d.]+ on 2 processes, [\d.]+ on one"},
        ),
    ],
]


@pytest.mark.parametrize(
    "faults", WRONG, ids=lambda faults: ", ".join(fault.name for fault in faults)
)
def test_a_wrong_script(faults, proved, tmp_path):
    script = write(faults, tmp_path)
    # BatchNorm must not hide a wrong loss either.
    has_a_wrong_loss = any("weighs" in fault.name for fault in faults)
    flags = WITH_BATCH_NORM if has_a_wrong_loss else FLAGS
    status, results, said = proved(f"{TORCHRUN} {script} {flags}")
    assert status == 1
    for fault in faults:
        for key, result in fault.says.items():
            assert re.match(result, results[CHECKS[key]]), f"{fault.name}:\n{said}"
    causes = {next(iter(fault.says)) for fault in faults}
    following = {each for cause in causes for each in prove.FOLLOWING.get(cause, ())}
    for key in causes:
        is_explained = f"{CHECKS[key]}: {prove.MEANINGS[key]}" in said
        assert is_explained == (key not in following), said


def test_three_ranks(forked, tmp_path, capsys):
    """They add up in another order after a start, which is no fault; a lost momentum is."""
    lost = Fault(
        "a momentum that is not saved",
        RUN,
        "    class Kept:\n"
        "        def __init__(self):\n"
        "            self.optimizer = optimizer\n"
        "        def state_dict(self):\n"
        "            return {}\n"
        "        def load_state_dict(self, state):\n"
        "            pass\n"
        "    if args.seed:\n"
        "        state['optimizer'] = Kept()\n" + RUN,
        {},
    )
    script = write([lost], tmp_path)
    for seed, result in (
        (0, r"same (bits|up to rounding)"),
        (1, r"\*\*differs\*\* from step 6: [\de.-]+ of its update"),
    ):
        command = f"torchrun --nproc-per-node=3 {script} {FLAGS} --seed {seed}"
        folder = tmp_path / str(seed)
        folder.mkdir()
        proof = prove.Proof(shlex.split(command), steps=12, folder=folder)
        whole = proof.run("whole", PROVE_KEEP="6")
        proof.interrupt("SIGKILL", "killed", whole, "PROVE_KILL", 6)
        said = capsys.readouterr().out
        assert re.match(result, table(said)[CHECKS["SIGKILL"]]), said


def test_the_rank_that_failed_first(tmp_path):
    """What the others say of it comes before and after."""
    printed = tmp_path / "output"
    printed.write_text(
        "train.py: rank 1: another rank has ended: its own output says why\n"
        "train.py: the loss is not finite\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    )
    assert prove.cause_in(printed) == "train.py: the loss is not finite"


def test_a_signal_ends_what_runs(tmp_path):
    """And not only prove.py."""
    handler = signal.getsignal(signal.SIGTERM)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    try:
        with (
            open(tmp_path / "output", "w") as output,
            pytest.raises(SystemExit),
            commands.plain_exits(),
        ):
            prove.start_and_wait(["sleep", "1000"], dict(os.environ), output)
    finally:
        signal.signal(signal.SIGTERM, handler)
    children = psutil.Process().children(recursive=True)
    assert "sleep" not in [child.name() for child in children]


def test_rows_of_check(capsys):
    proof = prove.Proof([], steps=12, folder=None)
    proof.add("look", "nothing to resume from")
    assert not proof.wrong_in_check
    proof.add("wrong", "two ranks write one file")
    assert proof.wrong_in_check
    assert "| check.py | **wrong**: two ranks write one file |" in capsys.readouterr().out


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


def test_a_command_that_fails(proved, forked, tmp_path):
    """It says the line that the script has printed before torchrun's summary, and keeps all."""
    forked["agent"] = True
    said = "ended with status 1: ddp_launch.py: unrecognized arguments: --epoch 3"
    with pytest.raises(RunError, match=said) as raised:
        proved(f"{TORCHRUN} {ROOT}/mnist/ddp_launch.py --epoch 3")
    [kept] = os.listdir(tmp_path)
    assert f"(see {tmp_path / kept})" in str(raised.value)
    assert "unrecognized arguments" in (tmp_path / kept).read_text()


def test_no_command(tmp_path):
    assert "give the command" in refused(f"python {ROOT}/scripts/prove.py", tmp_path)
