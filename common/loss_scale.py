"""The loss scale of fp16: how many steps it skips, and whether it skips them all."""

import sys

import torch

from common.errors import RunError

# From 65536, where torch and Apex begin, it takes 30 skipped steps. fairseq ends a run there, too.
LOWEST = 1e-4


class LossScales:
    """The scales in the `state` of a run: of each torch.amp.GradScaler, and those of Apex's amp.

    A step whose gradients are not finite is skipped, and lowers its scale. The steps are counted on
    the device: nothing waits before figures().
    """

    def __init__(self, state: dict, device: torch.device):
        self.state = state
        self.one = torch.ones((), device=device)
        self.skipped = torch.zeros((), device=device)
        self.scales = []

    def begin(self) -> None:
        """Note the scales before a step."""
        self.scales = [scale for part in self.state.values() for scale in self._of(part)]

    def count(self) -> None:
        """Count the step, if it was skipped, and note the scales before the next one."""
        before = self.scales
        self.begin()
        for scale, earlier in zip(self.scales, before, strict=True):
            self.skipped += scale < earlier

    def _of(self, part):
        if isinstance(part, torch.amp.GradScaler) and part.is_enabled():
            return [part.scale(self.one)]
        # The module itself has the state_dict.
        if part is sys.modules.get("apex.amp"):
            return [torch.tensor(kept["loss_scale"]) for kept in part.state_dict().values()]
        return []

    def figures(self) -> dict[str, int]:
        """The steps skipped so far, if there is a scale; raises RunError if it is near 0."""
        if not self.scales:
            return {}
        skipped, *scales = torch.stack([self.skipped, *map(self.one.mul, self.scales)]).tolist()
        if min(scales) < LOWEST:
            raise nothing_trained(f"the loss scale has fallen to {min(scales):g}")
        return {"skipped": int(skipped)}

    def require_a_step(self, steps: int) -> None:
        """Raise RunError if each of the `steps` of a whole run was skipped."""
        if self.scales and self.figures()["skipped"] == steps * len(self.scales):
            raise nothing_trained(f"all {steps} steps of the run were skipped")


def nothing_trained(what: str) -> RunError:
    return RunError(
        f"the gradients are not finite in fp16, and such steps are skipped: {what}; use bf16, "
        "lower --lr, or find what overflows, such as the square root of 0"
    )
