"""Contrastive learning as in SimCLR with DistributedDataParallel, started by torchrun.

    torchrun --nproc-per-node=2 examples/contrastive.py
    torchrun --nproc-per-node=2 examples/contrastive.py --data-dir photos --image-size 96
    python scripts/prove.py torchrun --nproc-per-node=2 examples/contrastive.py --device cpu

Read it beside mnist/ddp_launch.py. Training uses no labels. The accuracy of k nearest
neighbours in the validation set shows how well the features separate its classes.
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

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from torchvision.transforms import v2

from common import devices, flags, graph, schedule
from common.data import DataObject, EpochSampler, Seeded
from common.errors import InputError
from common.metadata import Metadata
from common.metrics import Sums, in_order
from common.process import launch
from common.process.workers import data_loader
from common.ranks import World, require_same
from common.run import Run
from common.weights import init_from
from images import folders
from images.data import Normalise, generate

# How many neighbours vote for a class.
NEIGHBOURS = 20
normalise = Normalise(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def parse_args():
    parser = flags.Parser(__doc__, task="contrastive")
    parser.set_defaults(forms={"accuracy": "acc {:.2%}"})
    add = parser.add_argument
    add(
        "--synthetic",
        type=flags.positive_int,
        default=960,
        metavar="IMAGES",
        help="images to generate if there is no --data-dir",
    )
    add("--image-size", type=flags.image_size, default=32, help="height and width in pixels")
    add("--width", type=flags.positive_int, default=16, help="channels of the model")
    add("--temperature", type=flags.positive_float, default=0.2, help="of the similarities")
    add = parser.add_run_group()
    add("--data-dir", help="folder with train/ and val/, a folder of images per class in each")
    add("--workers", type=flags.non_negative_int, default=1, help="loader workers per process")
    add("--channels-last", action="store_true", help="keep images and weights in NHWC order")
    flags.add_training_flags(
        parser,
        epochs=4,
        batch_size=32,
        lr=0.004,
        test_batch_size=64,
        momentum=None,
        weight_decay=0.01,
        scale_lr="sqrt",
    )
    graph.add_flag(parser)
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


def load(args):
    """Return a dataset for training and one for validation; raises InputError."""
    size = args.image_size
    if args.data_dir:
        train_images, val_images = folders.find(args.data_dir)
        classes = train_images.classes
    else:
        train_images, val_images = generate(args.synthetic, channels=3, size=size, seed=args.seed)
        classes = [str(number) for number in range(10)]
    # For photos add v2.ColorJitter and v2.RandomGrayscale: else colours alone tell them apart.
    crop = [v2.ToImage(), v2.RandomResizedCrop(size, scale=(0.3, 1)), v2.RandomHorizontalFlip()]
    whole = [v2.ToImage(), v2.Resize(size), v2.CenterCrop(size)]
    train_set = Views(train_images, v2.Compose([*crop, v2.ToPureTensor()]), 2, classes)
    val_set = Views(val_images, v2.Compose([*whole, v2.ToPureTensor()]), 1, classes)
    return train_set, val_set


class Network(nn.Module):
    """Images [batch, 3, height, width] to embeddings [batch, 64] of length 1.

    Keep its `features`; the layers behind them are only for the loss. GroupNorm, unlike BatchNorm,
    computes the same on any number of processes.
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


def gather(embeddings, world):
    """The embeddings [2, batch, d] of all ranks: [2, world.size * batch, d].

    Gradients flow only into this rank's own.
    """
    parts = [torch.empty_like(embeddings) for _ in range(world.size)]
    # dist: the embeddings of the other ranks, as copies without gradients.
    dist.all_gather(parts, embeddings.detach())
    parts[world.rank] = embeddings
    return torch.cat(parts, dim=1)


def nt_xent(embeddings, temperature):
    """The mean NT-Xent loss (nats) of two views of each image, [2, images, d], of length 1.

    It classifies which other view is of the same image (Chen et al. 2020, arXiv:2002.05709).
    """
    views = embeddings.flatten(0, 1)
    logits = views @ views.T / temperature
    # No sample is compared with itself.
    logits.fill_diagonal_(-torch.inf)
    places = torch.arange(len(views), device=views.device)
    return F.cross_entropy(logits, places.roll(len(views) // 2))


def knn_accuracy(features, labels):
    """The share of samples whose nearest neighbours, by cosine, mostly have the same label.

    Features [samples, d], labels [samples]. It compares all pairs at once: 10,000 samples take
    400 MB.
    """
    features = F.normalize(features)
    similarity = features @ features.T
    # No sample is its own neighbour.
    similarity.fill_diagonal_(-torch.inf)
    nearest = similarity.topk(NEIGHBOURS).indices
    votes = labels[nearest].mode(dim=1).values
    return (votes == labels).float().mean().item()


def load_data(args, world):
    """Return a DataObject for training and one for validation."""
    train_set, val_set = load(args)
    # dist: each rank needs at least one.
    enough = max(NEIGHBOURS + 1, world.size)
    if len(val_set) < enough:
        raise InputError(f"{len(val_set)} images are too few for validation: give {enough}")
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


def averages(loss, images):
    """The mean loss (nats)."""
    return {"loss": loss / images}


@torch.inference_mode()
def evaluate(model, val, run):
    """Return the kNN accuracy of the whole validation set."""
    # dist: BatchNorm's statistics differ between ranks: evaluate with rank 0's, as saved.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    features = []
    labels = []
    for (images,), own_labels in run.batches(val.loader):
        features.append(model.features(normalise(images)))
        labels.append(own_labels)
    # dist: over all ranks: a sample's neighbours may be on any of them.
    count = len(val.dataset)
    features = in_order(torch.cat(features), val.sampler, count, dist.all_reduce)
    labels = in_order(torch.cat(labels), val.sampler, count, dist.all_reduce)
    return {"accuracy": knn_accuracy(features, labels)}


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
    require_same(world, train.dataset.images, val.dataset.images)
    torch.manual_seed(args.seed)
    metadata = Metadata(classes=train.dataset.classes, mean=normalise.mean, std=normalise.std)
    model = Network(args.width).to(world.device)
    init_from(args, model, metadata, world)
    devices.adapt(model, args)  # --channels-last, --compile
    # dist: the global batch is world.size times larger, and the rate grows with it.
    lr = schedule.peak_lr(args, world.size)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr, weight_decay=args.weight_decay, fused=True
    )
    # dist: averages gradients over all ranks while backward still computes others.
    # It also copies rank 0's weights to all ranks.
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    # dist: evaluate() broadcasts BatchNorm's statistics, so forward need not. As an attribute:
    # torch 2.14 deprecates the argument, and older versions lack its replacement.
    ddp_model.broadcast_buffers = False
    rates = schedule.WarmupCosine(args.warmup_epochs, optimizer)
    # step() adds to them; run.steps() logs them over all ranks, and run.record() resets them.
    sums = Sums(world.device, averages)
    # A checkpoint holds the state of these objects, and the flags. Add your own.
    # dist: the model without its wrapper, so that any recipe can load it.
    state = {"model": model, "optimizer": optimizer, "metadata": metadata}
    # Locks the folder of the run, and loads the checkpoint of --resume into `state`.
    run = Run(args, world, state, sums, rates, train)
    if args.data_dir:
        world.say(*folders.origin(train.dataset.images, val.dataset.images))

    def step(first, second):
        optimizer.zero_grad()
        # One forward for both views.
        # dist: through the wrapper; else no gradient is averaged.
        embeddings = ddp_model(normalise(torch.cat((first, second)))).unflatten(0, (2, -1))
        # dist: contrast an image with those of all ranks; else there are fewer negatives.
        loss = nt_xent(gather(embeddings, world), args.temperature)
        # dist: all ranks compute the same loss, and each the gradient of its own embeddings. The
        # full gradient is their sum, but the wrapper takes their average.
        (loss * world.size).backward()
        optimizer.step()
        sums.add(loss=loss.detach() * len(first), images=len(first))

    if args.cuda_graph:
        step = graph.Captured(step, world, optimizer)
    # Until --epochs or --max-steps are done, a signal comes, or --dry-run has tried one step.
    while not run.over:
        model.train()
        # Yields batches up to the next evaluation, then saves. Data order, rate and random numbers
        # depend only on seed, position and rank, so a resumed run repeats them.
        for (first, second), _ in run.steps(train):
            step(first, second)
        # After SIGTERM or SIGUSR1 the run is over, and has been saved.
        if not run.over:
            # dist: without the wrapper: there are no gradients to average.
            result = evaluate(model, val, run)
            run.record(result, best=result["accuracy"])


if __name__ == "__main__":
    with launch.plain_exits():
        main()
        # dist: closes the connections; NCCL warns without it.
        dist.destroy_process_group()
