"""Fine-tune a pretrained ResNet with DistributedDataParallel, started by torchrun.

    torchrun --nproc-per-node=2 examples/finetune.py
    wget -O resnet18.pth https://download.pytorch.org/models/resnet18-f37072fd.pth
    torchrun --nproc-per-node=2 examples/finetune.py --init-from resnet18.pth --init-partial
    python scripts/prove.py torchrun --nproc-per-node=2 examples/finetune.py --device cpu

Read it beside mnist/ddp_launch.py. --init-partial skips the weights of the last layer, whose
classes differ. Without --init-from the weights are random, and without --data-dir the images.
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
from torchvision.models import resnet18
from torchvision.transforms import v2

from common import devices, flags, graph, schedule
from common.data import DataObject, EpochSampler, Seeded
from common.metadata import Metadata
from common.metrics import Sums
from common.process import launch
from common.process.workers import data_loader
from common.ranks import World, require_same
from common.run import Run
from common.weights import init_from
from images import folders
from images.data import Normalise, generate

# As in pretraining on ImageNet.
normalise = Normalise(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def parse_args():
    parser = flags.Parser(__doc__, task="finetune")
    parser.set_defaults(forms={"accuracy": "acc {:.2%}"})
    add = parser.add_argument
    add(
        "--synthetic",
        type=flags.positive_int,
        default=640,
        metavar="IMAGES",
        help="images to generate if there is no --data-dir",
    )
    add("--image-size", type=flags.image_size, default=64, help="height and width in pixels")
    add(
        "--head-lr", type=flags.positive_float, default=0.02, help="learning rate of the last layer"
    )
    add = parser.add_run_group()
    add("--data-dir", help="folder with train/ and val/, a folder of images per class in each")
    add("--workers", type=flags.non_negative_int, default=1, help="loader workers per process")
    add("--channels-last", action="store_true", help="keep images and weights in NHWC order")
    flags.add_training_flags(
        parser, epochs=3, batch_size=16, lr=0.002, test_batch_size=64, weight_decay=1e-4
    )
    graph.add_flag(parser)
    return parser.parse_args()


class Transformed(Dataset):
    """`images`, a Dataset of (image, label), with its images transformed."""

    def __init__(self, images, transform, classes):
        self.images = images
        self.transform = transform
        self.classes = classes

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        """uint8 [3, size, size] and its label."""
        image, label = self.images[index]
        return self.transform(image), label


def load(args):
    """Return a dataset for training and one for validation; raises InputError."""
    size = args.image_size
    if args.data_dir:
        sets = folders.find(args.data_dir)
        classes = sets[0].classes
    else:
        sets = generate(args.synthetic, channels=3, size=size, seed=args.seed)
        classes = [str(number) for number in range(10)]
    crop = [v2.ToImage(), v2.RandomResizedCrop(size, scale=(0.5, 1)), v2.RandomHorizontalFlip()]
    whole = [v2.ToImage(), v2.Resize(size), v2.CenterCrop(size)]
    return [
        Transformed(images, v2.Compose([*steps, v2.ToPureTensor()]), classes)
        for images, steps in zip(sets, (crop, whole), strict=True)
    ]


def freeze(model):
    """Freeze the first layers: they get no gradients and no optimizer steps."""
    for part in (model.conv1, model.bn1, model.layer1, model.layer2):
        part.requires_grad_(False)


def train_mode(model):
    """model.train(), but BatchNorm keeps its statistics: fine-tuning has few and small batches.

    Freezing weights does not freeze these statistics.
    """
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


def load_data(args, world):
    """Return a DataObject for training and one for validation."""
    train_set, val_set = load(args)
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


def averages(loss, correct, images):
    """The mean loss (nats) and the accuracy, from the sums over all images."""
    return {"loss": loss / images, "accuracy": correct / images}


@torch.inference_mode()
def evaluate(model, val, run):
    """Return the averages over the whole validation set, each image once."""
    # dist: BatchNorm's statistics differ between ranks: evaluate with rank 0's, as saved.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    sums = Sums(run.world.device, averages)
    for images, labels in run.batches(val.loader):
        logits = model(normalise(images))
        loss = F.cross_entropy(logits, labels)
        correct = (logits.argmax(1) == labels).sum()
        sums.add(loss=loss * len(labels), correct=correct, images=len(labels))
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
    require_same(world, train.dataset.images, val.dataset.images)
    torch.manual_seed(args.seed)
    metadata = Metadata(classes=train.dataset.classes, mean=normalise.mean, std=normalise.std)
    model = resnet18(num_classes=len(metadata["classes"])).to(world.device)
    init_from(args, model, metadata, world)
    # dist: freeze before wrapping: DDP would wait for the gradients of frozen weights.
    freeze(model)
    devices.adapt(model, args)  # --channels-last, --compile
    # dist: the global batch is world.size times larger, and the rate grows with it.
    lr = schedule.peak_lr(args, world.size)
    # dist: this rate grows by the same factor.
    head_lr = args.head_lr * (lr / args.lr)
    head = list(model.fc.parameters())
    body = [
        weight
        for name, weight in model.named_parameters()
        if weight.requires_grad and not name.startswith("fc.")
    ]
    groups = [{"params": body}, {"params": head, "lr": head_lr}]
    optimizer = torch.optim.SGD(
        groups, lr, args.momentum, weight_decay=args.weight_decay, fused=True
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

    def step(images, labels):
        optimizer.zero_grad()
        # dist: through the wrapper; else no gradient is averaged.
        logits = ddp_model(normalise(images))
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        correct = (logits.argmax(1) == labels).sum()
        sums.add(loss=loss.detach() * len(labels), correct=correct, images=len(labels))

    if args.cuda_graph:
        step = graph.Captured(step, world, optimizer)
    # Until --epochs or --max-steps are done, a signal comes, or --dry-run has tried one step.
    while not run.over:
        train_mode(model)
        # Yields batches up to the next evaluation, then saves. Data order, rate and random numbers
        # depend only on seed, position and rank, so a resumed run repeats them.
        for images, labels in run.steps(train):
            step(images, labels)
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
