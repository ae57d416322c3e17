"""How far a run has come. Data order, rates and random numbers depend on seed and position only."""

import random

import numpy as np
import torch

from common.data import EpochSampler, seed_of
from common.errors import InputError, brief


class Position:
    """The epoch, the samples of that epoch already used by all ranks, and the steps so far.

    It also knows how long the run is: `max_steps` steps if given, else `epochs` epochs. An
    evaluation is due at the end of each epoch and of the run, and every `eval_every` steps.
    It does not depend on ranks: a run can resume on any number of them.
    """

    def __init__(
        self,
        sampler: EpochSampler,
        epochs: int,
        max_steps: int | None = None,
        eval_every: int | None = None,
    ):
        self.sampler = sampler
        self.epochs = epochs
        self.max_steps = max_steps
        self.eval_every = eval_every
        self.epoch = 0
        self.samples = 0
        self.steps = 0
        self.evaluated_at = 0  # the steps at the last evaluation

    @property
    def epochs_done(self) -> float:
        """The epochs done so far, with a fraction."""
        return self.epoch + self.samples / self.sampler.length

    def share_done(self, after: float = 0) -> float:
        """The share of the run that is done, from 0 to 1, not counting its first `after` epochs.

        It counts samples or, with max_steps, steps, so it reaches 1 even if the run resumes with
        another global batch.
        """
        if self.max_steps is None:
            return (self.epochs_done - after) / (self.epochs - after)
        if self.steps == 0:
            return 0
        # How many steps those epochs take, at the mean batch size so far.
        steps_before = after * self.steps / self.epochs_done
        return (self.steps - steps_before) / (self.max_steps - steps_before)

    @property
    def over(self) -> bool:
        """Whether the run is finished."""
        if self.max_steps is None:
            return self.epoch >= self.epochs
        if self.steps == self.max_steps:
            # A run may have been saved and stopped right before its last evaluation.
            return self.steps == self.evaluated_at
        return self.steps > self.max_steps

    @property
    def epoch_over(self) -> bool:
        """Whether less than a global batch is left of the epoch; the rest is dropped."""
        return self.samples + self.sampler.global_batch > self.sampler.length

    @property
    def _steps_left_in_epoch(self):
        return max(0, self.sampler.length - self.samples) // self.sampler.global_batch

    @property
    def steps_to_evaluation(self) -> int:
        """The steps up to the next evaluation.

        It is 0 where one is due: a run may have been saved and stopped right before it.
        """
        steps = self._steps_left_in_epoch
        if self.max_steps is not None:
            steps = min(steps, self.max_steps - self.steps)
        if self.eval_every is not None:
            since_due = self.steps % self.eval_every
            evaluation_due = since_due == 0 and self.steps != self.evaluated_at
            steps = 0 if evaluation_due else min(steps, self.eval_every - since_due)
        return steps

    @property
    def steps_left(self) -> int:
        """The steps to the end of the run, on the present number of processes."""
        if self.max_steps is not None:
            return self.max_steps - self.steps
        epochs_after_this = self.epochs - self.epoch - 1
        return self._steps_left_in_epoch + epochs_after_this * self.sampler.steps_per_epoch

    def multiple_of(self, interval: int | None) -> bool:
        """Whether the steps so far are a multiple of `interval`; None is never."""
        return interval is not None and self.steps % interval == 0

    def advance(self) -> None:
        """Record a step, in which all ranks together used a global batch."""
        self.samples += self.sampler.global_batch
        self.steps += 1

    def record_evaluation(self) -> None:
        """Record an evaluation. If the epoch is over, start the next one."""
        self.evaluated_at = self.steps
        if self.epoch_over:
            self.epoch += 1
            self.samples = 0

    def state_dict(self) -> dict[str, int]:
        return {
            "epoch": self.epoch,
            "samples": self.samples,
            "steps": self.steps,
            "evaluated_at": self.evaluated_at,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        for name in self.state_dict():
            value = state[name]
            # True is an int, too.
            if type(value) is not int or not 0 <= value < 2**63:
                raise InputError(f"its {name} is {brief(value)}")
            setattr(self, name, value)
        # This run's batch may be larger than the rest of the epoch: then start the next one.
        if self.epoch_over and self.steps == self.evaluated_at:
            self.record_evaluation()


def seed_step(seed: int, position: Position, device: torch.device, rank: int = 0) -> None:
    """Seed this rank's random numbers for its next step, such as dropout, by position and rank.

    Seeds torch, numpy and random on the CPU, and the current device of the type of `device`.
    """
    step_seed = seed_of(seed, position.epoch, position.samples, rank)
    random.seed(step_seed)
    np.random.seed(step_seed % 2**32)
    torch.default_generator.manual_seed(step_seed)  # 1 us; torch.manual_seed takes 200 us
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(step_seed)
