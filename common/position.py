"""Where a run is. All else that changes in it is a function of the seed and this position."""

import torch

from common.data import EpochSampler, seed_of


class Position:
    """(epoch, samples of that epoch already used, over all ranks), and the steps taken so far.

    A checkpoint says nothing of ranks: a run goes on from its position on any number of them.
    """

    def __init__(self):
        self.epoch = 0
        self.samples = 0
        self.steps = 0
        self.evaluated_at = 0  # the steps at the last evaluation

    def advance(self, samples: int) -> None:
        """Record a step in which all ranks together used `samples` samples."""
        self.samples += samples
        self.steps += 1

    def finished(self, epochs: int, max_steps: int | None) -> bool:
        """Whether the run ends here: after `max_steps` steps if they are given, else `epochs`."""
        if max_steps is not None:
            return self.steps >= max_steps
        return self.epoch >= epochs

    def evaluation_due(self, eval_every: int | None, max_steps: int | None) -> bool:
        """Whether to evaluate here, within an epoch: every so many steps, and after the last."""
        if self.steps == self.evaluated_at:
            return False
        return self.multiple_of(eval_every) or self.steps == max_steps

    def multiple_of(self, interval: int | None) -> bool:
        """Whether the steps so far are a multiple of `interval`; None is never."""
        return interval is not None and self.steps % interval == 0

    def end_interval(self, epoch_over: bool) -> None:
        """Record an evaluation, which ends the interval since the last one.

        If the epoch is over, go on to the next.
        """
        self.evaluated_at = self.steps
        if epoch_over:
            self.epoch += 1
            self.samples = 0

    def epochs_done(self, length: int) -> float:
        """The epochs done so far, if an epoch has `length` samples."""
        return self.epoch + self.samples / length

    def steps_left(self, epochs: int, max_steps: int | None, sampler: EpochSampler) -> int:
        """The steps to the end of the run, on the present number of processes."""
        if max_steps is not None:
            return max_steps - self.steps
        all_steps = (epochs - self.epoch) * sampler.steps_per_epoch
        return all_steps - self.samples // sampler.global_batch

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update({name: int(state[name]) for name in vars(self)})


def seed_step(seed: int, position: Position, device: torch.device, rank: int = 0) -> None:
    """Seed what this rank draws in its next step, such as dropout, by seed, position and rank."""
    step_seed = seed_of(seed, position.epoch, position.samples, rank)
    torch.default_generator.manual_seed(step_seed)  # 1 us; torch.manual_seed takes 200 us
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(step_seed)
