"""Train on MNIST with nn.DataParallel: one process splits each batch over all visible GPUs.

    python mnist/dp.py
    CUDA_VISIBLE_DEVICES=0,1 python mnist/dp.py

Read it beside single.py. --batch-size is the whole batch, split over the GPUs. DataParallel copies
the model to every GPU in every step, and one Python process drives them all; PyTorch's
documentation recommends DistributedDataParallel: ddp_launch.py.
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
import torch.nn.functional as F
from torch import nn

import digits  # beside this file; scripts/take.py copies it along
from common import devices, flags, schedule
from common.data import DataObject, EpochSampler, TensorLoader
from common.errors import InputError
from common.metrics import Sums
from common.process import launch
from common.ranks import World
from common.run import Run
from common.weights import init_from


def parse_args():
    parser = flags.Parser(__doc__, task="mnist")
    digits.add_flags(parser)
    flags.add_training_flags(parser, epochs=5, batch_size=64, lr=0.02)
    return parser.parse_args()


def load_data(args, world):
    """Return a DataObject for training and one for validation."""
    train_set, val_set = digits.load(args.data_dir, args.synthetic, args.seed, world)
    batch_size = schedule.batch_size(args)
    train_sampler = EpochSampler(len(train_set), batch_size, seed=args.seed)
    val_sampler = range(len(val_set))
    train_loader = TensorLoader(train_set, train_sampler, batch_size, world.device)
    val_loader = TensorLoader(val_set, val_sampler, args.test_batch_size, world.device)
    train = DataObject(train_set, train_sampler, train_loader)
    return train, DataObject(val_set, val_sampler, val_loader)


def averages(loss, correct, images):
    """The mean loss (nats) and the accuracy, from the sums over all images."""
    return {"loss": loss / images, "accuracy": correct / images}


@torch.inference_mode()
def evaluate(model, val, run):
    """Return the averages over the whole validation set, each image once."""
    model.eval()
    sums = Sums(run.world.device, averages)
    for images, labels in run.batches(val.loader):
        logits = model(digits.normalise(images))
        loss = F.cross_entropy(logits, labels)
        correct = (logits.argmax(1) == labels).sum()
        sums.add(loss=loss * len(labels), correct=correct, images=len(labels))
    return sums.result()


def connect(args):
    """Return the World of this process, and the indices of its GPUs."""
    device = devices.use(args)
    # dist: all GPUs take part,
    gpus = list(range(torch.accelerator.device_count())) if device.type != "cpu" else []
    if ":" in args.device:
        # dist: or only the one that --device names.
        gpus = [device.index]
    if args.compile and len(gpus) > 1:
        # dist: the replicas on other GPUs would call the first one's compiled model.
        raise InputError(
            "--compile does not work on several GPUs: use ddp_launch.py, or CUDA_VISIBLE_DEVICES=0"
        )
    strategy = "DataParallel, no GPU"
    if gpus:
        # dist: unlike with DDP, the batch does not grow with the number of GPUs: it is split.
        each = schedule.batch_size(args) / len(gpus)
        strategy = f"DataParallel, {len(gpus)} GPU(s) with {each:g} images each"
    return World(device, strategy=strategy), gpus


def main():
    args = parse_args()
    world, gpus = connect(args)
    train, val = load_data(args, world)
    torch.manual_seed(args.seed)
    model = digits.build(args.model).to(world.device)
    init_from(args, model, digits.METADATA, world)
    devices.adapt(model, args)  # --channels-last, --compile
    lr = schedule.peak_lr(args)
    optimizer = torch.optim.SGD(
        model.parameters(), lr, args.momentum, weight_decay=args.weight_decay, fused=True
    )
    # dist: splits each batch, and adds up the gradients on the first GPU.
    dp_model = nn.DataParallel(model, gpus) if gpus else model
    rates = schedule.WarmupCosine(args.warmup_epochs, optimizer)
    # step() adds to them; run.steps() logs them over all ranks, and run.record() resets them.
    sums = Sums(world.device, averages)
    # A checkpoint holds the state of these objects, and the flags. Add your own.
    # dist: the model without its wrapper, so that any recipe can load it.
    state = {"model": model, "optimizer": optimizer, "metadata": digits.METADATA}
    # Locks the folder of the run, and loads the checkpoint of --resume into `state`.
    run = Run(args, world, state, sums, rates, train)

    def step(images, labels):
        optimizer.zero_grad()
        # dist: through the wrapper; else only the first GPU computes.
        logits = dp_model(digits.normalise(images))
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        correct = (logits.argmax(1) == labels).sum()
        sums.add(loss=loss.detach() * len(labels), correct=correct, images=len(labels))

    # Until --epochs or --max-steps are done, a signal comes, or --dry-run has tried one step.
    while not run.over:
        model.train()
        # Yields batches up to the next evaluation, then saves. Data order, rate and random numbers
        # depend only on seed, position and rank, so a resumed run repeats them.
        for images, labels in run.steps(train):
            for gpu in gpus[1:]:
                # dist: else all GPUs draw the same dropout; run.steps() has seeded the first one.
                generator = torch.get_device_module(world.device).default_generators[gpu]
                generator.manual_seed(torch.initial_seed() + gpu)
            step(images, labels)
        # After SIGTERM or SIGUSR1 the run is over, and has been saved.
        if not run.over:
            # dist: evaluate on all GPUs, too.
            result = evaluate(dp_model, val, run)
            run.record(result, best=result["accuracy"])


if __name__ == "__main__":
    with launch.plain_exits():
        main()
