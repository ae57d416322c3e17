"""Semantic segmentation with DistributedDataParallel, started by torchrun.

    torchrun --nproc-per-node=2 examples/segmentation.py
    torchrun --nproc-per-node=2 examples/segmentation.py --synthetic 2000 --workers 2
    python scripts/prove.py torchrun --nproc-per-node=2 examples/segmentation.py --device cpu

Read it beside mnist/ddp_launch.py.
"""

import argparse
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
from torch.utils.data import Dataset

from common import devices, flags, graph, schedule
from common.data import DataObject, EpochSampler, Seeded, to_device
from common.errors import InputError
from common.metadata import Metadata
from common.metrics import Best, Sums
from common.position import Position, seed_step
from common.process import launch
from common.process.workers import data_loader
from common.ranks import require_same
from common.run import Run
from common.weights import init_from
from images.data import Normalise

NAMES = ["background", "disc", "square"]
CLASSES = len(NAMES)
# Pixels of this class count in no loss and no metric.
IGNORED = 255
# Most pixels are background.
CLASS_WEIGHTS = (0.2, 1.0, 1.0)
normalise = Normalise(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
METADATA = Metadata(classes=NAMES, mean=normalise.mean, std=normalise.std)

# dist: send gradients in 16 bits: half the bytes.
COMM_HOOKS = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}


def parse_args():
    parser = flags.Parser(__doc__)
    parser.set_defaults(dataset="segmentation")
    add = parser.add_argument
    add("--synthetic", type=flags.positive_int, default=1000, help="images to generate")
    add("--image-size", type=flags.image_size, default=64, help="height and width in pixels")
    add("--workers", type=flags.non_negative_int, default=1, help="loader workers per process")
    add("--width", type=flags.positive_int, default=16, help="channels of the model")
    add("--epochs", type=flags.positive_int, default=5, help="passes over the training data")
    add("-b", "--batch-size", type=flags.positive_int, default=16, help="images per process")
    add(
        "-G",
        "--global-batch-size",
        type=flags.positive_int,
        help="images of all processes together; --lr is then the rate for them",
    )
    add("--test-batch-size", type=flags.positive_int, default=64, help="batch size of evaluation")
    add("--lr", type=flags.positive_float, default=0.05, help="learning rate of one process")
    add(
        "--scale-lr",
        choices=("linear", "sqrt", "none"),
        default="linear",
        help="how --lr grows with the number of processes",
    )
    add("--warmup-epochs", type=flags.non_negative_float, default=1, help="epochs of a rising rate")
    add("--momentum", type=flags.fraction, default=0.9, help="momentum of SGD")
    add("--weight-decay", "--wd", type=flags.non_negative_float, default=0, help="weight decay")
    add("--channels-last", action="store_true", help="keep images and weights in NHWC order")
    add("--compile", action="store_true", help="compile the model with torch.compile")
    add("--cuda-graph", action="store_true", help="run each step as one CUDA graph: one launch")
    add("--seed", type=flags.seed, default=0, help="seed of weights, order of data, and dropout")
    # dist: for slow links.
    add("--comm-hook", choices=COMM_HOOKS, help="send gradients in 16 bits")
    # dist: torch.distributed.launch passes it.
    add("--local-rank", type=int, help=argparse.SUPPRESS)
    flags.add_run_flags(parser)
    return parser.parse_args()


class Shapes(Dataset):
    """A sample is {"image": uint8 [3, size, size], "mask": int64 [size, size]}.

    Here it is generated: a disc and a square on noise. Read your own files in `__getitem__`, an
    image with open_image() of images/decode.py.
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
        if width % 4:
            raise InputError(f"--width {width}: give a multiple of 4, the groups of GroupNorm")
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
    # torch.bincount and mask[known] would wait for the GPU. float32 cannot count above 2**24.
    counts = torch.zeros(CLASSES**2, dtype=torch.int64, device=mask.device)
    counts.index_add_(0, pair.flatten(), known.flatten().to(counts.dtype))
    return counts.view(CLASSES, CLASSES)


def load_data(args, device, rank, world_size):
    """Return a DataObject for training and one for validation."""
    train_set = Shapes(args.synthetic, args.image_size, args.seed, train=True)
    val_set = Shapes(max(1, args.synthetic // 5), args.image_size, args.seed + 1, train=False)
    # dist: all ranks share --global-batch-size.
    batch_size = schedule.per_process(args.batch_size, args.global_batch_size, world_size)
    # dist: each rank has its own share of a global batch; else all compute the same gradients.
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
    there = either > 0
    iou = (both / either)[there].sum().item() / max(1, there.sum().item())
    # Without a known pixel the loss is 0, and so is the weight.
    return {"loss": total["loss"] / (total["weight"] or 1), "iou": iou}


def text(result):
    return f"loss {result['loss']:.4f} mean IoU {result['iou']:.2%}"


def make_step(model, optimizer, sums, device, world_size):
    """Return the function that trains on a batch: all that the device does in a step."""
    weights = torch.tensor(CLASS_WEIGHTS, device=device)

    def step(images, masks):
        optimizer.zero_grad()
        logits = model(normalise(images))
        loss, weight = weighted_loss(logits, masks, weights)
        # dist: a rank with few known pixels would count as much as one with many: divide by the
        # weight of all ranks. The average over the ranks divides by world_size, too.
        total_weight = weight.clone()
        dist.all_reduce(total_weight)
        # Without a known pixel the loss is 0, and so is the weight.
        (loss * world_size / total_weight.clamp_min(1e-9)).backward()
        optimizer.step()
        confusion = confusion_of(logits.detach(), masks)
        sums.add(loss=loss.detach(), weight=weight, confusion=confusion)

    return step


@torch.inference_mode()
def evaluate(args, model, val, device, watchdog):
    """Return the averages over the whole validation set, each sample once."""
    # dist: BatchNorm's statistics differ between ranks: evaluate with rank 0's, which are saved.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    sums = Sums(device, "loss", "weight", confusion=(CLASSES, CLASSES))
    weights = torch.tensor(CLASS_WEIGHTS, device=device)
    for batch in watchdog.watch(val.loader):
        batch = to_device(batch, device)
        logits = model(normalise(batch["image"]))
        loss, weight = weighted_loss(logits, batch["mask"], weights)
        sums.add(loss=loss, weight=weight, confusion=confusion_of(logits, batch["mask"]))
        if args.dry_run:
            break
    # dist: each rank evaluated only its share: sum over all, then divide once.
    return averages(sums.total(dist.all_reduce))


def train_to_evaluation(args, run, train, step, sums, rates, device, rank):
    """Train up to the next evaluation, or until a signal asks to stop; return the averages."""
    position = run.position
    # A new order in each epoch; a run that resumes within an epoch has the same order there.
    train.sampler.set_epoch(position.epoch, position.samples, position.steps_to_evaluation)
    for batch in run.batches(train.loader):
        batch = to_device(batch, device)
        # Data, rates and random numbers depend on seed and position: a resume repeats them.
        rates.set(position)
        # dist: each rank draws its own dropout.
        seed_step(args.seed, position, device, rank)
        step(batch["image"], batch["mask"])
        position.advance()
        if run.check_due():
            # dist: over all ranks. The same message says whether one of them got SIGTERM or USR1.
            figures = averages(sums.total(run.stop.carried_by(dist.all_reduce)))
            run.log.step(figures | {"lr": rates.current})
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


def build(args, device, world_size):
    """Return the model, its optimizer, and lines for the log."""
    model = Network(args.width).to(device)
    lines = init_from(args, model, METADATA)
    if args.channels_last:
        devices.use_channels_last(model)
    if args.compile:
        devices.compile_model(model)
    # dist: the global batch is world_size times larger.
    factor = schedule.lr_factor(args.scale_lr, world_size, args.global_batch_size)
    peak_lr = args.lr * factor
    optimizer = torch.optim.SGD(
        model.parameters(), peak_lr, args.momentum, weight_decay=args.weight_decay, fused=True
    )
    # dist: averages the gradients of all ranks in backward, while it still computes others.
    # It also copies rank 0's weights to all ranks.
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    # dist: do not send BatchNorm's statistics in every forward, as evaluate() does. It is set here
    # because torch 2.14 warns of the argument, and older ones lack its successor.
    model.broadcast_buffers = False
    if args.comm_hook:
        # dist: gradients travel in fewer bytes.
        model.register_comm_hook(None, COMM_HOOKS[args.comm_hook])
    return model, optimizer, lines


def main():
    args = parse_args()
    device, rank, world_size = connect(args)
    train, val = load_data(args, device, rank, world_size)
    # dist: else machines with different files would train on them in silence.
    require_same((train.dataset, val.dataset), dist.all_reduce, device)
    torch.manual_seed(args.seed)
    model, optimizer, lines = build(args, device, world_size)
    position = Position(train.sampler, args.epochs, args.max_steps, args.eval_every)
    # From --lr up to the rate of each parameter group, and then down to 0.
    rates = schedule.WarmupCosine(optimizer, args.warmup_epochs, args.lr)
    lines += rates.warn_if_short(position)
    sums = Sums(device, "loss", "weight", confusion=(CLASSES, CLASSES))
    step = make_step(model, optimizer, sums, device, world_size)
    best = Best()
    # A checkpoint holds the state of these objects, and the flags. Add your own.
    state = {
        # dist: without its wrapper, so that any recipe can load it.
        "model": model.module,
        "optimizer": optimizer,
        "position": position,
        "sums": sums,
        "best": best,
        # So that whoever gets the checkpoint knows what its outputs mean.
        "metadata": METADATA,
    }
    # Holds the folder of the run, and loads the checkpoint of --resume into `state`.
    run = Run(
        args,
        state,
        device,
        strategy="DDP, torchrun",
        lr=rates.peak,
        unit="images",
        lines=lines,
        # dist: only rank 0 prints and writes; else all ranks write the same files at once.
        rank=rank,
        world_size=world_size,
        # dist: all ranks go on from the same checkpoint, and wait until rank 0 has saved one.
        all_reduce=dist.all_reduce,
    )
    if args.cuda_graph:
        # One launch per step, as a small model lets the GPU wait for Python.
        step = graph.Captured(step, device, optimizer, say=run.log.say)
    while not position.over:
        model.train()
        train_result = train_to_evaluation(args, run, train, step, sums, rates, device, rank)
        # Before the evaluation, which may take long.
        run.save()
        if run.stop.agreed:
            run.leave()
            break
        # dist: without the wrapper, as a rank may have fewer batches than another.
        val_result = evaluate(args, model.module, val, device, run.watchdog)
        # If the epoch is over, the next one begins.
        position.record_evaluation()
        sums.reset()
        line = f"{text(train_result)} | val {text(val_result)}"
        run.log.evaluation(line, train_result | {"lr": rates.current}, val_result)
        is_best = best.update(val_result["iou"])
        run.save(is_best)
        if args.dry_run:
            break


if __name__ == "__main__":
    with launch.plain_exits():
        main()
        # dist: closes the connections; NCCL warns without it.
        dist.destroy_process_group()
