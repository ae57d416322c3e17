"""What the ranks of a run tell each other; all of it goes through one sum over the ranks."""

import time

import torch

from common import failures, processes


def not_distributed(tensor):
    """The all-reduce of a run of one process: the sum over all ranks is what it has."""


class Ranks:
    """The ranks of a run, of which this process is one. Each of them calls the same methods in the same order.

    `all_reduce` sums a tensor over the ranks in place; it is the only line to other processes that `common` has.
    """

    def __init__(self, device, rank, world_size, all_reduce):
        self.device, self.rank, self.world_size, self.all_reduce = device, rank, world_size, all_reduce
        self.steps, self.every, self.asked = 0, 1, time.perf_counter()  # since `any_warned` asked the others, and when

    def gather(self, own):
        """[ranks, ...]: the tensor `own` of each rank, on the CPU: each fills in its row, and the sum has them all."""
        # int32 for what is smaller, as Horovod does not sum uint8
        rows = torch.zeros(self.world_size, *own.shape, device=self.device,
                           dtype=own.dtype if own.is_floating_point() else torch.int32)
        rows[self.rank] = own
        self.all_reduce(rows)
        return rows.to("cpu", own.dtype)

    def gather_names(self, own):
        """The different names of all ranks, in order; `own` is that of this one, of which the first 64 bytes count."""
        rows = self.gather(torch.tensor(list(own.encode()[:64].ljust(64, b"\0")), dtype=torch.uint8))
        return sorted({bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows.tolist()})

    def from_rank_0(self, content):
        """The bytes `content` of rank 0, on each rank: a broadcast is the sum where all others have zeros."""
        size = int(self.gather(torch.tensor(float(len(content))).double())[0])
        padded = bytearray(size + 4 - size % 4)
        padded[:len(content)] = content
        words = torch.frombuffer(padded, dtype=torch.int32).to(self.device)
        self.all_reduce(words)
        return words.cpu().numpy().tobytes()[:size]

    def on_rank_0(self, action, *args):
        """What `action` returns on rank 0, and None on the others; where it ends the process, all ranks end."""
        result, status = None, 0
        if self.rank == 0:
            try:
                result = action(*args)
            except SystemExit as end:
                status = end.code
        status = int(self.gather(torch.tensor(status))[0])
        if status:
            failures.end(status)
        return result

    def any_warned(self, now=False):
        """Whether any rank was warned (SIGUSR1) that it has to end; called after each step, and the same on all ranks.

        They ask each other after each step that takes 50 ms, after up to ten shorter ones, and `now`: it costs some
        0.1 ms with gloo, and 1 ms with Horovod, which works in cycles. After how many follows from a sum over the
        ranks, so that all of them take part.
        """
        self.steps += 1
        if self.steps < self.every and not now:
            return False
        asked, self.asked = self.asked, time.perf_counter()
        told = torch.tensor([processes.warned, self.asked - asked], dtype=torch.float64, device=self.device)
        self.all_reduce(told)
        warned, seconds = told.tolist()
        if not now:  # else it was no step that took so long
            self.every = min(10, max(1, int(0.05 * self.steps * self.world_size / seconds)))
        self.steps = 0
        return warned > 0
