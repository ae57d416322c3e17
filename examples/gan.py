"""A GAN, two models with DistributedDataParallel, started by torchrun.

    torchrun --nproc-per-node=2 examples/gan.py
    torchrun --nproc-per-node=2 examples/gan.py --points points.npy
    python scripts/prove.py torchrun --nproc-per-node=2 examples/gan.py --device cpu

Read it beside mnist/ddp_launch.py.
"""

import math
import sys
from importlib import import_module
from pathlib import Path

# Import common/ from this folder or the one above it, and from nowhere else.
folder = Path(__file__).resolve().parent
sys.path[1:1] = [str(folder), str(folder.parent)]
import_module("common")
# Then take the folder above off the path: a queue.py there would hide Python's own.
del sys.path[2]

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from common import devices, flags, graph, schedule
from common.data import DataObject, EpochSampler, TensorLoader, read_array, seed_of, to_device
from common.errors import InputError, in_one_line
from common.metadata import Metadata
from common.metrics import Sums, in_order
from common.process import launch
from common.ranks import World, require_same
from common.run import Run
from common.weights import init_from

# Dimensions of the noise that the generator turns into a point.
NOISE = 8


def parse_args():
    parser = flags.Parser(__doc__, task="gan")
    add = parser.add_argument
    add("--points", metavar="FILE", help="train on a .npy, one point per row")
    add(
        "--synthetic",
        type=flags.positive_int,
        default=10_000,
        help="points to generate if there is no --points",
    )
    add("--width", type=flags.positive_int, default=128, help="units of a hidden layer")
    flags.add_training_flags(
        parser,
        epochs=10,
        batch_size=128,
        lr=0.002,
        momentum=None,
        weight_decay=None,
        scale_lr="sqrt",
    )
    graph.add_flag(parser)
    return parser.parse_args()


def read_points(path):
    """The numbers in the file `path`, float64 [points, columns]; raises InputError."""
    try:
        points = read_array(path)
        # Integers are fine; text and complex numbers are not.
        points = points.astype(np.float64, casting="same_kind")
        if points.ndim != 2:
            raise ValueError(f"its shape is {points.shape}")
        wrong = np.count_nonzero(~np.isfinite(points))
        if wrong:
            raise ValueError(f"{wrong} numbers are not finite")
    # An untrusted file can raise any exception.
    except Exception as error:
        raise InputError(
            f"--points {path}: {in_one_line(error)}: give finite numbers, in a .npy "
            "[points, columns]"
        ) from error
    return points


def generate(count, seed):
    """Points [count, 2] of eight clusters, which form a ring."""
    random = np.random.default_rng(seed)
    angle = random.integers(8, size=count) * math.pi / 4
    centers = np.column_stack([np.cos(angle), np.sin(angle)])
    return centers + random.normal(0, 0.05, size=(count, 2))


def load(args):
    """Return a TensorDataset for training, with its Metadata, and one for validation.

    A sample is a point [columns], standardised, and in validation with noise [NOISE] to generate
    another one. Raises InputError.
    """
    points = read_points(args.points) if args.points else generate(args.synthetic, args.seed)
    val_count = len(points) // 5
    # dist: the same split on each rank, or they train on each other's validation points.
    random = torch.Generator().manual_seed(args.seed)
    order = torch.randperm(len(points), generator=random)
    points = torch.from_numpy(points)[order]
    mean = points[val_count:].mean(dim=0)
    std = points[val_count:].std(dim=0, correction=0)
    # A constant column is not scaled.
    std[std == 0] = 1
    points = ((points - mean) / std).to(torch.get_default_dtype())
    train_set = TensorDataset(points[val_count:])
    # A generated point times std plus mean is in the units of the file.
    train_set.metadata = Metadata(mean=mean.tolist(), std=std.tolist())
    # dist: each evaluation uses the same noise, on any number of ranks.
    noise = torch.randn(val_count, NOISE, generator=random)
    return train_set, TensorDataset(points[:val_count], noise)


class Generator(nn.Sequential):
    """Noise [batch, NOISE] to points [batch, columns], standardised.

    It has no BatchNorm, so that N processes compute the same as one.
    """

    def __init__(self, columns, width):
        super().__init__(
            nn.Linear(NOISE, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, columns),
        )


class Discriminator(nn.Sequential):
    """Points [batch, columns] to logits [batch], above 0 for real ones."""

    def __init__(self, columns, width):
        super().__init__(
            nn.Linear(columns, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, 1),
            nn.Flatten(0),
        )


def draw_noise(run, sampler):
    """This rank's share [batch, NOISE] of a step's noise, from the seed and the position only."""
    position = run.position
    random = torch.Generator()
    random.manual_seed(seed_of(sampler.seed, position.epoch, position.samples))
    # dist: every rank draws the noise of the whole global batch, so it does not depend on their
    # number.
    noise = torch.randn(sampler.global_batch, NOISE, generator=random)
    # dist: then it takes every world_size-th row, as the sampler does with the samples.
    return to_device(noise[sampler.rank :: sampler.world_size], run.world.device)


def distance_of(real, generated):
    """The sliced Wasserstein distance of two sets [points, columns], in standard deviations."""
    random = torch.Generator().manual_seed(0)
    directions = torch.randn(real.shape[1], 64, generator=random).to(real.device)
    directions = F.normalize(directions, dim=0)
    # In one dimension the optimal transport maps the smallest to the smallest, and so on.
    real = (real @ directions).sort(dim=0).values
    generated = (generated @ directions).sort(dim=0).values
    return (real - generated).abs().mean().item()


def load_data(args, world):
    """Return a DataObject for training and one for validation."""
    train_set, val_set = load(args)
    # dist: each rank needs at least one.
    if len(val_set) < world.size:
        raise InputError(f"a fifth of the points is for validation: give {5 * world.size} or more")
    # dist: --global-batch-size is split over all ranks.
    batch_size = schedule.batch_size(args, world.size)
    # dist: each rank has its own share of a global batch; else all compute the same gradients.
    train_sampler = EpochSampler(len(train_set), batch_size, world.rank, world.size, seed=args.seed)
    # dist: each point once; torch's DistributedSampler repeats some, which count twice.
    val_sampler = range(world.rank, len(val_set), world.size)
    train_loader = TensorLoader(train_set, train_sampler, batch_size, world.device)
    val_loader = TensorLoader(val_set, val_sampler, args.test_batch_size, world.device)
    train = DataObject(train_set, train_sampler, train_loader)
    return train, DataObject(val_set, val_sampler, val_loader)


def averages(loss, generator_loss, points):
    """The mean losses (nats) of the discriminator and of the generator."""
    return {"loss": loss / points, "generator_loss": generator_loss / points}


@torch.inference_mode()
def evaluate(model, val, run):
    """Return the distance of generated points from those of the whole validation set."""
    # dist: BatchNorm's statistics differ between ranks: evaluate with rank 0's, as saved.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    real, _ = val.dataset.tensors
    generated = []
    for _, noise in run.batches(val.loader):
        generated.append(model(noise))
    # dist: over all ranks: the distance of two sets is not a sum over their points.
    generated = in_order(torch.cat(generated), val.sampler, len(real), dist.all_reduce)
    return {"distance": distance_of(real.to(run.world.device), generated)}


def connect(args):
    """Join the other processes; return the World of this one."""
    # dist: the LOCAL_RANK and LOCAL_WORLD_SIZE that torchrun sets.
    local_rank, local_world_size = launch.torchrun_env()
    # dist: one device per process, before init_process_group; else all open a context on GPU 0.
    device = devices.use(args, local_rank, local_world_size)
    # dist: Gloo for CPUs; with None torch picks the accelerator's backend, NCCL for CUDA.
    backend = "gloo" if device.type == "cpu" else None
    timeout = launch.group_timeout(args.timeout)
    # dist: all processes wait here for each other.
    dist.init_process_group(backend, timeout=timeout, device_id=device.index)
    # dist: only rank 0 writes files. Every few steps an all-reduce adds up the metrics, and tells
    # all ranks whether one got a signal, so that they stop after the same step.
    return World(device, dist.get_rank(), dist.get_world_size(), dist.all_reduce, "DDP")


def build(args, model, world):
    """Wrap `model`, and return the wrapper and an optimizer."""
    devices.adapt(model, args)  # --compile
    # dist: the global batch is world.size times larger, and the rate grows with it.
    lr = schedule.peak_lr(args, world.size)
    optimizer = torch.optim.Adam(model.parameters(), lr, betas=(0.5, 0.999), fused=True)
    # dist: averages gradients over all ranks while backward still computes others.
    # It also copies rank 0's weights to all ranks.
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    # dist: evaluate() broadcasts BatchNorm's statistics, so forward need not. As an attribute:
    # torch 2.14 deprecates the argument, and older versions lack its replacement.
    ddp_model.broadcast_buffers = False
    return ddp_model, optimizer


def main():
    args = parse_args()
    world = connect(args)
    train, val = load_data(args, world)
    # dist: else machines with different files would silently train on them.
    require_same(world, train.dataset, val.dataset)
    torch.manual_seed(args.seed)
    metadata = train.dataset.metadata
    columns = len(metadata["mean"])
    generator = Generator(columns, args.width).to(world.device)
    init_from(args, generator, metadata, world)
    discriminator = Discriminator(columns, args.width).to(world.device)
    ddp_generator, optimizer = build(args, generator, world)
    ddp_discriminator, discriminator_optimizer = build(args, discriminator, world)
    rates = schedule.WarmupCosine(args.warmup_epochs, optimizer, discriminator_optimizer)
    # step() adds to them; run.steps() logs them over all ranks, and run.record() resets them.
    sums = Sums(world.device, averages)
    # A checkpoint holds the state of these objects, and the flags. Add your own.
    # dist: the models without their wrappers, so that any recipe can load them.
    state = {
        "model": generator,
        "optimizer": optimizer,
        "discriminator": discriminator,
        "discriminator_optimizer": discriminator_optimizer,
        "metadata": metadata,
    }
    # Locks the folder of the run, and loads the checkpoint of --resume into `state`.
    run = Run(args, world, state, sums, rates, train)

    def step(real, noise):
        # dist: through the wrapper; else no gradient is averaged.
        generated = ddp_generator(noise)

        discriminator_optimizer.zero_grad()
        # dist: one forward for both kinds of points, as DDP expects a backward per forward.
        logits = ddp_discriminator(torch.cat((real, generated.detach())))
        of_real, of_generated = logits.chunk(2)
        # The cross-entropy for real points plus that for generated ones.
        loss = F.softplus(-of_real).mean() + F.softplus(of_generated).mean()
        loss.backward()
        discriminator_optimizer.step()

        optimizer.zero_grad()
        # dist: without the wrapper, which would average gradients that nobody uses: the
        # discriminator's next zero_grad() clears them.
        generator_loss = F.softplus(-discriminator(generated)).mean()
        generator_loss.backward()
        optimizer.step()

        count = len(real)
        sums.add(loss=loss.detach() * count, points=count)
        sums.add(generator_loss=generator_loss.detach() * count)

    if args.cuda_graph:
        step = graph.Captured(step, world, optimizer, discriminator_optimizer)
    # Until --epochs or --max-steps are done, a signal comes, or --dry-run has tried one step.
    while not run.over:
        generator.train()
        discriminator.train()
        # Yields batches up to the next evaluation, then saves. Data order, rate and random numbers
        # depend only on seed, position and rank, so a resumed run repeats them.
        for (real,) in run.steps(train):
            # Not in the step: a CUDA graph replays GPU work only.
            noise = draw_noise(run, train.sampler)
            step(real, noise)
        # After SIGTERM or SIGUSR1 the run is over, and has been saved.
        if not run.over:
            # dist: without the wrapper: there are no gradients to average.
            result = evaluate(generator, val, run)
            # Lower is better.
            run.record(result, best=-result["distance"])


if __name__ == "__main__":
    with launch.plain_exits():
        main()
        # dist: closes the connections; NCCL warns without it.
        dist.destroy_process_group()
