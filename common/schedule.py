"""The batch and the learning rate: how they depend on the processes, and on the position."""

import math

import numpy as np

from common.errors import InputError
from common.position import Position


def per_process(batch_size: int, global_batch_size: int | None, parts: int = 1) -> int:
    """The samples of one process and pass: `batch_size`, or a share of `global_batch_size`.

    `parts` is the number of processes times the accumulated passes of a step.
    Raises InputError if they cannot share it equally.
    """
    if global_batch_size is None:
        return batch_size
    if global_batch_size % parts:
        raise InputError(
            f"--global-batch-size {global_batch_size}: take a multiple of {parts} "
            "(processes x --accumulate)"
        )
    return global_batch_size // parts


def lr_factor(rule: str, processes: int, global_batch_size: int | None = None) -> float:
    """The factor for the rate of one process, as the batch is `processes` times larger.

    `rule` is linear, sqrt or none (Goyal et al. 2017, arXiv:1706.02677). It is 1 if the rate is
    for `global_batch_size`.
    """
    if global_batch_size is not None:
        return 1
    return {"linear": processes, "sqrt": math.sqrt(processes), "none": 1}[rule]


class WarmupCosine:
    """Sets the rate of each parameter group of `optimizer`, as a function of the position of a run.

    The present rate of a group is its highest. The rates rise linearly in `warmup_epochs`, that of
    the first group from `start_lr`, and then fall along half a cosine to 0 at the end of the run.
    """

    def __init__(self, optimizer, warmup_epochs: float, start_lr: float):
        self.optimizer = optimizer
        self.peaks = [group["lr"] for group in optimizer.param_groups]
        self.warmup_epochs = warmup_epochs
        self.start = start_lr / self.peaks[0]

    def factor(self, position: Position) -> float:
        """The factor of the highest rates, from 0 to 1, for the step at `position`."""
        done = position.epochs_done
        if done < self.warmup_epochs:
            return self.start + (1 - self.start) * done / self.warmup_epochs
        share = position.share_done(after=self.warmup_epochs)
        return 0.5 * (1 + math.cos(math.pi * share))

    @property
    def peak(self) -> float:
        """The highest rate of the first group, for the log."""
        return self.peaks[0]

    @property
    def current(self) -> float:
        """The present rate of the first group, for the log."""
        return self.optimizer.param_groups[0]["lr"]

    def set(self, position: Position) -> None:
        """Set the rates for the step at `position`."""
        factor = self.factor(position)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            # In float32, as a CUDA graph has it: else its weights would differ.
            group["lr"] = float(np.float32(peak * factor))

    def warn_if_short(self, position: Position) -> list[str]:
        """A line for the log if the run at `position` ends before the rates fall."""
        sampler = position.sampler
        epochs = position.epochs_done + position.steps_left * sampler.global_batch / sampler.length
        if epochs > self.warmup_epochs:
            return []
        return [
            f"the rate only rises: --warmup-epochs {self.warmup_epochs:g} is not less than the "
            f"{epochs:.3g} epochs of the run"
        ]
