"""fp16 loss scaling: count the skipped steps, and fail if all of them are skipped."""

import sys

import torch

from common.errors import RunError

# 30 skipped steps below 65536, where torch and Apex start. fairseq stops a run there, too.
LOWEST = 1e-4


class LossScales:
    """The loss scales in the `state` of a run: of each torch.amp.GradScaler, and of Apex's amp.

    A scaler skips a step whose gradients are not finite, and lowers its scale. Skipped steps are
    counted on the device: only figures() waits for it.
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
        """Count the step if it was skipped, and note the scales for the next one."""
        before = self.scales
        self.begin()
        for scale, earlier in zip(self.scales, before, strict=True):
            self.skipped += scale < earlier

    def _of(self, part):
        if isinstance(part, torch.amp.GradScaler) and part.is_enabled():
            return [part.scale(self.one)]
        # Apex keeps its scales in the module.
        if part is sys.modules.get("apex.amp"):
            return [torch.tensor(kept["loss_scale"]) for kept in part.state_dict().values()]
        return []

    def figures(self) -> dict[str, int]:
        """The steps skipped so far, if there is a scale; raises RunError if one is near 0."""
        if not self.scales:
            return {}
        # Apex's are on the CPU.
        scales = [self.one * scale for scale in self.scales]
        # Here Python waits for the device, once.
        skipped, *scales = torch.stack([self.skipped, *scales]).tolist()
        if min(scales) < LOWEST:
            raise nothing_trained(f"the loss scale has fallen to {min(scales):g}")
        return {"skipped": int(skipped)}

    def require_a_step(self, steps: int) -> None:
        """Raise RunError if all `steps` of a whole run were skipped."""
        if self.scales and self.figures()["skipped"] == steps * len(self.scales):
            raise nothing_trained(f"all {steps} steps of the run were skipped")


def nothing_trained(what: str) -> RunError:
    return RunError(
        f"the gradients are not finite in fp16, and such steps are skipped: {what}; use bf16, "
        "lower --lr, or find what overflows, such as the square root of 0"
    )
