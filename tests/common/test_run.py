"""What a run has beside its training: how its ranks save, and when they ask each other."""

from types import SimpleNamespace

import pytest
import torch
from forked import compute
from launch import checkpoint, place, strategies
from recipes import ROOT, STEP, changed_copy

from common.data import EpochSampler
from common.position import Position
from common.run import Run

SLOW_SAVE = """\
        if position.steps == 0:
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
        "        __import__('time').sleep(1.5)\n"
        "        if position.steps == 3:\n"
        "            __import__('signal').raise_signal(15)\n"
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
def test_when_all_ranks_check(device, log_interval, seconds_per_step, due):
    position = Position(EpochSampler(60, 1), 1)
    stop = SimpleNamespace(seconds_per_step=seconds_per_step)
    run = SimpleNamespace(
        position=position,
        device=torch.device(device),
        stop=stop,
        log_interval=log_interval,
        checkpoint_every=None,
        all_reduce=lambda values: values,
        checked_at=0,
        checked_when=0,
    )
    found = []
    for _ in range(60):
        position.advance()
        if Run.check_due(run):
            # As the ranks agree on it.
            stop.seconds_per_step = seconds_per_step
            found.append(position.steps)
    assert found == due


def test_the_best_is_of_another_folder(tmp_path):
    """A run that goes on from a file may never have a best.pt of its own."""
    mnist = f"python {ROOT}/mnist/single.py --synthetic 640 --model lenet --device cpu"
    compute(f"{mnist} --epochs 1 --log-dir first", tmp_path)
    best = checkpoint(tmp_path / "first")["best"]["value"]
    said = compute(f"{mnist} --epochs 2 --resume first/last.pt --log-dir second", tmp_path)
    assert f"best.pt comes with a result better than {best:.4g}, the best so far\n" in said
    said = compute(f"{mnist} --epochs 2 --resume auto --log-dir first", tmp_path)
    assert "best.pt comes" not in said
