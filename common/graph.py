"""A whole training step as one CUDA graph, launched at once: no launch overhead per kernel.

What torch requires of a capture: docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from collections.abc import Callable

import torch

from common.errors import InputError
from common.ranks import World

# Steps before the capture. DDP measures its first ten steps, which syncs with the GPU. It also
# rebuilds its buckets, cuDNN searches for fast algorithms, and the optimizer creates its momentum.
WARM_UP = 11


def add_flag(parser) -> None:
    """Add --cuda-graph: devices.use() prepares for it, and Captured runs it."""
    add = parser.add_run_group()
    add("--cuda-graph", action="store_true", help="run each step as one CUDA graph: one launch")


def prepare(args, device: torch.device) -> None:
    """Switch this process to a side stream, as the default stream cannot be captured.

    Call it before building the model: DDP and autograd stay on the stream they were built on.
    Raises InputError if `device` has no CUDA graphs, or a flag does not work with them.
    """
    if device.type != "cuda":
        raise InputError(f"--cuda-graph needs a CUDA device, not {device.type}: leave it out")
    if args.accumulate > 1:
        raise InputError("--cuda-graph does not work with --accumulate: leave one of them out")
    torch.cuda.set_stream(torch.cuda.Stream(device))


class Captured:
    """`step`, a function of the parts of a batch, as a CUDA graph.

    The first WARM_UP calls run `step`. The next one captures its GPU work. From then on a call
    copies its batch into the captured one, and launches the whole graph. That replays the kernels,
    not the Python code:

    - Each tensor that `step` uses must stay at its address: weights, momentum, sums.
    - A Python number keeps its value from the capture, except for the rates of `optimizers`: each
      call copies them to the device, and the kernels read them there. So the optimizers must be
      fused or capturable.
    - Random numbers come from torch's generator for the device, which may be seeded between calls.
    - Code that waits for the GPU, such as item(), raises RuntimeError in the capture.

    A batch of other shapes or dtypes runs without the graph; the first time, a line says so.
    """

    def __init__(self, step: Callable[..., None], world: World, *optimizers: torch.optim.Optimizer):
        self.step = step
        self.world = world
        self.optimizers = optimizers
        self.warm_up_left = WARM_UP
        self.graph = None
        self.said = False
        self.numbers = [None] * len(self._groups())
        # A fused optimizer reads a rate as float32.
        self.rates = [torch.zeros((), device=world.device) for _ in self.numbers]

    def _groups(self):
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def __call__(self, *batch) -> None:
        self._copy_rates()
        if self.warm_up_left > 0:
            self.warm_up_left -= 1
            self._run(batch)
            return
        if self.graph is None:
            self._capture(batch)
        if self._fits(batch):
            for fixed, part in zip(self.batch, batch, strict=True):
                if torch.is_tensor(part):
                    fixed.copy_(part)
            self.graph.replay()
        else:
            self._run(batch)

    def _copy_rates(self):
        """Copy the rates that have changed to the device."""
        for index, group in enumerate(self._groups()):
            if group["lr"] != self.numbers[index]:
                self.numbers[index] = group["lr"]
                self.rates[index].fill_(group["lr"])

    def _run(self, batch, **options):
        """Run the step with its optimizers set to `options`, and to rates that are tensors."""
        groups = self._groups()
        own = [dict(group) for group in groups]
        for group, rate in zip(groups, self.rates, strict=True):
            group.update(options, lr=rate)
        try:
            self.step(*batch)
        finally:
            for group, options in zip(groups, own, strict=True):
                group.clear()
                group.update(options)

    def _capture(self, batch):
        self.batch = [part.clone() if torch.is_tensor(part) else part for part in batch]
        self.graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        # thread_local: other threads may use the GPU meanwhile, such as NCCL's watchdog, and a
        # loader's that pins memory.
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            # Adam raises in a capture without `capturable`, and warns about it outside of one.
            self._run(self.batch, capturable=True)

    def _fits(self, batch):
        """Whether `batch` is like the captured one; if not, print a line the first time."""
        expected = list(map(kind, self.batch))
        given = list(map(kind, batch))
        if given != expected and not self.said:
            self.said = True
            self.world.say(f"runs without the CUDA graph of {expected}: a batch of {given}")
        return given == expected


def kind(part):
    """What has to be equal in the parts of two batches for one graph to fit both."""
    return (*part.shape, part.dtype) if torch.is_tensor(part) else part
