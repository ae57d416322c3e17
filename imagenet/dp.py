"""Train on ImageNet with nn.DataParallel: one process splits each batch over all visible GPUs.

    python imagenet/dp.py
    CUDA_VISIBLE_DEVICES=0,1 python imagenet/dp.py

Read it beside single.py. --batch-size is the whole batch, split over the GPUs. DataParallel copies
the model to every GPU in every step, and one Python process drives them all; PyTorch's
documentation recommends DistributedDataParallel: ddp_launch.py.
"""

import sys
from pathlib import Path

# So that Python finds the modules beside this file, and common/ beside its folder.
folder = Path(__file__).resolve().parent
sys.path += [str(folder), str(folder.parent)]

import torch
import torch.nn.functional as F
from torch import nn

import jpegs  # beside this file; scripts/take.py copies it
import networks
from common import devices, flags, schedule
from common.data import DataObject, EpochSampler, to_device
from common.errors import InputError
from common.metrics import Best, Sums
from common.position import Position, seed_step
from common.process import launch
from common.run import Run
from common.weights import init_from


def parse_args():
    parser = flags.Parser(__doc__)
    parser.set_defaults(dataset="imagenet")
    add = parser.add_argument
    add("--data-dir", default="data", help="folder with train/ and val/, or archives")
    add(
        "--synthetic",
        nargs="?",
        type=flags.positive_int,
        const=10_000,
        metavar="IMAGES",
        help="train on generated images, 10000 if no number is given",
    )
    add(
        "-a",
        "--model",
        "--arch",
        type=networks.known,
        default="resnet50",
        help="one of torchvision",
    )
    add("--epochs", type=flags.positive_int, default=90, help="passes over the training data")
    add("-b", "--batch-size", type=flags.positive_int, default=256, help="images per process")
    add(
        "-G",
        "--global-batch-size",
        type=flags.positive_int,
        help="images of all processes together; --lr is then the rate for them",
    )
    add("--test-batch-size", type=flags.positive_int, default=256, help="batch size of evaluation")
    add(
        "--lr",
        type=flags.positive_float,
        help="learning rate of one process; if not given, by model",
    )
    add(
        "--scale-lr",
        choices=("linear", "sqrt", "none"),
        default="linear",
        help="how --lr grows with the number of processes",
    )
    add("--warmup-epochs", type=flags.non_negative_float, default=5, help="epochs of a rising rate")
    add("--momentum", type=flags.fraction, default=0.9, help="momentum of SGD")
    add("--weight-decay", "--wd", type=flags.non_negative_float, default=1e-4, help="weight decay")
    add("--channels-last", action="store_true", help="keep images and weights in NHWC order")
    add("--compile", action="store_true", help="compile the model with torch.compile")
    add("--label-smoothing", type=flags.fraction, default=0.1, help="share of the other classes")
    add("--accumulate", type=flags.positive_int, default=1, help="batches per step")
    add("--evaluate", action="store_true", help="only evaluate the checkpoint of --resume")
    add("--seed", type=flags.seed, default=0, help="seed of weights, order of data, and dropout")
    jpegs.add_flags(parser)
    flags.add_run_flags(parser)
    args = parser.parse_args()
    if args.lr is None:
        args.lr = networks.LRS[args.model]
    if args.workers is None:
        args.workers = devices.cores_per_process()
    return args


def load_data(args, device):
    """Return a DataObject for training and one for validation."""
    train_set, val_set = jpegs.load(
        args.data_dir, args.synthetic, args.seed, args.image_size, args.loader
    )
    batch_size = schedule.per_process(args.batch_size, args.global_batch_size, args.accumulate)
    train_sampler = EpochSampler(len(train_set), batch_size * args.accumulate, seed=args.seed)
    val_sampler = range(len(val_set))
    train_loader = jpegs.loader(train_set, train_sampler, batch_size, args.workers, device)
    val_loader = jpegs.loader(val_set, val_sampler, args.test_batch_size, args.workers, device)
    train = DataObject(train_set, train_sampler, train_loader)
    return train, DataObject(val_set, val_sampler, val_loader)


def averages(total):
    """The mean loss (nats) and the accuracies."""
    return {
        "loss": total["loss"] / total["images"],
        "accuracy": total["correct"] / total["images"],
        "top5": total["correct5"] / total["images"],
    }


def text(result):
    accuracies = f"acc {result['accuracy']:.2%} top-5 {result['top5']:.2%}"
    return f"loss {result['loss']:.4f} {accuracies}"


def add_to(sums, loss, logits, labels):
    """Add a batch: its mean `loss` [], `logits` [batch, classes] and `labels` [batch]."""
    hits = logits.topk(min(5, logits.shape[1])).indices == labels.unsqueeze(1)
    sums.add(loss=loss.detach() * len(labels), correct=hits[:, 0].sum(), correct5=hits.sum())


def make_step(args, model, optimizer, sums):
    """Return the function that trains on a batch: all that the device does in a step.

    The last batch of --accumulate `ends_step`.
    """

    def step(images, labels, ends_step):
        logits = model(jpegs.normalise(images))
        loss = F.cross_entropy(logits, labels, label_smoothing=args.label_smoothing)
        (loss / args.accumulate).backward()
        add_to(sums, loss, logits, labels)
        if ends_step:
            optimizer.step()
            optimizer.zero_grad()

    return step


@torch.inference_mode()
def evaluate(args, model, val, device, watchdog):
    """Return the averages over the whole validation set, each sample once."""
    model.eval()
    sums = Sums(device, "loss", "correct", "correct5", "images")
    for batch in watchdog.watch(val.loader):
        images, labels = to_device(batch, device)
        logits = model(jpegs.normalise(images))
        loss = F.cross_entropy(logits, labels)
        add_to(sums, loss, logits, labels)
        sums.add(images=len(labels))
        if args.dry_run:
            break
    return averages(sums.total())


def train_to_evaluation(args, run, train, step, sums, rates, device):
    """Train up to the next evaluation, or until a signal asks to stop; return the averages."""
    position = run.position
    # A new order in each epoch; a run that resumes within an epoch has the same order there.
    train.sampler.set_epoch(position.epoch, position.samples, position.steps_to_evaluation)
    for number, batch in enumerate(run.batches(train.loader)):
        images, labels = to_device(batch, device)
        part = number % args.accumulate
        if part == 0:
            # Data, rates and random numbers depend on seed and position: a resume repeats them.
            rates.set(position)
            # dist: each GPU draws its dropout from a generator of its own.
            seed_step(args.seed, position, device, all_devices=True)
        ends_step = part == args.accumulate - 1
        step(images, labels, ends_step)
        # Python counts this; the step is only what the device does.
        sums.add(images=len(labels))
        if not ends_step:
            continue
        position.advance()
        if run.check_due():
            figures = averages(sums.total())
            run.log.step(figures | {"lr": rates.current})
            # SIGTERM or SIGUSR1 came. main() saves.
            if run.stop.requested:
                break
            if run.save_due:
                run.save()
        if args.dry_run:
            break
    return averages(sums.total())


def build(args, metadata, device, gpus):
    """Return the model, its optimizer, and lines for the log."""
    networks.check(args, device)
    classes = len(metadata["classes"])
    model = networks.build(args.model, args.image_size, classes).to(device)
    lines = init_from(args, model, metadata)
    if args.channels_last:
        devices.use_channels_last(model)
    if args.compile and len(gpus) > 1:
        # dist: a copy on another GPU would call the first one's compiled model.
        raise InputError(
            "--compile does not work on several GPUs: use ddp_launch.py, or CUDA_VISIBLE_DEVICES=0"
        )
    if args.compile:
        devices.compile_model(model)
    peak_lr = args.lr
    optimizer = torch.optim.SGD(
        networks.decay_groups(model, args.weight_decay), peak_lr, args.momentum, fused=True
    )
    if gpus:
        # dist: splits each batch, and adds up the gradients on the first GPU.
        model = nn.DataParallel(model, gpus)
    return model, optimizer, lines


def main():
    args = parse_args()
    launch.check_world_size(1)
    device = devices.pick(args.device)
    devices.tune(device, args.deterministic)
    if device.type != "cpu":
        # What names no device, such as a seed, is for this one.
        torch.accelerator.set_device_index(device.index)
    train, val = load_data(args, device)
    # dist: all take part.
    gpus = list(range(torch.accelerator.device_count())) if device.type != "cpu" else []
    if ":" in args.device:
        # dist: only the one that --device names.
        gpus = [device.index]
    torch.manual_seed(args.seed)
    metadata = jpegs.metadata(train.dataset)
    model, optimizer, lines = build(args, metadata, device, gpus)
    position = Position(train.sampler, args.epochs, args.max_steps, args.eval_every)
    # From --lr up to the rate of each parameter group, and then down to 0.
    rates = schedule.WarmupCosine(optimizer, args.warmup_epochs, args.lr)
    lines += rates.warn_if_short(position)
    sums = Sums(device, "loss", "correct", "correct5", "images")
    step = make_step(args, model, optimizer, sums)
    best = Best()
    # A checkpoint holds the state of these objects, and the flags. Add your own.
    state = {
        # dist: without its wrapper, so that any recipe can load it.
        "model": model.module if gpus else model,
        "optimizer": optimizer,
        "position": position,
        "sums": sums,
        "best": best,
        # So that whoever gets the checkpoint knows what its outputs mean.
        "metadata": metadata,
    }
    if args.evaluate:
        # Only the weights count, of whatever run.
        state = {"model": state["model"], "position": position, "metadata": metadata}
    lines += jpegs.origin(train.dataset, val.dataset)
    if args.accumulate > 1:
        batch_size = train.sampler.batch_size // args.accumulate
        lines.append(f"each step accumulates {args.accumulate} batches of {batch_size} per process")
    strategy = "DataParallel, no GPU"
    if gpus:
        # dist: unlike with processes, the batch does not grow with the GPUs: it is split.
        each = train.loader.batch_size / len(gpus)
        strategy = f"DataParallel, {len(gpus)} GPU(s) with {each:g} images each"
    # Holds the folder of the run, and loads the checkpoint of --resume into `state`.
    run = Run(
        args,
        state,
        device,
        strategy=strategy,
        lr=rates.peak,
        unit="images",
        lines=lines,
        only_weights=args.evaluate,
    )
    if args.evaluate:
        result = evaluate(args, model, val, device, run.watchdog)
        run.log.say(f"{len(val.dataset):,} val images: {text(result)}")
        return
    while not position.over:
        model.train()
        train_result = train_to_evaluation(args, run, train, step, sums, rates, device)
        # Before the evaluation, which may take long.
        run.save()
        if run.stop.requested:
            run.leave()
            break
        val_result = evaluate(args, model, val, device, run.watchdog)
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
