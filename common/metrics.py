"""Loss and accuracy over all ranks: sums and counts, reduced once and divided once."""

import time

import torch


class Metrics:
    """`sums` [4] of a pass: loss, correct, images, correct in the top 5; `before`: the sums before a resume."""

    def __init__(self, device: torch.device, before: list[float] | None = None, top5: bool = False):
        wide = torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no float64
        self.sums = torch.zeros(4, dtype=wide, device=device)
        self.loss, self.correct, self.images, self.correct5 = self.sums.unbind()  # views
        self.before, self.top5, self.start = before or [0.0] * 4, top5, time.perf_counter()

    def update(self, loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Add a batch: its mean `loss` [], its `logits` [batch, classes] and its `labels` [batch]."""
        self.loss.add_(loss.detach(), alpha=len(labels))
        self.correct.add_((logits.argmax(dim=1) == labels).sum())
        self.images.add_(len(labels))
        if self.top5:
            self.correct5.add_((logits.topk(min(5, logits.shape[1])).indices == labels.unsqueeze(1)).sum())

    def average(self, waited: float) -> dict:
        """A dict: loss (nats), accuracy, top5 (0..1), images, speed; `sums` are of all ranks, `waited` in seconds."""
        here, seconds = self.sums.tolist(), time.perf_counter() - self.start
        loss, correct, images, correct5 = (a + b for a, b in zip(here, self.before, strict=True))
        top5 = {"top5": correct5 / images} if self.top5 else {}
        return {"loss": loss / images, "accuracy": correct / images, **top5, "images": int(images),
                "seconds": seconds, "images_per_sec": here[2] / seconds, "data_wait": waited / seconds}


def format_metrics(average: dict) -> str:
    top5 = f" top-5 {average['top5']:.2%}" if "top5" in average else ""
    return f"loss {average['loss']:.4f} acc {average['accuracy']:.2%}{top5}"
