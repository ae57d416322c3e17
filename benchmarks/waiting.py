"""Take apart what a second process adds to a step of a small model: MNIST's ConvNet.

    torchrun --nproc-per-node=2 benchmarks/waiting.py
    horovodrun --gloo -np 2 python benchmarks/waiting.py
    mpirun -np 2 --bind-to none python benchmarks/waiting.py

Each row is a way to train. They take turns in a random order, ten steps each, so that a machine
that is slow for a while is slow for all of them. Each turn is compared with that of `alone` in the
same round; the table has the medians over the rounds.

alone: each process trains by itself. an all-reduce of one number: the same, and then a sum of one
number over the processes, so that each step waits for the slowest process, and sends nothing.
without communication: DDP's reducer copies the gradients, and sends nothing.

The line below the table is computed: from the times of single steps of `alone`, the mean over
the steps of the slowest process, divided by the mean over all. It is what waiting for the slowest
process costs where an all-reduce takes no time. It is 1 where all steps take equally long.
"""

import datetime
import random
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from benchmarks import machine, runs
from benchmarks.allreduce import TorchGroup, join
from common import devices, flags, launch
from common.errors import InputError
from common.parent import die_with_parent
from images.models import ConvNet

STEPS = 10  # of a turn
SINGLE_STEPS = 300  # timed one by one


class Way:
    """A way to train: a model with its optimizer, and what a step does after backward."""

    def __init__(self, wrap=None, optimizer=None, after_backward=None):
        torch.manual_seed(0)
        model = ConvNet(channels=1, size=28)
        self.model = wrap(model) if wrap else model
        self.optimizer = torch.optim.SGD(model.parameters(), 0.001, 0.9, fused=True)
        if optimizer:
            self.optimizer = optimizer(self.optimizer, model)
        self.after_backward = after_backward

    def train(self, images, labels, steps=STEPS):
        for _ in range(steps):
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(images), labels).backward()
            if self.after_backward:
                self.after_backward()
            self.optimizer.step()


def send_nothing(state, bucket):
    """A communication hook of DDP that gives back this rank's own gradients."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def ddp(hook=None, **options):
    """A function that wraps a model as the recipes do, but for these options."""

    def wrap(model):
        wrapped = DistributedDataParallel(model, **{"gradient_as_bucket_view": True, **options})
        wrapped.broadcast_buffers = False
        if hook:
            wrapped.register_comm_hook(dist.group.WORLD, hook)
        return wrapped

    return wrap


def ways_of_ddp():
    return {
        "DDP without communication": Way(ddp(send_nothing)),
        "DDP, as in ddp_launch.py": Way(ddp()),
        "DDP, gradients copied from and to the buckets": Way(ddp(gradient_as_bucket_view=False)),
        "DDP, buckets of 25 KB": Way(ddp(bucket_cap_mb=25 / 1024)),
        "DDP, static_graph": Way(ddp(static_graph=True)),
        "DDP, gradients sent in bf16": Way(ddp(default_hooks.bf16_compress_hook)),
    }


def ways_of_horovod(hvd):
    def distributed(**options):
        def wrap(optimizer, model):
            names = model.named_parameters()
            return hvd.DistributedOptimizer(optimizer, named_parameters=names, **options)

        return wrap

    return {
        "Horovod, as in hvd.py": Way(optimizer=distributed()),
        "Horovod, all gradients in one group": Way(optimizer=distributed(num_groups=1)),
        "Horovod, gradients sent in fp16": Way(
            optimizer=distributed(compression=hvd.Compression.fp16)
        ),
    }


def ways_of(group):
    """{name: Way}; `alone` is the first."""
    number = torch.zeros(1)
    ways = {
        "alone": Way(),
        "an all-reduce of one number": Way(after_backward=lambda: group.all_reduce(number)),
    }
    if isinstance(group, TorchGroup):
        return ways | ways_of_ddp()
    return ways | ways_of_horovod(group.hvd)


def seconds_of(group, way, batch):
    """The seconds of a turn of `way`, averaged over the ranks."""
    group.barrier()
    began = time.perf_counter()
    way.train(*batch)
    own = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    return group.gather(own).mean().item()


def measure(group, ways, batch, seconds):
    """{name: seconds of each turn}, in rounds until `seconds` have passed on rank 0."""
    for way in ways.values():
        way.train(*batch)
    turns = {name: [] for name in ways}
    names = list(ways)
    # The same order on all ranks.
    order = random.Random(0)
    began = time.monotonic()
    over = False
    while not over:
        order.shuffle(names)
        for name in names:
            turns[name].append(seconds_of(group, ways[name], batch))
        passed = group.gather(torch.tensor([time.monotonic() - began], dtype=torch.float64))
        over = passed[0].item() > seconds
    return turns


def waiting_for_the_slowest(group, way, batch):
    """See above: mean of the slowest rank's step, divided by the mean of all."""
    own = []
    for _ in range(SINGLE_STEPS):
        began = time.perf_counter()
        way.train(*batch, steps=1)
        own.append(time.perf_counter() - began)
    steps = group.gather(torch.tensor(own, dtype=torch.float64))
    return (steps.amax(dim=0).mean() / steps.mean()).item()


def markdown(group, turns, slowest):
    rows = []
    for name, seconds in turns.items():
        longer = statistics.median(
            own / alone for own, alone in zip(seconds, turns["alone"], strict=True)
        )
        step = statistics.median(seconds) / STEPS * 1000
        rows.append([name, f"{step:.2f}", f"{longer:.2f}", f"{1 / longer:.2f}"])
    versions = ", ".join(map(" ".join, machine.versions().items()))
    return "\n".join(
        [
            f"{group.backend}: {group.world_size} processes with {torch.get_num_threads()} "
            f"thread(s), {machine.cpu()}; {versions}; commit {machine.commit()}, "
            f"{datetime.date.today()}",
            "",
            runs.table(["", "ms per step", "times alone", "images/s of alone"], rows),
            "",
            f"The slowest of {group.world_size} steps alone takes {slowest:.2f} times the mean.",
        ]
    )


def parse_args():
    parser = flags.Parser(__doc__)
    add = parser.add_argument
    add("--seconds", type=flags.positive_int, default=60, metavar="N", help="(default: 60)")
    add("-b", "--batch-size", type=flags.positive_int, default=64, metavar="N", help="per process")
    return parser.parse_args()


def main():
    args = parse_args()
    die_with_parent()
    device = torch.device("cpu")
    group = join(lambda local_rank, local_world_size: device)
    if group.world_size == 1:
        raise InputError(
            "one process waits for nobody: start it with a launcher, "
            f"torchrun --nproc-per-node=2 {sys.argv[0]}"
        )
    # As a recipe does.
    devices.tune(device)
    images = torch.randn(args.batch_size, 1, 28, 28)
    labels = torch.randint(10, (args.batch_size,))
    batch = (images, labels)
    ways = ways_of(group)
    turns = measure(group, ways, batch, args.seconds)
    slowest = waiting_for_the_slowest(group, ways["alone"], batch)
    if group.rank == 0:
        print(markdown(group, turns, slowest), flush=True)
    # DDP's wrappers end before their connections.
    ways.clear()
    group.leave()


if __name__ == "__main__":
    with launch.plain_exits():
        main()
