"""Contrastive learning as in SimCLR with DistributedDataParallel, started by torchrun.

    torchrun --nproc-per-node=2 examples/contrastive.py
    torchrun --nproc-per-node=2 examples/contrastive.py --data-dir photos --image-size 96
    python scripts/prove.py torchrun --nproc-per-node=2 examples/contrastive.py --device cpu

Read it beside mnist/ddp_launch.py. Training sees no labels. The k nearest neighbours in the
validation set show how well the features tell its classes apart.
"""

import argparse
import sys
from pathlib import Path

# So that Python finds the modules beside this file, and common/ beside its folder.
folder = Path(__file__).resolve().parent
sys.path += [str(folder), str(folder.parent)]

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from torchvision.transforms import v2

from common import devices, flags, graph, schedule
from common.data import DataObject, EpochSampler, Seeded, to_device
from common.errors import InputError
from common.metadata import Metadata
from common.metrics import Best, Sums, in_order
from common.position import Position, seed_step
from common.process import launch
from common.process.workers import data_loader
from common.ranks import fingerprint, require_same
from common.run import Run
from common.weights import init_from
from images import folders
from images.data import Normalise, generate

# The neighbours that vote for a class.
NEIGHBOURS = 20
normalise = Normalise(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))

# dist: send gradients in 16 bits: half the bytes.
COMM_HOOKS = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}


def parse_args():
    parser = flags.Parser(__doc__)
    parser.set_defaults(dataset="contrastive")
    add = parser.add_argument
    add("--data-dir", help="folder with train/ and val/, a folder of images per class in each")
    add(
        "--synthetic",
        type=flags.positive_int,
        default=960,
        metavar="IMAGES",
        help="images to generate if there is no --data-dir",
    )
    add("--image-size", type=flags.image_size, default=32, help="height and width in pixels")
    add("--width", type=flags.positive_int, default=16, help="channels of the model")
    add("--workers", type=flags.non_negative_int, default=1, help="loader workers per process")
    add("--epochs", type=flags.positive_int, default=4, help="passes over the training data")
    add("-b", "--batch-size", type=flags.positive_int, default=32, help="images per process")
    add(
        "-G",
        "--global-batch-size",
        type=flags.positive_int,
        help="images of all processes together; --lr is then the rate for them",
    )
    add("--test-batch-size", type=flags.positive_int, default=64, help="batch size of evaluation")
    add("--lr", type=flags.positive_float, default=0.004, help="learning rate of one process")
    add("--temperature", type=flags.positive_float, default=0.2, help="of the similarities")
    add(
        "--scale-lr",
        choices=("linear", "sqrt", "none"),
        default="sqrt",
        help="how --lr grows with the number of processes",
    )
    add("--warmup-epochs", type=flags.non_negative_float, default=1, help="epochs of a rising rate")
    add("--weight-decay", "--wd", type=flags.non_negative_float, default=0.01, help="weight decay")
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


class Views(Dataset):
    """`count` views of each image of `images`, a Dataset of (image, label), and the label."""

    def __init__(self, images, transform, count, classes):
        self.images = images
        self.transform = transform
        self.count = count
        self.classes = classes

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        """A list of `count` views, uint8 [3, size, size], and the label."""
        image, label = self.images[index]
        return [self.transform(image) for _ in range(self.count)], label

    def fingerprint(self):
        """What the ranks compare."""
        return fingerprint(self.images)


def load(args):
    """Return a dataset for training and one for validation; raises InputError."""
    size = args.image_size
    if args.data_dir:
        train_images, val_images = folders.find(args.data_dir)
        classes = train_images.classes
    else:
        train_images, val_images = generate(args.synthetic, channels=3, size=size, seed=args.seed)
        classes = [str(number) for number in range(10)]
    # For photos add v2.ColorJitter and v2.RandomGrayscale: else their colours tell them apart.
    crop = [v2.ToImage(), v2.RandomResizedCrop(size, scale=(0.3, 1)), v2.RandomHorizontalFlip()]
    whole = [v2.ToImage(), v2.Resize(size), v2.CenterCrop(size)]
    train_set = Views(train_images, v2.Compose([*crop, v2.ToPureTensor()]), 2, classes)
    val_set = Views(val_images, v2.Compose([*whole, v2.ToPureTensor()]), 1, classes)
    return train_set, val_set


class Network(nn.Module):
    """Images [batch, 3, height, width] to embeddings [batch, 64] of length 1.

    What it has learned are its `features`; the layers behind them are for the loss alone. It has
    GroupNorm: unlike BatchNorm, it computes the same on any number of processes.
    """

    def __init__(self, width):
        super().__init__()
        if width % 4:
            raise InputError(f"--width {width}: give a multiple of 4, the groups of GroupNorm")
        self.features = nn.Sequential(
            *block(3, width),
            *block(width, 2 * width),
            *block(2 * width, 4 * width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Sequential(
            nn.Linear(4 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 64)
        )

    def forward(self, images):
        return F.normalize(self.head(self.features(images)))


def block(inputs, outputs):
    """A 3x3 convolution that halves height and width."""
    return (
        nn.Conv2d(inputs, outputs, kernel_size=3, stride=2, padding=1),
        nn.GroupNorm(4, outputs),
        nn.ReLU(),
    )


def gather(embeddings, rank, world_size):
    """The embeddings [2, batch, d] of all ranks: [2, world_size * batch, d].

    Gradients flow into those of this rank alone.
    """
    parts = [torch.empty_like(embeddings) for _ in range(world_size)]
    # dist: copies of what the other ranks have computed, without their graphs.
    dist.all_gather(parts, embeddings.detach())
    parts[rank] = embeddings
    return torch.cat(parts, dim=1)


def nt_xent(embeddings, temperature):
    """The mean NT-Xent loss (nats) of two views of each image, [2, images, d], of length 1.

    To which of all other views does a view belong? (Chen et al. 2020, arXiv:2002.05709)
    """
    views = embeddings.flatten(0, 1)
    logits = views @ views.T / temperature
    # Not to itself.
    logits.fill_diagonal_(-torch.inf)
    places = torch.arange(len(views), device=views.device)
    return F.cross_entropy(logits, places.roll(len(views) // 2))


def knn_accuracy(features, labels):
    """The share of samples whose nearest others, by cosine, mostly have their label.

    Features [samples, d], labels [samples]. It compares all pairs at once: 10,000 samples take
    400 MB.
    """
    features = F.normalize(features)
    similarity = features @ features.T
    # Its own neighbours are other samples.
    similarity.fill_diagonal_(-torch.inf)
    nearest = similarity.topk(NEIGHBOURS).indices
    votes = labels[nearest].mode(dim=1).values
    return (votes == labels).float().mean().item()


def load_data(args, device, rank, world_size):
    """Return a DataObject for training and one for validation."""
    train_set, val_set = load(args)
    # dist: each rank needs one.
    enough = max(NEIGHBOURS + 1, world_size)
    if len(val_set) < enough:
        raise InputError(f"{len(val_set)} images are too few for validation: give {enough}")
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
    """The mean loss (nats)."""
    return {"loss": total["loss"] / total["images"]}


def make_step(args, model, optimizer, sums, rank, world_size):
    """Return the function that trains on a batch: all that the device does in a step."""

    def step(first, second):
        optimizer.zero_grad()
        # One call of the wrapper for both views.
        embeddings = model(normalise(torch.cat((first, second)))).unflatten(0, (2, -1))
        # dist: an image is told apart from those of all ranks; else from fewer ones.
        loss = nt_xent(gather(embeddings, rank, world_size), args.temperature)
        # dist: all ranks compute the same loss, and each the gradient of its own embeddings. The
        # whole gradient is the sum of these, and the wrapper takes their average.
        (loss * world_size).backward()
        optimizer.step()
        sums.add(loss=loss.detach() * len(first))

    return step


@torch.inference_mode()
def evaluate(args, model, val, device, watchdog):
    """Return the kNN accuracy of the whole validation set."""
    # dist: BatchNorm's statistics differ between ranks: evaluate with rank 0's, which are saved.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    features = []
    labels = []
    for batch in watchdog.watch(val.loader):
        (images,), own_labels = to_device(batch, device)
        features.append(model.features(normalise(images)))
        labels.append(own_labels)
        if args.dry_run:
            break
    # dist: those of all ranks: a sample's neighbours may be on any of them.
    count = len(val.dataset)
    features = in_order(torch.cat(features), val.sampler, count, dist.all_reduce)
    labels = in_order(torch.cat(labels), val.sampler, count, dist.all_reduce)
    return {"accuracy": knn_accuracy(features, labels)}


def train_to_evaluation(args, run, train, step, sums, rates, device, rank):
    """Train up to the next evaluation, or until a signal asks to stop; return the averages."""
    position = run.position
    # A new order in each epoch; a run that resumes within an epoch has the same order there.
    train.sampler.set_epoch(position.epoch, position.samples, position.steps_to_evaluation)
    for batch in run.batches(train.loader):
        (first, second), _ = to_device(batch, device)
        # Data, rates and random numbers depend on seed and position: a resume repeats them.
        rates.set(position)
        # dist: each rank draws its own dropout.
        seed_step(args.seed, position, device, rank)
        step(first, second)
        # Python counts this; the step is only what the device does.
        sums.add(images=len(first))
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


def build(args, metadata, device, world_size):
    """Return the model, its optimizer, and lines for the log."""
    model = Network(args.width).to(device)
    lines = init_from(args, model, metadata)
    if args.channels_last:
        devices.use_channels_last(model)
    if args.compile:
        devices.compile_model(model)
    # dist: the global batch is world_size times larger.
    factor = schedule.lr_factor(args.scale_lr, world_size, args.global_batch_size)
    peak_lr = args.lr * factor
    optimizer = torch.optim.AdamW(
        model.parameters(), peak_lr, weight_decay=args.weight_decay, fused=True
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
    metadata = Metadata(classes=train.dataset.classes, mean=normalise.mean, std=normalise.std)
    model, optimizer, lines = build(args, metadata, device, world_size)
    if args.data_dir:
        lines += folders.origin(train.dataset.images, val.dataset.images)
    position = Position(train.sampler, args.epochs, args.max_steps, args.eval_every)
    # From --lr up to the rate of each parameter group, and then down to 0.
    rates = schedule.WarmupCosine(optimizer, args.warmup_epochs, args.lr)
    lines += rates.warn_if_short(position)
    sums = Sums(device, "loss", "images")
    step = make_step(args, model, optimizer, sums, rank, world_size)
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
        "metadata": metadata,
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
        line = f"loss {train_result['loss']:.4f} | val kNN acc {val_result['accuracy']:.2%}"
        run.log.evaluation(line, train_result | {"lr": rates.current}, val_result)
        is_best = best.update(val_result["accuracy"])
        run.save(is_best)
        if args.dry_run:
            break


if __name__ == "__main__":
    with launch.plain_exits():
        main()
        # dist: closes the connections; NCCL warns without it.
        dist.destroy_process_group()
