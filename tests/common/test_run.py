"""What a run has beside its training: how its ranks save, and when they ask each other."""

import pytest
from forked import compute
from launch import checkpoint, place, strategies
from recipes import ROOT, STEP, changed_copy

SLOW_SAVE = """\
    from common import checkpoint

    save = checkpoint.save

    def slow_save(*arguments):
        checkpoint.save = save
        __import__("time").sleep(15)
        save(*arguments)

    checkpoint.save = slow_save
"""


def test_a_save_may_take_longer_than_a_step(tmp_path):
    """Rank 1 waits for rank 0, which saves, and its watchdog does not end it.

    ace 851, torchtune 2093, accelerate 3512: NCCL's timeout ended the run.
    """
    line = "    step = make_step(model, optimizer, sums)\n"
    copy = changed_copy(tmp_path, "mnist/ddp_launch.py", line, SLOW_SAVE + line)
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


def test_the_best_is_of_another_folder(tmp_path):
    """A run that goes on from a file may never have a best.pt of its own."""
    mnist = f"python {ROOT}/mnist/single.py --synthetic 640 --model lenet --device cpu"
    compute(f"{mnist} --epochs 1 --log-dir first", tmp_path)
    best = checkpoint(tmp_path / "first")["best"]["value"]
    said = compute(f"{mnist} --epochs 2 --resume first/last.pt --log-dir second", tmp_path)
    assert f"best.pt comes with a result better than {best:.4g}, the best so far\n" in said
    said = compute(f"{mnist} --epochs 2 --resume auto --log-dir first", tmp_path)
    assert "best.pt comes" not in said
