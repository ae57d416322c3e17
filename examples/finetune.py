"""Fine-tune a pretrained ResNet with DistributedDataParallel, started by torchrun.

    torchrun --nproc-per-node=2 examples/finetune.py
    wget -O resnet18.pth https://download.pytorch.org/models/resnet18-f37072fd.pth
    torchrun --nproc-per-node=2 examples/finetune.py --init-from resnet18.pth --init-partial
    python scripts/prove.py torchrun --nproc-per-node=2 examples/finetune.py --device cpu

Read it beside mnist/ddp_launch.py. --init-partial leaves out the weights of the last layer, which
has other classes. Without --init-from all weights are random, and without --data-dir the images.
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
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from torchvision.models import resnet18
from torchvision.transforms import v2

from common import devices, flags, graph, schedule
from common.data import DataObject, EpochSampler, Seeded, to_device
from common.metadata import Metadata
from common.metrics import Best, Sums
from common.position import Position, seed_step
from common.process import launch
from common.process.workers import data_loader
from common.ranks import fingerprint, require_same
from common.run import Run
from common.weights import init_from
from images import folders
from images.data import Normalise, generate

# As in pretraining on ImageNet.
normalise = Normalise(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))

# dist: send gradients in 16 bits: half the bytes.
COMM_HOOKS = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}


def parse_args():
    parser = flags.Parser(__doc__)
    parser.set_defaults(dataset="finetune")
    add = parser.add_argument
    add("--data-dir", help="folder with train/ and val/, a folder of images per class in each")
    add(
        "--synthetic",
        type=flags.positive_int,
        default=640,
        metavar="IMAGES",
        help="images to generate if there is no --data-dir",
    )
    add("--image-size", type=flags.image_size, default=64, help="height and width in pixels")
    add("--workers", type=flags.non_negative_int, default=1, help="loader workers per process")
    add("--epochs", type=flags.positive_int, default=3, help="passes over the training data")
    add("-b", "--batch-size", type=flags.positive_int, default=16, help="images per process")
    add(
        "-G",
        "--global-batch-size",
        type=flags.positive_int,
        help="images of all processes together; --lr is then the rate for them",
    )
    add("--test-batch-size", type=flags.positive_int, default=64, help="batch size of evaluation")
    add("--lr", type=flags.positive_float, default=0.002, help="learning rate of one process")
    add(
        "--head-lr", type=flags.positive_float, default=0.02, help="learning rate of the last layer"
    )
    add(
        "--scale-lr",
        choices=("linear", "sqrt", "none"),
        default="linear",
        help="how --lr grows with the number of processes",
    )
    add("--warmup-epochs", type=flags.non_negative_float, default=1, help="epochs of a rising rate")
    add("--momentum", type=flags.fraction, default=0.9, help="momentum of SGD")
    add("--weight-decay", "--wd", type=flags.non_negative_float, default=1e-4, help="weight decay")
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

    def fingerprint(self):
        """What the ranks compare."""
        return fingerprint(self.images)


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
    """Let the first layers keep their weights; they get no gradient, and no optimizer step."""
    for part in (model.conv1, model.bn1, model.layer1, model.layer2):
        part.requires_grad_(False)


def train_mode(model):
    """model.train(), but BatchNorm keeps its statistics: batches of fine-tuning are few and small.

    A frozen BatchNorm is not frozen without it, as its statistics are no weights.
    """
    model.train()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.eval()


def load_data(args, device, rank, world_size):
    """Return a DataObject for training and one for validation."""
    train_set, val_set = load(args)
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
    """The mean loss (nats) and the accuracy."""
    return {"loss": total["loss"] / total["images"], "accuracy": total["correct"] / total["images"]}


def text(result):
    return f"loss {result['loss']:.4f} acc {result['accuracy']:.2%}"


def make_step(model, optimizer, sums):
    """Return the function that trains on a batch: all that the device does in a step."""

    def step(images, labels):
        optimizer.zero_grad()
        logits = model(normalise(images))
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        correct = (logits.argmax(1) == labels).sum()
        sums.add(loss=loss.detach() * len(labels), correct=correct)

    return step


@torch.inference_mode()
def evaluate(args, model, val, device, watchdog):
    """Return the averages over the whole validation set, each sample once."""
    # dist: BatchNorm's statistics differ between ranks: evaluate with rank 0's, which are saved.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    sums = Sums(device, "loss", "correct", "images")
    for batch in watchdog.watch(val.loader):
        images, labels = to_device(batch, device)
        logits = model(normalise(images))
        loss = F.cross_entropy(logits, labels)
        correct = (logits.argmax(1) == labels).sum()
        sums.add(loss=loss * len(labels), correct=correct, images=len(labels))
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
        images, labels = to_device(batch, device)
        # Data, rates and random numbers depend on seed and position: a resume repeats them.
        rates.set(position)
        # dist: each rank draws its own dropout.
        seed_step(args.seed, position, device, rank)
        step(images, labels)
        # Python counts this; the step is only what the device does.
        sums.add(images=len(labels))
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
    model = resnet18(num_classes=len(metadata["classes"])).to(device)
    lines = init_from(args, model, metadata)
    # dist: before the wrapper, which would wait for the gradients of frozen weights.
    freeze(model)
    if args.channels_last:
        devices.use_channels_last(model)
    if args.compile:
        devices.compile_model(model)
    # dist: the global batch is world_size times larger.
    factor = schedule.lr_factor(args.scale_lr, world_size, args.global_batch_size)
    peak_lr = args.lr * factor
    head = list(model.fc.parameters())
    body = [
        weight
        for name, weight in model.named_parameters()
        if weight.requires_grad and not name.startswith("fc.")
    ]
    # dist: by the same factor.
    head_lr = args.head_lr * factor
    groups = [{"params": body}, {"params": head, "lr": head_lr}]
    optimizer = torch.optim.SGD(
        groups, peak_lr, args.momentum, weight_decay=args.weight_decay, fused=True
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
    sums = Sums(device, "loss", "correct", "images")
    step = make_step(model, optimizer, sums)
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
        train_mode(model)
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
        is_best = best.update(val_result["accuracy"])
        run.save(is_best)
        if args.dry_run:
            break


if __name__ == "__main__":
    with launch.plain_exits():
        main()
        # dist: closes the connections; NCCL warns without it.
        dist.destroy_process_group()
