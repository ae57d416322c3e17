"""Loss and accuracy over all ranks, as sums and counts that are reduced once and divided once."""

import time

import torch


class Metrics:
    """Sums over the images of a pass: of the loss, of the right answers (top-1, top-5), of the images themselves.

    The average of per-rank averages is wrong as soon as the ranks saw different numbers of images; sums are right
    whatever the split. They are float64 on `device`: float32 counts stop being exact at 2**24, and a sum on the device
    costs no synchronisation per step.
    """

    def __init__(self, device, all_reduce, top5=False):
        """`all_reduce` sums a tensor over all ranks in place; it is called once, by `average`."""
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)
        self.all_reduce, self.top5 = all_reduce, top5
        self.start = time.perf_counter()
        self.waited = 0.0  # seconds that this process waited for data, counted by Run.batches

    def update(self, loss, logits, labels):
        """Add a batch: its mean `loss` [], its `logits` [batch, classes] and its `labels` [batch]."""
        count = labels.numel()
        self.sums[0] += loss.detach().double() * count
        self.sums[1] += (logits.argmax(dim=1) == labels).sum()
        self.sums[2] += count
        if self.top5:
            highest = logits.topk(min(5, logits.shape[1])).indices
            self.sums[3] += (highest == labels.unsqueeze(1)).sum()

    def local_loss(self):
        """The mean loss so far on this rank alone, for the progress bar."""
        return (self.sums[0] / self.sums[2]).item()

    def finite(self):
        """Whether all losses so far on this rank are numbers: bool [] on the device."""
        return self.sums[0].isfinite()

    def state(self):
        """float64 [6]: this rank's sums, the seconds since the start and those spent waiting for data."""
        clocks = [time.perf_counter() - self.start, self.waited]
        return torch.cat((self.sums, torch.tensor(clocks, dtype=torch.float64, device=self.sums.device)))

    def load_state(self, state):
        """Go on from what `state` returned, in another process."""
        self.sums.copy_(state[:4])
        seconds, self.waited = state[4:].tolist()
        self.start = time.perf_counter() - seconds

    def average(self):
        """Reduce over all ranks. Every rank must call it; returns the same means on each.

        A dict: loss (nats), accuracy and where it is asked for top5 (0..1), images (over all ranks), and of this rank
        seconds (since the start of the pass) and data_wait (the share of them spent waiting for data).
        """
        self.all_reduce(self.sums)
        loss, correct, images, correct5 = self.sums.tolist()
        seconds = time.perf_counter() - self.start
        top5 = {"top5": correct5 / images} if self.top5 else {}
        return {"loss": loss / images, "accuracy": correct / images, **top5, "images": int(images),
                "seconds": seconds, "data_wait": self.waited / seconds}


def figures(average):
    """What a line says of a result of Metrics.average."""
    top5 = f" top-5 {average['top5']:.2%}" if "top5" in average else ""
    return f"loss {average['loss']:.4f} accuracy {average['accuracy']:.2%}{top5}"
