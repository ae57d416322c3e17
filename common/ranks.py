"""What the ranks of a run tell each other; all of it goes through one sum over the ranks."""

import torch

from common import failures, processes


def not_distributed(tensor):
    """The all-reduce of a run of one process: the sum over all ranks is what it has."""
    return lambda: None


class Ranks:
    """The ranks of a run, of which this process is one. Each of them calls the same methods in the same order.

    `all_reduce(tensor)` begins to sum a tensor over the ranks, in place, and returns a function that waits for the end
    of it. It is the only line to other processes that `common` has.
    """

    def __init__(self, device, rank, world_size, all_reduce):
        self.device, self.rank, self.world_size, self.all_reduce = device, rank, world_size, all_reduce
        self.warned, self.wait = None, None  # the sum that is under way from one step to the next

    def sum(self, tensor):
        """Sum a tensor over the ranks, in place."""
        self.all_reduce(tensor)()

    def gather(self, own):
        """[ranks, ...]: the tensor `own` of each rank, on the CPU: each fills in its row, and the sum has them all."""
        # int32 for what is smaller, as Horovod does not sum uint8
        rows = torch.zeros(self.world_size, *own.shape, device=self.device,
                           dtype=own.dtype if own.is_floating_point() else torch.int32)
        rows[self.rank] = own
        self.sum(rows)
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
        self.sum(words)
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

    def pass_warning_on(self):
        """Begin to tell the other ranks whether this one was warned (SIGUSR1) that it has to end.

        The sum travels while the next step computes: to wait for it costs Horovod, with its cycles of 1 ms, a good
        part of a short step. No other sum may begin before `any_warned` has read it, as Horovod has one name for all.
        """
        self.warned = torch.full((1,), float(processes.warned), device=self.device)
        self.wait = self.all_reduce(self.warned)

    def any_warned(self):
        """Whether any rank was warned when all last called `pass_warning_on`; False where they have not."""
        if not self.wait:
            return False
        # On a stream of its own: this waits for the sum alone, and not for the step that the GPU is at
        with torch.cuda.stream(torch.cuda.Stream(self.device) if self.device.type == "cuda" else None):
            self.wait()
            self.wait = None
            return bool(self.warned.item())
