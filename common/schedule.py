"""Batch size and learning rate, from the number of processes and the position of the run."""

import math

import numpy as np

from common.errors import InputError
from common.position import Position


def batch_size(args, world_size: int = 1) -> int:
    """The samples per batch: --batch-size, or a process's share of --global-batch-size.

    With --accumulate a step has several batches. Raises InputError if it does not divide evenly.
    """
    if args.global_batch_size is None:
        return args.batch_size
    batches = world_size * args.accumulate
    if args.global_batch_size % batches:
        raise InputError(
            f"--global-batch-size {args.global_batch_size}: take a multiple of {batches} "
            "(processes x --accumulate)"
        )
    return args.global_batch_size // batches


def peak_lr(args, processes: int = 1) -> float:
    """The peak learning rate: --lr is for one process, and `processes` have a larger batch.

    --scale-lr says how it grows (Goyal et al. 2017, arXiv:1706.02677). With --global-batch-size,
    --lr is the rate for that batch.
    """
    if args.global_batch_size is not None:
        return args.lr
    factors = {"linear": processes, "sqrt": math.sqrt(processes), "none": 1}
    return args.lr * factors[args.scale_lr]


class WarmupCosine:
    """Sets the rate of each parameter group of `optimizers` from the position of a run.

    The rate that a group has now is its peak. In the first `warmup_epochs` the rates rise linearly
    from nearly 0, and then they fall along half a cosine to 0 at the end of the run.
    """

    def __init__(self, warmup_epochs: float, *optimizers):
        self.warmup_epochs = warmup_epochs
        self.optimizers = optimizers
        self.peaks = [group["lr"] for group in self.groups]

    @property
    def groups(self) -> list[dict]:
        """The parameter groups, looked up each time: loading a checkpoint replaces them."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def factor(self, position: Position) -> float:
        """What to multiply the peak rates by, from 0 to 1, for the step at `position`."""
        if position.epochs_done < self.warmup_epochs:
            # As of the end of the step: else the rate of the first step would be 0.
            sampler = position.sampler
            done = position.epochs_done + sampler.global_batch / sampler.length
            return min(1, done / self.warmup_epochs)
        share = position.share_done(after=self.warmup_epochs)
        return 0.5 * (1 + math.cos(math.pi * share))

    @property
    def peak(self) -> float:
        """The peak rate of the first group, for the log."""
        return self.peaks[0]

    @property
    def current(self) -> float:
        """The current rate of the first group, for the log."""
        return self.groups[0]["lr"]

    def set(self, position: Position) -> None:
        """Set the rates for the step at `position`."""
        factor = self.factor(position)
        for group, peak in zip(self.groups, self.peaks, strict=True):
            # Rounded to float32, as in a CUDA graph, so that both give the same weights.
            group["lr"] = float(np.float32(peak * factor))
