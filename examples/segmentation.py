"""Semantic segmentation with DistributedDataParallel, started by torchrun.

    torchrun --nproc-per-node=2 examples/segmentation.py
    torchrun --nproc-per-node=2 examples/segmentation.py --synthetic 2000 --workers 2

Read it beside mnist/ddp_launch.py.
"""

import argparse
import sys
from pathlib import Path

# So that Python finds common/, and the modules beside this file, also with -P and -m.
sys.path[1:1] = map(str, Path(__file__).resolve().parents[:2])
from common.parent import die_with_parent

# dist: before torch, which loads for seconds; else a rank outlives a launcher that is killed.
die_with_parent()

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from common import (
    checkpoint,
    devices,
    flags,
    flight_recorder,
    hooks,
    launch,
    lease,
    profiler,
    schedule,
)
from common.data import DataObject, EpochSampler, Seeded, to_device
from common.errors import InputError
from common.log import Log, new_folder
from common.metrics import Best, Sums, require_finite
from common.position import Position, seed_step
from common.ranks import require_same
from common.stop import StopSignal
from common.watchdog import Watchdog
from common.workers import data_loader
from images.data import Normalise

CLASSES = 3  # background, disc, square
# Pixels of this class count in no loss and no metric.
IGNORED = 255
# Most pixels are background.
CLASS_WEIGHTS = (0.2, 1.0, 1.0)
normalise = Normalise(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))


def parse_args():
    parser = flags.Parser(__doc__)
    parser.set_defaults(dataset="segmentation")
    add = parser.add_argument
    add("--synthetic", type=flags.positive_int, default=1000, help="generated images")
    add("--image-size", type=flags.image_size, default=64, help="height and width in pixels")
    add("--workers", type=flags.non_negative_int, default=1, help="of the loader, per process")
    add("--width", type=flags.positive_int, default=16, help="channels of the model")
    add("--epochs", type=flags.positive_int, default=5, help="passes over the data")
    add("-b", "--batch-size", type=flags.positive_int, default=16, help="images per process")
    add("-G", "--global-batch-size", type=flags.positive_int, help="over all; --lr is for it")
    add("--test-batch-size", type=flags.positive_int, default=64, help="in evaluation")
    add("--lr", type=flags.positive_float, default=0.05, help="learning rate of one process")
    add("--scale-lr", choices=("linear", "sqrt", "none"), default="linear", help="by processes")
    add("--warmup-epochs", type=flags.non_negative_float, default=1, help="to the scaled --lr")
    add("--momentum", type=flags.fraction, default=0.9, help="of SGD")
    add("--weight-decay", "--wd", type=flags.non_negative_float, default=0, help="of SGD")
    add("--channels-last", action="store_true", help="NHWC images and weights")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--seed", type=flags.seed, default=0, help="of weights, data and dropout")
    # dist: compress gradients, for slow links.
    add("--comm-hook", choices=hooks.HOOKS, default="none", help="how gradients travel")
    add("--powersgd-rank", type=flags.positive_int, default=2, help="columns; fewer send less")
    # dist: torch.distributed.launch passes it.
    add("--local-rank", type=int, help=argparse.SUPPRESS)
    flags.add_run_flags(parser)
    return parser.parse_args()


class Shapes(Dataset):
    """A sample is {"image": uint8 [3, size, size], "mask": int64 [size, size]}.

    Here it is generated: a disc and a square on noise. Read your own files in `__getitem__`.
    """

    def __init__(self, length, size, seed, train):
        self.length = length
        self.size = size
        self.seed = seed
        self.train = train

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        random = np.random.default_rng((self.seed, index))
        image = random.normal(100, 30, (3, self.size, self.size))
        mask = np.zeros((self.size, self.size), np.int64)
        y, x = np.mgrid[: self.size, : self.size]
        for label in (1, 2):
            center = random.uniform(0, self.size, 2)
            radius = random.uniform(self.size / 8, self.size / 4)
            dy = abs(y - center[0])
            dx = abs(x - center[1])
            distance = np.hypot(dy, dx) if label == 1 else np.maximum(dy, dx)
            image[label, distance < radius] += 60
            mask[distance < radius] = label
            # A pixel at the edge belongs to neither side for certain.
            mask[abs(distance - radius) < 1] = IGNORED
        image = torch.from_numpy(image.clip(0, 255).astype(np.uint8))
        mask = torch.from_numpy(mask)
        if self.train:
            image, mask = augment(image, mask)
        return {"image": image, "mask": mask}


def augment(image, mask):
    """Mirror both or none, and shift both by the same; what comes in from outside is ignored."""
    if torch.rand(1).item() < 0.5:
        image = image.flip(-1)
        mask = mask.flip(-1)
    margin = 4
    top, left = torch.randint(2 * margin + 1, (2,)).tolist()
    height, width = mask.shape
    image = F.pad(image, 4 * [margin])
    mask = F.pad(mask, 4 * [margin], value=IGNORED)
    rows = slice(top, top + height)
    columns = slice(left, left + width)
    return image[:, rows, columns], mask[rows, columns]


class Network(nn.Module):
    """Images [batch, 3, height, width] to logits [batch, classes, height, width].

    It has GroupNorm: unlike BatchNorm, it computes the same on any number of processes.
    """

    def __init__(self, width):
        super().__init__()
        self.fine = block(3, width)
        self.coarse = nn.Sequential(nn.MaxPool2d(4), block(width, 2 * width))
        self.logits = nn.Conv2d(3 * width, CLASSES, kernel_size=1)

    def forward(self, images):
        fine = self.fine(images)
        coarse = F.interpolate(self.coarse(fine), size=fine.shape[-2:], mode="bilinear")
        return self.logits(torch.cat((fine, coarse), dim=1))


def block(inputs, outputs):
    """Two 3x3 convolutions."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1),
        nn.GroupNorm(4, outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, kernel_size=3, padding=1),
        nn.GroupNorm(4, outputs),
        nn.ReLU(),
    )


def weighted_loss(logits, mask, weights):
    """Return the sums of the pixels' weighted losses (nats), and of their weights."""
    loss = F.cross_entropy(logits, mask, weights, ignore_index=IGNORED, reduction="sum")
    known = mask != IGNORED
    weight = (weights[mask.where(known, 0)] * known).sum()
    return loss, weight


def confusion_of(logits, mask):
    """The pixels of each class (row) that are taken for each class (column): [C, C]."""
    known = mask != IGNORED
    pair = mask.where(known, 0) * CLASSES + logits.argmax(1)
    # torch.bincount and mask[known] would wait for the GPU.
    counts = torch.zeros(CLASSES**2, device=mask.device)
    counts.index_add_(0, pair.flatten(), known.flatten().to(counts.dtype))
    return counts.view(CLASSES, CLASSES)


def load_data(args, device, rank, world_size):
    """Return a DataObject for training and one for validation."""
    train_set = Shapes(args.synthetic, args.image_size, args.seed, train=True)
    val_set = Shapes(max(1, args.synthetic // 5), args.image_size, args.seed + 1, train=False)
    # dist: all ranks share --global-batch-size.
    batch_size = schedule.per_process(args.batch_size, args.global_batch_size, world_size)
    # dist: its own share of each global batch; else all ranks compute the same gradients.
    train_sampler = EpochSampler(len(train_set), batch_size, rank, world_size, seed=args.seed)
    # dist: each image once; torch's DistributedSampler repeats some, which count twice.
    val_sampler = range(rank, len(val_set), world_size)
    options = {"workers": args.workers, "pin_memory": device.type != "cpu"}
    # Each epoch augments anew, as a function of seed, epoch and index.
    seeded = Seeded(train_set, train_sampler)
    train_loader = data_loader(seeded, train_sampler, batch_size, **options)
    val_loader = data_loader(val_set, val_sampler, args.test_batch_size, **options)
    train = DataObject(train_set, train_sampler, train_loader)
    return train, DataObject(val_set, val_sampler, val_loader)


def averages(total):
    """The loss (nats per weight) and the mean of the classes' IoU, of the sums of all ranks."""
    confusion = total["confusion"]
    both = confusion.diagonal()
    either = confusion.sum(dim=0) + confusion.sum(dim=1) - both
    # A class that does not occur, and is never predicted, has no IoU.
    iou = (both / either)[either > 0].mean().item()
    return {"loss": total["loss"] / total["weight"], "iou": iou}


def text(result):
    return f"loss {result['loss']:.4f} mean IoU {result['iou']:.2%}"


@torch.inference_mode()
def evaluate(args, model, val, device, watchdog):
    """Return the averages over the whole validation set, each sample once."""
    # dist: BatchNorm's statistics differ between ranks: evaluate with rank 0's, which are saved.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    sums = Sums(device, "loss", "weight", confusion=(CLASSES, CLASSES))
    weights = torch.tensor(CLASS_WEIGHTS, device=device)
    for batch in watchdog(val.loader):
        batch = to_device(batch, device)
        logits = model(normalise(batch["image"]))
        loss, weight = weighted_loss(logits, batch["mask"], weights)
        sums.add(loss=loss, weight=weight, confusion=confusion_of(logits, batch["mask"]))
        if args.dry_run:
            break
    # dist: each rank evaluated only its share: sum over all, then divide once.
    return averages(sums.total(dist.all_reduce))


def fit(args, device, train, val, model, optimizer, lr, lines, rank, world_size):
    """Train and evaluate to the end of the run; with --resume, from its last checkpoint."""
    # With --max-steps a run may end within an epoch.
    epochs = schedule.epochs_of(args.epochs, args.max_steps, train.sampler)
    rates = schedule.WarmupCosine(optimizer, epochs, args.warmup_epochs, start=args.lr / lr)
    position = Position()
    sums = Sums(device, "loss", "weight", confusion=(CLASSES, CLASSES))
    weights = torch.tensor(CLASS_WEIGHTS, device=device)
    best = Best()
    # A checkpoint holds the state of these objects, and the flags. Add your own.
    # dist: the model without its wrapper, so that any recipe can load it.
    state = {"model": model.module, "optimizer": optimizer}
    state |= {"position": position, "sums": sums, "best": best}
    config = vars(args) | {"saved_by": f"DDP, torchrun, world size {world_size}"}
    # dist: flags of the launch and of communication may differ in a run that goes on.
    may_differ = checkpoint.MAY_DIFFER | {"comm_hook", "local_rank", "powersgd_rank"}
    log_dir = Path(args.log_dir or new_folder(args.dataset))
    folder = Path(args.checkpoint_dir or log_dir)
    # dist: only rank 0 prints and writes; else all ranks write the same files at once.
    writes = not args.dry_run and rank == 0
    log = Log(log_dir if writes else None, "images", args.log_seconds, quiet=rank != 0)
    if writes:
        # Before the checkpoint is read: another job may be writing it.
        lease.hold(folder, log_dir)
    found = checkpoint.resume(
        args.resume,
        args.checkpoint_dir or args.log_dir,
        state,
        config,
        may_differ,
        # dist: to check that all ranks read the same file.
        all_reduce=dist.all_reduce,
    )
    if writes:
        # Refuses a folder that holds another run.
        checkpoint.claim(folder, log_dir, found)
    log.start(position, config, [*lines, *found.lines(position)])
    if position.finished(args.epochs, args.max_steps):
        log.say("nothing left to do: the run has had its --epochs or --max-steps")
    # dist: before it ends a rank that waits, the rank writes what it communicated last.
    recorder = flight_recorder.writer(args.log_dir, rank, world_size, device)
    watchdog = Watchdog(args.timeout, before_end=recorder)
    stop = StopSignal()

    def save(is_best=False):
        # It may take longer than a step. The next batch starts the watchdog again.
        watchdog.cancel()
        if writes:
            checkpoint.save(folder, state, config, is_best)

    while not position.finished(args.epochs, args.max_steps):
        # A new order each epoch; a resumed epoch goes on in the same order.
        train.sampler.set_epoch(position.epoch, position.samples)
        seed_step(args.seed, position, device, rank)
        model.train()
        steps_left = position.steps_left(args.epochs, args.max_steps, train.sampler)
        log.begin(position, steps_left, train.sampler.global_batch)
        batches = watchdog(train.loader)
        if args.profile and writes:
            batches = profiler.trace(batches, log_dir / f"trace-{position.steps}.json.gz")
        epoch_over = True
        for batch in batches:
            if position.evaluation_due(args.eval_every, args.max_steps):
                epoch_over = False
                break
            batch = to_device(batch, device)
            rates.set(position.epochs_done(train.sampler.length))
            optimizer.zero_grad()
            logits = model(normalise(batch["image"]))
            loss, weight = weighted_loss(logits, batch["mask"], weights)
            confusion = confusion_of(logits.detach(), batch["mask"])
            sums.add(loss=loss.detach(), weight=weight, confusion=confusion)
            # dist: a rank with few known pixels would count as much as one with many: divide by
            # the weight of all ranks. The average over the ranks divides by world_size, too.
            total_weight = weight.clone()
            dist.all_reduce(total_weight)
            (loss * world_size / total_weight).backward()
            optimizer.step()
            # Data order, rates and random state are functions of the seed and this position.
            position.advance(train.sampler.global_batch)
            # Until now there was nothing to save, and SIGTERM ended the run at once.
            stop.listen()
            # dist: each rank draws its own dropout.
            seed_step(args.seed, position, device, rank)
            save_due = position.multiple_of(args.checkpoint_every)
            if save_due or position.multiple_of(args.log_interval):
                # dist: also sums the flag: ranks that stop at different steps wait for each other.
                total = sums.total(dist.all_reduce, stop=stop.requested)
                require_finite(total["loss"])
                log.step(position, averages(total) | {"lr": rates.first})
                # SIGTERM or SIGUSR1 on any rank: all ranks stop after the same step.
                if total["stop"]:
                    break
                if save_due:
                    save()
            if args.dry_run:
                break
        log.end(position, watchdog.waited)
        # dist: over all ranks.
        total = sums.total(dist.all_reduce, stop=stop.requested)
        require_finite(total["loss"])
        # Before the evaluation, which may take long.
        save()
        if total["stop"]:
            log.stop(position, folder)
            # dist: torchrun --max-restarts starts the ranks again that were not told to stop.
            launch.restart_unless_told(stop)
            return
        train_result = averages(total)
        # dist: without the wrapper, as the shares of the ranks may differ in their batches.
        val_result = evaluate(args, model.module, val, device, watchdog)
        require_finite(val_result["loss"])
        position.end_interval(epoch_over)
        sums.reset()
        done = f"epoch {position.epochs_done(train.sampler.length):.4g}/{epochs:.4g}"
        line = f"{done}: {text(train_result)} | val {text(val_result)}"
        log.evaluation(position, line, train_result | {"lr": rates.first}, val_result)
        save(is_best=best.update(val_result["iou"]))
        if args.dry_run:
            break


def main():
    args = parse_args()
    # dist: torchrun sets both, for each machine.
    local_rank, local_world_size = launch.torchrun_env()
    # dist: one device per process.
    device = devices.pick(args.device, local_rank, local_world_size)
    devices.tune(device)
    if device.type != "cpu":
        # dist: first, or every rank opens a context on GPU 0.
        torch.accelerator.set_device_index(device.index)
    # dist: NCCL for CUDA, Gloo on a CPU.
    dist.init_process_group("gloo" if device.type == "cpu" else None, device_id=device.index)
    # dist: over all machines.
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    launch.check_world_size(world_size)
    train, val = load_data(args, device, rank, world_size)
    # dist: else machines with different files would train on them in silence.
    require_same((train.dataset, val.dataset), dist.all_reduce, device)
    torch.manual_seed(args.seed)
    model = Network(args.width).to(device)
    loaded = checkpoint.init_from(args.init_from, model, args.init_partial)
    if args.channels_last:
        devices.use_channels_last(model)
    if args.compile:
        devices.compile_model(model)
    # dist: the global batch is world_size times larger.
    lr = args.lr * schedule.lr_factor(args.scale_lr, world_size, args.global_batch_size)
    # The schedule multiplies the rate of each of its parameter groups.
    optimizer = torch.optim.SGD(
        model.parameters(), lr, args.momentum, weight_decay=args.weight_decay, fused=True
    )
    # dist: averages the gradients of all ranks in backward, while others are still computed.
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    # dist: do not send BatchNorm's statistics in every forward, as evaluate() does. It is set here
    # because torch 2.14 warns of the argument, and torch 2.11 lacks its successor.
    model.broadcast_buffers = False
    if args.comm_hook == "powersgd" and args.compile:
        # dist: torch's hook fails with a compiled model.
        raise InputError("--comm-hook powersgd: leave out --compile")
    # dist: with --comm-hook, gradients travel in fewer bytes.
    hooks.register(model, args.comm_hook, args.powersgd_rank)
    batch = f"batch {train.sampler.batch_size} per process, {train.sampler.global_batch} global"
    place = f"world size {world_size} | {devices.describe(device)}"
    setup = f"{args.dataset}: DDP, torchrun | {place} | {batch} | lr {lr:g}"
    fit(args, device, train, val, model, optimizer, lr, [setup, *loaded], rank, world_size)


if __name__ == "__main__":
    with launch.plain_exits():
        main()
        # dist: closes the connections; NCCL warns without it.
        dist.destroy_process_group()
