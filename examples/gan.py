"""A GAN, two models with DistributedDataParallel, started by torchrun.

    torchrun --nproc-per-node=2 examples/gan.py
    torchrun --nproc-per-node=2 examples/gan.py --points points.npy
    python scripts/prove.py torchrun --nproc-per-node=2 examples/gan.py --device cpu

Read it beside mnist/ddp_launch.py.
"""

import argparse
import math
import sys
from pathlib import Path

# So that Python finds the modules beside this file, and common/ beside its folder.
folder = Path(__file__).resolve().parent
sys.path += [str(folder), str(folder.parent)]

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from common import devices, flags, graph, schedule
from common.data import DataObject, EpochSampler, TensorLoader, seed_of, to_device
from common.errors import InputError, in_one_line
from common.metadata import Metadata
from common.metrics import Best, Sums, in_order
from common.position import Position, seed_step
from common.process import launch
from common.ranks import require_same
from common.run import Run
from common.weights import init_from

# dist: send gradients in 16 bits: half the bytes.
COMM_HOOKS = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
# Numbers of noise that become a point.
NOISE = 8


def parse_args():
    parser = flags.Parser(__doc__)
    parser.set_defaults(dataset="gan")
    add = parser.add_argument
    add("--points", metavar="FILE", help="train on a .npy, a point in each row")
    add(
        "--synthetic",
        type=flags.positive_int,
        default=10_000,
        help="points to generate if there is no --points",
    )
    add("--width", type=flags.positive_int, default=128, help="units of a hidden layer")
    add("--epochs", type=flags.positive_int, default=10, help="passes over the training data")
    add("-b", "--batch-size", type=flags.positive_int, default=128, help="points per process")
    add(
        "-G",
        "--global-batch-size",
        type=flags.positive_int,
        help="points of all processes together; --lr is then the rate for them",
    )
    add("--test-batch-size", type=flags.positive_int, default=1000, help="batch size of evaluation")
    add("--lr", type=flags.positive_float, default=0.002, help="learning rate of one process")
    add(
        "--scale-lr",
        choices=("linear", "sqrt", "none"),
        default="sqrt",
        help="how --lr grows with the number of processes",
    )
    add("--warmup-epochs", type=flags.non_negative_float, default=1, help="epochs of a rising rate")
    add("--compile", action="store_true", help="compile the model with torch.compile")
    add("--cuda-graph", action="store_true", help="run each step as one CUDA graph: one launch")
    add("--seed", type=flags.seed, default=0, help="seed of weights, order of data, and dropout")
    # dist: for slow links.
    add("--comm-hook", choices=COMM_HOOKS, help="send gradients in 16 bits")
    # dist: torch.distributed.launch passes it.
    add("--local-rank", type=int, help=argparse.SUPPRESS)
    flags.add_run_flags(parser)
    return parser.parse_args()


def read_points(path):
    """The numbers in the file `path`, float64 [points, columns]; raises InputError."""
    try:
        # Reads no pickle.
        points = np.lib.format.open_memmap(path, mode="r")
        # Also integers, but no text, and no complex numbers.
        points = points.astype(np.float64, casting="same_kind")
        if points.ndim != 2:
            raise ValueError(f"its shape is {points.shape}")
        wrong = np.count_nonzero(~np.isfinite(points))
        if wrong:
            raise ValueError(f"{wrong} numbers are not finite")
    # A file of others can raise anything.
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
    # dist: the same on each rank, or they train on each other's validation points.
    random = torch.Generator().manual_seed(args.seed)
    order = torch.randperm(len(points), generator=random)
    points = torch.from_numpy(points)[order]
    mean = points[val_count:].mean(dim=0)
    std = points[val_count:].std(dim=0, correction=0)
    # A constant column stays as it is.
    std[std == 0] = 1
    points = ((points - mean) / std).to(torch.get_default_dtype())
    train_set = TensorDataset(points[val_count:])
    # A generated point times std plus mean is one as in the file.
    train_set.metadata = Metadata(mean=mean.tolist(), std=std.tolist())
    # dist: each evaluation has the same noise, whichever rank gets it.
    noise = torch.randn(val_count, NOISE, generator=random)
    return train_set, TensorDataset(points[:val_count], noise)


class Generator(nn.Sequential):
    """Noise [batch, NOISE] to points [batch, columns], standardised.

    It has no BatchNorm, so N processes compute what one does.
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


def draw_noise(args, position, sampler, device):
    """This rank's share [batch, NOISE] of the noise of a step, a function of seed and position."""
    random = torch.Generator()
    random.manual_seed(seed_of(args.seed, position.epoch, position.samples))
    # dist: all ranks draw the noise of the whole global batch, however many they are.
    noise = torch.randn(sampler.global_batch, NOISE, generator=random)
    # dist: the samples of this rank are every world_size-th of the global batch, too.
    return to_device(noise[sampler.rank :: sampler.world_size], device)


def distance_of(real, generated):
    """The sliced Wasserstein distance of two sets [points, columns], in standard deviations."""
    random = torch.Generator().manual_seed(0)
    directions = torch.randn(real.shape[1], 64, generator=random).to(real.device)
    directions = F.normalize(directions, dim=0)
    # On a line the shortest ways lead from the smallest to the smallest, and so on.
    real = (real @ directions).sort(dim=0).values
    generated = (generated @ directions).sort(dim=0).values
    return (real - generated).abs().mean().item()


def load_data(args, device, rank, world_size):
    """Return a DataObject for training and one for validation."""
    train_set, val_set = load(args)
    # dist: each rank needs one.
    if len(val_set) < world_size:
        raise InputError(f"a fifth of the points is for validation: give {5 * world_size} or more")
    # dist: all ranks share --global-batch-size.
    batch_size = schedule.per_process(args.batch_size, args.global_batch_size, world_size)
    # dist: each rank has its own share of a global batch; else all compute the same gradients.
    train_sampler = EpochSampler(len(train_set), batch_size, rank, world_size, seed=args.seed)
    # dist: each point once; torch's DistributedSampler repeats some, which count twice.
    val_sampler = range(rank, len(val_set), world_size)
    train_loader = TensorLoader(train_set, train_sampler, batch_size, device)
    val_loader = TensorLoader(val_set, val_sampler, args.test_batch_size, device)
    train = DataObject(train_set, train_sampler, train_loader)
    return train, DataObject(val_set, val_sampler, val_loader)


def averages(total):
    """The mean losses (nats) of the discriminator and of the generator."""
    points = total["points"]
    return {"loss": total["loss"] / points, "generator_loss": total["generator_loss"] / points}


def text(result):
    return f"loss {result['loss']:.4f} generator's {result['generator_loss']:.4f}"


def make_step(generator, discriminator, optimizer, discriminator_optimizer, sums):
    """Return the function that trains on a batch: all that the device does in a step."""

    def step(real, noise):
        generated = generator(noise)

        discriminator_optimizer.zero_grad()
        # dist: one call for both kinds of points, as the wrapper expects a backward per call.
        logits = discriminator(torch.cat((real, generated.detach())))
        of_real, of_generated = logits.chunk(2)
        # Both cross-entropies: that of real points, and that of generated ones.
        loss = F.softplus(-of_real).mean() + F.softplus(of_generated).mean()
        loss.backward()
        discriminator_optimizer.step()

        optimizer.zero_grad()
        # dist: without the wrapper, which would average gradients that nobody uses: the
        # discriminator's next zero_grad() removes them.
        generator_loss = F.softplus(-discriminator.module(generated)).mean()
        generator_loss.backward()
        optimizer.step()
        count = len(real)
        sums.add(loss=loss.detach() * count, generator_loss=generator_loss.detach() * count)

    return step


@torch.inference_mode()
def evaluate(args, model, val, device, watchdog):
    """Return the distance of generated points from those of the whole validation set."""
    # dist: BatchNorm's statistics differ between ranks: evaluate with rank 0's, which are saved.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    real, _ = val.dataset.tensors
    generated = []
    for batch in watchdog.watch(val.loader):
        _, noise = to_device(batch, device)
        generated.append(model(noise))
        if args.dry_run:
            break
    # dist: those of all ranks: the distance of two sets is no sum over their points.
    generated = in_order(torch.cat(generated), val.sampler, len(real), dist.all_reduce)
    return {"distance": distance_of(real.to(device), generated)}


def train_to_evaluation(args, run, train, step, sums, rates, device, rank):
    """Train up to the next evaluation, or until a signal asks to stop; return the averages."""
    position = run.position
    # A new order in each epoch; a run that resumes within an epoch has the same order there.
    train.sampler.set_epoch(position.epoch, position.samples, position.steps_to_evaluation)
    for batch in run.batches(train.loader):
        (real,) = to_device(batch, device)
        # Data, rates and random numbers depend on seed and position: a resume repeats them.
        for each in rates:
            each.set(position)
        noise = draw_noise(args, position, train.sampler, device)
        # dist: each rank draws its own dropout.
        seed_step(args.seed, position, device, rank)
        step(real, noise)
        # Python counts this; the step is only what the device does.
        sums.add(points=len(real))
        position.advance()
        if run.check_due():
            # dist: over all ranks. The same message says whether one of them got SIGTERM or USR1.
            figures = averages(sums.total(run.stop.carried_by(dist.all_reduce)))
            run.log.step(figures | {"lr": rates[0].current})
            # dist: so all ranks stop after the same step; else they wait for each other.
            if run.stop.agreed:
                break
            if run.save_due:
                run.save()
        if args.dry_run:
            break
    # dist: over all ranks, as above.
    return averages(sums.total(run.stop.carried_by(dist.all_reduce)))


def connect(args):
    """Join the other processes; return the device of this one, its rank, and the world size."""
    # dist: torchrun says which process of this machine this is, and how many there are.
    local_rank, local_world_size = launch.torchrun_env()
    # dist: one device per process.
    device = devices.pick(args.device, local_rank, local_world_size)
    devices.tune(device, args.deterministic)
    if device.type != "cpu":
        # dist: before the group is made, or every rank opens a context on GPU 0.
        torch.accelerator.set_device_index(device.index)
    if args.cuda_graph:
        # A capture needs a stream of its own, to which all that is built from here on belongs.
        graph.prepare(args, device)
    # dist: with None torch chooses by the device: NCCL for CUDA.
    backend = "gloo" if device.type == "cpu" else None
    timeout = launch.group_timeout(args.timeout)
    # dist: all processes wait here for each other.
    dist.init_process_group(backend, timeout=timeout, device_id=device.index)
    # dist: over all machines.
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    launch.check_world_size(world_size)
    return device, rank, world_size


def build(args, model, device, world_size):
    """Return a model with its wrapper, and its optimizer."""
    model = model.to(device)
    if args.compile:
        devices.compile_model(model)
    # dist: the global batch is world_size times larger.
    factor = schedule.lr_factor(args.scale_lr, world_size, args.global_batch_size)
    peak_lr = args.lr * factor
    optimizer = torch.optim.Adam(model.parameters(), peak_lr, betas=(0.5, 0.999), fused=True)
    # dist: averages the gradients of all ranks in backward, while it still computes others.
    # It also copies rank 0's weights to all ranks.
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    # dist: do not send BatchNorm's statistics in every forward, as evaluate() does. It is set here
    # because torch 2.14 warns of the argument, and older ones lack its successor.
    model.broadcast_buffers = False
    if args.comm_hook:
        # dist: gradients travel in fewer bytes.
        model.register_comm_hook(None, COMM_HOOKS[args.comm_hook])
    return model, optimizer


def main():
    args = parse_args()
    device, rank, world_size = connect(args)
    train, val = load_data(args, device, rank, world_size)
    # dist: else machines with different files would train on them in silence.
    require_same((train.dataset, val.dataset), dist.all_reduce, device)
    torch.manual_seed(args.seed)
    metadata = train.dataset.metadata
    network = Generator(len(metadata["mean"]), args.width)
    lines = init_from(args, network, metadata)
    generator, optimizer = build(args, network, device, world_size)
    network = Discriminator(len(metadata["mean"]), args.width)
    discriminator, discriminator_optimizer = build(args, network, device, world_size)
    optimizers = [optimizer, discriminator_optimizer]
    position = Position(train.sampler, args.epochs, args.max_steps, args.eval_every)
    # From --lr up to the rate of each parameter group, and then down to 0.
    rates = [schedule.WarmupCosine(each, args.warmup_epochs, args.lr) for each in optimizers]
    lines += rates[0].warn_if_short(position)
    sums = Sums(device, "loss", "generator_loss", "points")
    step = make_step(generator, discriminator, *optimizers, sums)
    best = Best(lowest=True)
    # A checkpoint holds the state of these objects, and the flags. Add your own.
    state = {
        # dist: without its wrapper, so that any recipe can load it.
        "model": generator.module,
        "optimizer": optimizer,
        "discriminator": discriminator.module,
        "discriminator_optimizer": discriminator_optimizer,
        "position": position,
        "sums": sums,
        "best": best,
        # So that whoever gets the checkpoint knows what its outputs mean.
        "metadata": metadata,
    }
    # Holds the folder of the run, and loads the checkpoint of --resume into `state`.
    run = Run(
        args,
        state,
        device,
        strategy="DDP, torchrun",
        lr=rates[0].peak,
        unit="points",
        lines=lines,
        # dist: only rank 0 prints and writes; else all ranks write the same files at once.
        rank=rank,
        world_size=world_size,
        # dist: all ranks go on from the same checkpoint, and wait until rank 0 has saved one.
        all_reduce=dist.all_reduce,
    )
    if args.cuda_graph:
        # One launch per step, as a small model lets the GPU wait for Python.
        step = graph.Captured(step, device, *optimizers, say=run.log.say)
    while not position.over:
        generator.train()
        discriminator.train()
        train_result = train_to_evaluation(args, run, train, step, sums, rates, device, rank)
        # Before the evaluation, which may take long.
        run.save()
        if run.stop.agreed:
            run.leave()
            break
        # dist: without the wrapper, as a rank may have fewer batches than another.
        val_result = evaluate(args, generator.module, val, device, run.watchdog)
        # If the epoch is over, the next one begins.
        position.record_evaluation()
        sums.reset()
        line = f"{text(train_result)} | val distance {val_result['distance']:.4f}"
        run.log.evaluation(line, train_result | {"lr": rates[0].current}, val_result)
        is_best = best.update(val_result["distance"])
        run.save(is_best)
        if args.dry_run:
            break


if __name__ == "__main__":
    with launch.plain_exits():
        main()
        # dist: closes the connections; NCCL warns without it.
        dist.destroy_process_group()
