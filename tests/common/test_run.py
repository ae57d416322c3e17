"""What a run has beside its training: here, what the ranks do while one of them saves."""

from forked import compute
from launch import checkpoint, place, strategies
from recipes import changed_copy

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
    """Rank 1 waits for rank 0, which saves, and its watchdog does not end it."""
    line = "    step = make_step(model, optimizer, sums)\n"
    copy = changed_copy(tmp_path, "mnist/ddp_launch.py", line, SLOW_SAVE + line)
    flags = "--synthetic 320 --model lenet --epochs 1 --device cpu --log-dir log --timeout 10"
    said = compute(f"{strategies(2, copy)['ddp_launch']} {flags}", tmp_path)
    assert "epoch 1/1" in said
    assert "Timeout" not in said
    assert place(checkpoint(tmp_path / "log")) == (1, 0)
