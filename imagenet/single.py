"""Train on ImageNet on one device.

    python imagenet/single.py

Read every other recipe beside this one: diff imagenet/single.py imagenet/ddp_launch.py
"""

import sys
from importlib import import_module
from pathlib import Path

# common/ and images/ are those beside this file or its folder, whatever else has these names.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
for package in ("common", "images"):
    import_module(package)
# Nothing else is looked for there: a queue.py would hide Python's own.
del sys.path[1]

import torch
import torch.nn.functional as F

import jpegs  # beside this file; scripts/take.py copies it
import networks
from common import devices, flags, graph, schedule
from common.data import DataObject, EpochSampler
from common.log import in_words
from common.metrics import Sums
from common.process import launch
from common.ranks import World
from common.run import Run
from common.weights import init_from


def parse_args():
    parser = flags.Parser(__doc__, task="imagenet")
    jpegs.add_flags(parser)
    networks.add_flags(parser)
    flags.add_training_flags(
        parser,
        epochs=90,
        batch_size=256,
        lr=None,
        test_batch_size=256,
        warmup_epochs=5,
        weight_decay=1e-4,
    )
    graph.add_flag(parser)
    args = parser.parse_args()
    if args.lr is None:
        args.lr = networks.LRS[args.model]
    if args.workers is None:
        args.workers = devices.cores_per_process()
    return args


def load_data(args, world):
    """Return a DataObject for training and one for validation."""
    train_set, val_set = jpegs.load(
        args.data_dir, args.synthetic, args.seed, args.image_size, args.loader
    )
    world.say(*jpegs.origin(train_set, val_set))
    batch_size = schedule.batch_size(args)
    # A step takes --accumulate batches.
    per_step = batch_size * args.accumulate
    train_sampler = EpochSampler(len(train_set), per_step, seed=args.seed)
    val_sampler = range(len(val_set))
    train_loader = jpegs.loader(train_set, train_sampler, batch_size, args.workers, world.device)
    val_loader = jpegs.loader(
        val_set, val_sampler, args.test_batch_size, args.workers, world.device
    )
    train = DataObject(train_set, train_sampler, train_loader)
    return train, DataObject(val_set, val_sampler, val_loader)


def averages(loss, correct, correct5, images):
    """The mean loss (nats) and the accuracies, of the sums over all images."""
    return {"loss": loss / images, "accuracy": correct / images, "top5": correct5 / images}


def add_to(sums, loss, logits, labels):
    """Add a batch: its mean `loss` [], `logits` [batch, classes] and `labels` [batch]."""
    hits = logits.topk(min(5, logits.shape[1])).indices == labels.unsqueeze(1)
    count = len(labels)
    sums.add(loss=loss * count, correct=hits[:, 0].sum(), correct5=hits.sum(), images=count)


@torch.inference_mode()
def evaluate(model, val, run):
    """Return the averages over the whole validation set, each image once."""
    model.eval()
    sums = Sums(run.world.device, averages)
    for images, labels in run.batches(val.loader):
        logits = model(jpegs.normalise(images))
        loss = F.cross_entropy(logits, labels)
        add_to(sums, loss, logits, labels)
    return sums.result()


def main():
    args = parse_args()
    world = World(devices.use(args))
    networks.check(args, world.device)
    train, val = load_data(args, world)
    torch.manual_seed(args.seed)
    metadata = jpegs.metadata(train.dataset)
    classes = len(metadata["classes"])
    model = networks.build(args.model, args.image_size, classes).to(world.device)
    init_from(args, model, metadata, world)
    devices.adapt(model, args)
    lr = schedule.peak_lr(args)
    optimizer = torch.optim.SGD(
        networks.decay_groups(model, args.weight_decay), lr, args.momentum, fused=True
    )
    rates = schedule.WarmupCosine(args.warmup_epochs, optimizer)
    sums = Sums(world.device, averages)
    # A checkpoint holds the state of these objects, and the flags. Add your own.
    state = {"model": model, "optimizer": optimizer, "metadata": metadata}
    # Holds the folder of the run, and loads the checkpoint of --resume into `state`.
    run = Run(args, world, state, sums, rates, train)
    if args.evaluate:
        # The weights of --init-from.
        result = evaluate(model, val, run)
        world.say(f"{len(val.dataset):,} val images: {in_words(result)}")
        return

    def step(images, labels):
        logits = model(jpegs.normalise(images))
        loss = F.cross_entropy(logits, labels, label_smoothing=args.label_smoothing)
        (loss / args.accumulate).backward()
        add_to(sums, loss.detach(), logits, labels)
        if run.ends_step:
            optimizer.step()
            optimizer.zero_grad()

    if args.cuda_graph:
        step = graph.Captured(step, world, optimizer)
    while not run.over:
        model.train()
        # The batches up to the next evaluation. Their order, the rate and the random numbers of a
        # step are functions of the seed and the position of the run, so a resume repeats them.
        for images, labels in run.steps(train):
            step(images, labels)
        # After SIGTERM the run is over: it has saved.
        if not run.over:
            result = evaluate(model, val, run)
            run.record(result, best=result["accuracy"])


if __name__ == "__main__":
    with launch.plain_exits():
        main()
