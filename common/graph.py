"""A whole training step as one CUDA graph: one launch per step, so that the GPU waits for nothing.

What torch asks of a capture: docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from collections.abc import Callable

import torch

from common.errors import InputError
from common.ranks import World

# DDP looks at the times of its first ten steps, and waits for them. Before that it lays out its
# buckets anew, cuDNN searches for the fastest algorithms, and the optimizer makes its momentum.
WARM_UP = 11


def add_flag(parser) -> None:
    """Add --cuda-graph: devices.use() prepares for it, and Captured is it."""
    add = parser.add_run_group()
    add("--cuda-graph", action="store_true", help="run each step as one CUDA graph: one launch")


def prepare(args, device: torch.device) -> None:
    """Let this process work on a stream of its own, as the default stream cannot be captured.

    It comes before the model: DDP and autograd work on the stream where they were built.
    Raises InputError if `device` has no CUDA graphs, or for a flag that does not go with them.
    """
    if device.type != "cuda":
        raise InputError(f"--cuda-graph needs a CUDA device, not {device.type}: leave it out")
    if args.accumulate > 1:
        raise InputError("--cuda-graph does not go with --accumulate: leave one of them out")
    torch.cuda.set_stream(torch.cuda.Stream(device))


class Captured:
    """`step`, a function of the parts of a batch, as a CUDA graph.

    The first WARM_UP calls run `step`. The next one captures what it does on the GPU, and from
    then on a call copies its batch to where the captured one lies, and launches all of it at once.
    A launch repeats the kernels, and no Python:

    - Each tensor that `step` uses has to stay where it is: weights, momentum, sums.
    - A number of Python keeps the value that it had at the capture. The rates of `optimizers` are
      the exception: they are read from the device, where each call puts them. So the optimizers
      have to be fused, or capturable.
    - Random numbers come from torch's generator of the device, which may be seeded between calls.
    - A line that waits for the GPU, as item() does, raises RuntimeError in the capture.

    A batch of other shapes or dtypes runs without the graph, and a line says so.
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
        """Put each rate that has changed on the device."""
        for index, group in enumerate(self._groups()):
            if group["lr"] != self.numbers[index]:
                self.numbers[index] = group["lr"]
                self.rates[index].fill_(group["lr"])

    def _run(self, batch, **options):
        """Run the step with these options of its optimizers, and tensors as their rates."""
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
        # Meanwhile other threads may use the GPU: NCCL's watchdog, and a loader's pinned memory.
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            # Without it Adam refuses a capture, and outside of one it warns of it.
            self._run(self.batch, capturable=True)

    def _fits(self, batch):
        """Whether `batch` is like the captured one; if not, it is said once."""
        expected = list(map(kind, self.batch))
        given = list(map(kind, batch))
        if given != expected and not self.said:
            self.said = True
            self.world.say(f"runs without the CUDA graph of {expected}: a batch of {given}")
        return given == expected


def kind(part):
    """What the parts of two batches have in common if one graph is for both."""
    return (*part.shape, part.dtype) if torch.is_tensor(part) else part
