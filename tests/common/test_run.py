"""What a run has beside its training: how its ranks save, and when they ask each other."""

import re

import pytest
import torch
from forked import compute
from launch import checkpoint, place, strategies
from recipes import ROOT, STEP, changed_copy
from torch.utils.data import TensorDataset

from common import flags
from common.data import DataObject, EpochSampler, TensorLoader
from common.metrics import Sums
from common.ranks import World
from common.run import Run
from common.schedule import WarmupCosine


def new_run(words):
    """A run of 60 steps of a model that this process trains alone."""
    parser = flags.Parser("A script.", task="test")
    flags.add_training_flags(parser, epochs=1, batch_size=1, lr=0.1)
    args = parser.parse_args(["--dry-run", *words.split()])
    world = World(torch.device("cpu"))
    dataset = TensorDataset(torch.arange(60.0).unsqueeze(1))
    sampler = EpochSampler(60, args.batch_size)
    train = DataObject(dataset, sampler, TensorLoader(dataset, sampler, 1, world.device))
    model = torch.nn.Linear(1, 1)
    rates = WarmupCosine(0, torch.optim.SGD(model.parameters(), args.lr))
    sums = Sums(world.device, lambda loss: {"loss": loss})
    return Run(args, world, {"model": model}, sums, rates, train), train


SLOW_SAVE = """\
            if run.position.steps == 0:
                import time
                from common import checkpoint

                save = checkpoint.save

                def slow_save(*arguments):
                    checkpoint.save = save
                    time.sleep(15)
                    save(*arguments)

                checkpoint.save = slow_save
"""


def test_a_save_may_take_longer_than_a_step(tmp_path):
    """Rank 1 waits for rank 0, which saves, and its watchdog does not end it.

    ace 851, torchtune 2093, accelerate 3512: NCCL's timeout ended the run.
    """
    copy = changed_copy(tmp_path, "mnist/ddp_launch.py", STEP, SLOW_SAVE + STEP)
    flags = "--synthetic 320 --model lenet --epochs 1 --device cpu --log-dir log --timeout 10"
    said = compute(f"{strategies(2, copy)['ddp_launch']} {flags}", tmp_path)
    assert "epoch 1/1" in said
    assert "Timeout" not in said
    assert place(checkpoint(tmp_path / "log")) == (1, 0)


@pytest.mark.parametrize("recipe", ["single", "ddp_launch"])
def test_slow_steps_do_not_delay_a_stop(recipe, tmp_path):
    """Steps of 1.5 s, of which --log-interval would let 1000 pass."""
    slow = (
        "            __import__('time').sleep(1.5)\n"
        "            if run.position.steps == 3:\n"
        "                __import__('signal').raise_signal(15)\n"
    )
    copy = changed_copy(tmp_path, f"mnist/{recipe}.py", STEP, slow + STEP)
    command = {"single": f"python {copy}/single.py", **strategies(2, copy)}[recipe]
    flags = "--synthetic 2560 -b 32 --model lenet --device cpu --log-interval 1000 --log-dir log"
    assert "stopped after a signal" in compute(f"{command} {flags}", tmp_path)
    assert checkpoint(tmp_path / "log")["position"]["steps"] <= 8


@pytest.mark.parametrize(
    ("device", "log_interval", "seconds_per_step", "due"),
    [
        ("cpu", None, 0.001, [10, 20, 30, 40, 50, 60]),
        # 20 ms, and then the next tenth step.
        ("cuda", None, 0.001, [20, 40, 60]),
        ("cuda", 15, 0.001, [15, 30, 45, 60]),
        ("cuda", None, 0.003, [10, 20, 30, 40, 50, 60]),
        ("cuda", None, 2.0, [ten + step for ten in range(0, 60, 10) for step in (3, 6, 9, 10)]),
    ],
)
def test_when_all_ranks_look(device, log_interval, seconds_per_step, due):
    """Their clocks differ: the mean of what each says a step takes decides."""
    words = f"--log-interval {log_interval}" if log_interval else ""
    run, _ = new_run(words)
    run.world = World(torch.device(device), all_reduce=lambda values: values)
    run.looked_at = run.looked_when = 0
    found = []
    for _ in range(60):
        run.position.advance()
        # As the ranks have agreed on it.
        run.stop.seconds_per_step = seconds_per_step
        if run._look_due():
            found.append(run.position.steps)
    assert found == due


def test_each_epoch_has_its_own_order(monkeypatch):
    run, train = new_run("--epochs 2")
    # Two epochs, of which nothing is written. The signals of this process stay as they are.
    run.args.dry_run = False
    monkeypatch.setattr(run.stop, "listen", lambda: None)
    orders = []
    while not run.over:
        orders.append([batch.item() for (batch,) in run.steps(train)])
        run.record({})
    first, second = orders
    assert sorted(first) == sorted(second) == list(range(60))
    assert first != second


def test_a_break_in_the_loop_of_steps_is_refused():
    """It would leave a step uncounted."""
    run, train = new_run("")
    for _ in run.steps(train):
        break
    run.watchdog.cancel()
    for go_on in (lambda: run.record({}), lambda: next(run.steps(train))):
        with pytest.raises(RuntimeError, match="a `break`"):
            go_on()


def test_steps_without_a_record_are_refused():
    """The run would be at the same evaluation for ever."""
    run, train = new_run("")
    list(run.steps(train))
    run.watchdog.cancel()
    with pytest.raises(RuntimeError, match="has to follow"):
        next(run.steps(train))


@pytest.mark.parametrize("others", [{"global_batch": "1; rm -rf ~"}, {"peak_lr": [0.1]}, {}])
def test_only_numbers_of_a_checkpoint_are_proposed_as_flags(others):
    run, _ = new_run("")
    assert "-G 2 --lr 0.5" in run._other_steps({"global_batch": 2, "peak_lr": 0.5})[0]
    saved = {"global_batch": 2, "peak_lr": 0.5} | others if others else {}
    assert run._other_steps(saved) == []


def test_a_resume_says_that_the_batch_and_the_rate_are_others(tmp_path):
    mnist = f"python {ROOT}/mnist/single.py --synthetic 640 --model lenet --device cpu"
    compute(f"{mnist} --epochs 1 --log-dir log", tmp_path)
    resume = f"{mnist} --epochs 2 --resume log/last.pt -b 32 --lr 0.01"
    said = compute(f"{resume} --log-dir other", tmp_path)
    says = "with global batch 64 and peak rate 0.02, and this run has 32 and 0.01: (.*) keeps them"
    (flags,) = re.findall(says, said)
    said = compute(f"{resume} {flags} --log-dir same", tmp_path)
    assert "resumed from log/last.pt" in said
    assert "keeps them" not in said
