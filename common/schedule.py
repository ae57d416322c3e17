"""The batch and the learning rate: how they depend on the processes, and on the position."""

import math

import numpy as np

from common.errors import InputError
from common.position import Position


def batch_size(args, world_size: int = 1) -> int:
    """The samples of a batch: --batch-size, or a process's share of --global-batch-size.

    A step may --accumulate several batches. Raises InputError if they cannot share it equally.
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
    """The highest rate: --lr is that of one process, and `processes` have a larger batch.

    --scale-lr says how it grows (Goyal et al. 2017, arXiv:1706.02677). With --global-batch-size,
    --lr is the rate for that batch.
    """
    if args.global_batch_size is not None:
        return args.lr
    factors = {"linear": processes, "sqrt": math.sqrt(processes), "none": 1}
    return args.lr * factors[args.scale_lr]


class WarmupCosine:
    """Sets the rates of each parameter group of `optimizers`, a function of the position of a run.

    The present rate of a group is its highest. In the first `warmup_epochs` the rates rise linearly
    from nearly 0, and then they fall along half a cosine to 0 at the end of the run.
    """

    def __init__(self, warmup_epochs: float, *optimizers):
        self.warmup_epochs = warmup_epochs
        self.optimizers = optimizers
        self.peaks = [group["lr"] for group in self.groups]

    @property
    def groups(self) -> list[dict]:
        """The parameter groups; a checkpoint that is loaded replaces those of its optimizer."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def factor(self, position: Position) -> float:
        """The factor of the highest rates, from 0 to 1, for the step at `position`."""
        if position.epochs_done < self.warmup_epochs:
            # At the end of the step: at its beginning, the rate of the first one would be 0.
            sampler = position.sampler
            done = position.epochs_done + sampler.global_batch / sampler.length
            return min(1, done / self.warmup_epochs)
        share = position.share_done(after=self.warmup_epochs)
        return 0.5 * (1 + math.cos(math.pi * share))

    @property
    def peak(self) -> float:
        """The highest rate of the first group, for the log."""
        return self.peaks[0]

    @property
    def current(self) -> float:
        """The present rate of the first group, for the log."""
        return self.groups[0]["lr"]

    def set(self, position: Position) -> None:
        """Set the rates for the step at `position`."""
        factor = self.factor(position)
        for group, peak in zip(self.groups, self.peaks, strict=True):
            # In float32, as a CUDA graph has it: else its weights would differ.
            group["lr"] = float(np.float32(peak * factor))
