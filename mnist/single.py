"""Train on MNIST on one device.

    python mnist/single.py

Compare every other recipe with this one: diff mnist/single.py mnist/ddp_launch.py
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

import digits  # beside this file; scripts/take.py copies it along
from common import devices, flags, graph, schedule
from common.data import DataObject, EpochSampler, TensorLoader
from common.metrics import Sums
from common.process import launch
from common.ranks import World
from common.run import Run
from common.weights import init_from


def parse_args():
    parser = flags.Parser(__doc__, task="mnist")
    digits.add_flags(parser)
    flags.add_training_flags(parser, epochs=5, batch_size=64, lr=0.02)
    graph.add_flag(parser)
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


def main():
    args = parse_args()
    world = World(devices.use(args))
    train, val = load_data(args, world)
    torch.manual_seed(args.seed)
    model = digits.build(args.model).to(world.device)
    init_from(args, model, digits.METADATA, world)
    devices.adapt(model, args)  # --channels-last, --compile
    lr = schedule.peak_lr(args)
    optimizer = torch.optim.SGD(
        model.parameters(), lr, args.momentum, weight_decay=args.weight_decay, fused=True
    )
    rates = schedule.WarmupCosine(args.warmup_epochs, optimizer)
    # step() adds to them; run.steps() logs them over all ranks, and run.record() resets them.
    sums = Sums(world.device, averages)
    # A checkpoint holds the state of these objects, and the flags. Add your own.
    state = {"model": model, "optimizer": optimizer, "metadata": digits.METADATA}
    # Locks the folder of the run, and loads the checkpoint of --resume into `state`.
    run = Run(args, world, state, sums, rates, train)

    def step(images, labels):
        optimizer.zero_grad()
        logits = model(digits.normalise(images))
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        correct = (logits.argmax(1) == labels).sum()
        sums.add(loss=loss.detach() * len(labels), correct=correct, images=len(labels))

    if args.cuda_graph:
        step = graph.Captured(step, world, optimizer)
    # Until --epochs or --max-steps are done, a signal comes, or --dry-run has tried one step.
    while not run.over:
        model.train()
        # Yields batches up to the next evaluation, then saves. Data order, rate and random numbers
        # depend only on seed, position and rank, so a resumed run repeats them.
        for images, labels in run.steps(train):
            step(images, labels)
        # After SIGTERM or SIGUSR1 the run is over, and has been saved.
        if not run.over:
            result = evaluate(model, val, run)
            run.record(result, best=result["accuracy"])


if __name__ == "__main__":
    with launch.plain_exits():
        main()
