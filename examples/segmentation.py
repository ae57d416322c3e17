"""Semantic segmentation with DistributedDataParallel, started by torchrun.

    torchrun --nproc-per-node=2 examples/segmentation.py
    torchrun --nproc-per-node=2 examples/segmentation.py --synthetic 2000 --workers 2
    python scripts/prove.py torchrun --nproc-per-node=2 examples/segmentation.py --device cpu

Read it beside mnist/ddp_launch.py.
"""

import sys
from importlib import import_module
from pathlib import Path

# Import common/ and images/ from this folder or the one above it, and from nowhere else.
folder = Path(__file__).resolve().parent
sys.path[1:1] = [str(folder), str(folder.parent)]
for package in ("common", "images"):
    import_module(package)
# Then take the folder above off the path: a queue.py there would hide Python's own.
del sys.path[2]

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from common import devices, flags, graph, schedule
from common.data import DataObject, EpochSampler, Seeded
from common.errors import InputError
from common.metadata import Metadata
from common.metrics import Sums
from common.process import launch
from common.process.workers import data_loader
from common.ranks import World, require_same
from common.run import Run
from common.weights import init_from
from images.data import Normalise

NAMES = ["background", "disc", "square"]
CLASSES = len(NAMES)
# Pixels of this class are ignored in the loss and the metrics.
IGNORED = 255
# Most pixels are background.
CLASS_WEIGHTS = (0.2, 1.0, 1.0)
normalise = Normalise(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
METADATA = Metadata(classes=NAMES, mean=normalise.mean, std=normalise.std)


def parse_args():
    parser = flags.Parser(__doc__, task="segmentation")
    add = parser.add_argument
    add("--synthetic", type=flags.positive_int, default=1000, help="images to generate")
    add("--image-size", type=flags.image_size, default=64, help="height and width in pixels")
    add("--width", type=flags.positive_int, default=16, help="channels of the model")
    add = parser.add_run_group()
    add("--workers", type=flags.non_negative_int, default=1, help="loader workers per process")
    add("--channels-last", action="store_true", help="keep images and weights in NHWC order")
    flags.add_training_flags(parser, epochs=5, batch_size=16, lr=0.05, test_batch_size=64)
    graph.add_flag(parser)
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
            # Pixels at an edge are ambiguous.
            mask[abs(distance - radius) < 1] = IGNORED
        image = torch.from_numpy(image.clip(0, 255).astype(np.uint8))
        mask = torch.from_numpy(mask)
        if self.train:
            image, mask = augment(image, mask)
        return {"image": image, "mask": mask}


def augment(image, mask):
    """Mirror and shift image and mask alike; pixels shifted in from outside are ignored."""
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

    GroupNorm, unlike BatchNorm, computes the same on any number of processes.
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
    """Pixel counts [C, C] by true class (row) and predicted class (column)."""
    known = mask != IGNORED
    pair = mask.where(known, 0) * CLASSES + logits.argmax(1)
    # Not torch.bincount or mask[known], which sync with the GPU. float32 cannot count above 2**24.
    counts = torch.zeros(CLASSES**2, dtype=torch.int64, device=mask.device)
    counts.index_add_(0, pair.flatten(), known.flatten().to(counts.dtype))
    return counts.view(CLASSES, CLASSES)


def load_data(args, world):
    """Return a DataObject for training and one for validation."""
    train_set = Shapes(args.synthetic, args.image_size, args.seed, train=True)
    val_set = Shapes(max(1, args.synthetic // 5), args.image_size, args.seed + 1, train=False)
    # dist: --global-batch-size is split over all ranks.
    batch_size = schedule.batch_size(args, world.size)
    # dist: each rank has its own share of a global batch; else all compute the same gradients.
    train_sampler = EpochSampler(len(train_set), batch_size, world.rank, world.size, seed=args.seed)
    # dist: each image once; torch's DistributedSampler repeats some, which count twice.
    val_sampler = range(world.rank, len(val_set), world.size)
    options = {"workers": args.workers, "pin_memory": world.device.type != "cpu"}
    # New augmentation in each epoch, which depends only on seed, epoch and index.
    seeded = Seeded(train_set, train_sampler)
    train_loader = data_loader(seeded, train_sampler, batch_size, **options)
    val_loader = data_loader(val_set, val_sampler, args.test_batch_size, **options)
    train = DataObject(train_set, train_sampler, train_loader)
    return train, DataObject(val_set, val_sampler, val_loader)


def averages(loss, weight, confusion):
    """The loss (nats per weight) and the mean IoU of the classes, from the sums of all ranks."""
    both = confusion.diagonal()
    either = confusion.sum(dim=0) + confusion.sum(dim=1) - both
    # A class that does not occur, and is never predicted, has no IoU.
    there = either > 0
    iou = (both / either)[there].sum().item() / max(1, there.sum().item())
    # Without a known pixel the loss is 0, and so is its weight.
    return {"loss": loss / (weight or 1), "iou": iou}


@torch.inference_mode()
def evaluate(model, val, run):
    """Return the averages over the whole validation set, each image once."""
    # dist: BatchNorm's statistics differ between ranks: evaluate with rank 0's, as saved.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    sums = Sums(run.world.device, averages, confusion=(CLASSES, CLASSES))
    weights = torch.tensor(CLASS_WEIGHTS, device=run.world.device)
    for batch in run.batches(val.loader):
        logits = model(normalise(batch["image"]))
        loss, weight = weighted_loss(logits, batch["mask"], weights)
        sums.add(loss=loss, weight=weight, confusion=confusion_of(logits, batch["mask"]))
    # dist: each rank evaluated only its share: sum over all, then divide once.
    return sums.result(dist.all_reduce)


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


def main():
    args = parse_args()
    world = connect(args)
    train, val = load_data(args, world)
    # dist: else machines with different files would silently train on them.
    require_same(world, train.dataset, val.dataset)
    torch.manual_seed(args.seed)
    model = Network(args.width).to(world.device)
    init_from(args, model, METADATA, world)
    devices.adapt(model, args)  # --channels-last, --compile
    # dist: the global batch is world.size times larger, and the rate grows with it.
    lr = schedule.peak_lr(args, world.size)
    optimizer = torch.optim.SGD(
        model.parameters(), lr, args.momentum, weight_decay=args.weight_decay, fused=True
    )
    # dist: averages gradients over all ranks while backward still computes others.
    # It also copies rank 0's weights to all ranks.
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    # dist: evaluate() broadcasts BatchNorm's statistics, so forward need not. As an attribute:
    # torch 2.14 deprecates the argument, and older versions lack its replacement.
    ddp_model.broadcast_buffers = False
    rates = schedule.WarmupCosine(args.warmup_epochs, optimizer)
    sums = Sums(world.device, averages, confusion=(CLASSES, CLASSES))
    # A checkpoint holds the state of these objects, and the flags. Add your own.
    # dist: the model without its wrapper, so that any recipe can load it.
    state = {"model": model, "optimizer": optimizer, "metadata": METADATA}
    # Locks the folder of the run, and loads the checkpoint of --resume into `state`.
    run = Run(args, world, state, sums, rates, train)
    weights = torch.tensor(CLASS_WEIGHTS, device=world.device)

    def step(images, masks):
        optimizer.zero_grad()
        # dist: through the wrapper; else no gradient is averaged.
        logits = ddp_model(normalise(images))
        loss, weight = weighted_loss(logits, masks, weights)
        # dist: else a rank with few known pixels counts as much as one with many: divide by the
        # weight of all ranks. DDP's average divides by world.size, so multiply by it.
        total_weight = weight.clone()
        dist.all_reduce(total_weight)
        # Without a known pixel the loss is 0, and so is its weight.
        (loss * world.size / total_weight.clamp_min(1e-9)).backward()
        optimizer.step()
        confusion = confusion_of(logits.detach(), masks)
        sums.add(loss=loss.detach(), weight=weight, confusion=confusion)

    if args.cuda_graph:
        step = graph.Captured(step, world, optimizer)
    # Until --epochs or --max-steps are done, a signal comes, or --dry-run has tried one step.
    while not run.over:
        model.train()
        # Yields batches up to the next evaluation, then saves. Data order, rate and random numbers
        # depend only on seed, position and rank, so a resumed run repeats them.
        for batch in run.steps(train):
            step(batch["image"], batch["mask"])
        # After SIGTERM or SIGUSR1 the run is over, and has been saved.
        if not run.over:
            # dist: without the wrapper: there are no gradients to average.
            result = evaluate(model, val, run)
            run.record(result, best=result["iou"])


if __name__ == "__main__":
    with launch.plain_exits():
        main()
        # dist: closes the connections; NCCL warns without it.
        dist.destroy_process_group()
