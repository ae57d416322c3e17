"""Train on MNIST with nn.DataParallel: one process splits each batch over all visible GPUs.

    python mnist/dp.py
    CUDA_VISIBLE_DEVICES=0,1 python mnist/dp.py

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

import digits  # beside this file; scripts/take.py copies it
from common import devices, flags, schedule
from common.data import DataObject, EpochSampler, TensorLoader, to_device
from common.errors import InputError
from common.metrics import Best, Sums
from common.position import Position, seed_step
from common.process import launch
from common.run import Run
from common.weights import init_from


def parse_args():
    parser = flags.Parser(__doc__)
    parser.set_defaults(dataset="mnist")
    add = parser.add_argument
    add("--data-dir", default="data", help="folder of MNIST, which is downloaded if missing")
    add(
        "--synthetic",
        nargs="?",
        type=flags.positive_int,
        const=10_000,
        metavar="IMAGES",
        help="train on generated images, 10000 if no number is given",
    )
    add("-a", "--model", "--arch", choices=digits.MODELS, default="convnet", help="the network")
    add("--epochs", type=flags.positive_int, default=5, help="passes over the training data")
    add("-b", "--batch-size", type=flags.positive_int, default=64, help="images per process")
    add(
        "-G",
        "--global-batch-size",
        type=flags.positive_int,
        help="images of all processes together; --lr is then the rate for them",
    )
    add("--test-batch-size", type=flags.positive_int, default=1000, help="batch size of evaluation")
    add("--lr", type=flags.positive_float, default=0.02, help="learning rate of one process")
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
    add("--seed", type=flags.seed, default=0, help="seed of weights, order of data, and dropout")
    flags.add_run_flags(parser)
    return parser.parse_args()


def load_data(args, device):
    """Return a DataObject for training and one for validation."""
    train_set, val_set = digits.load(args.data_dir, args.synthetic, args.seed)
    batch_size = schedule.per_process(args.batch_size, args.global_batch_size)
    train_sampler = EpochSampler(len(train_set), batch_size, seed=args.seed)
    val_sampler = range(len(val_set))
    train_loader = TensorLoader(train_set, train_sampler, batch_size, device)
    val_loader = TensorLoader(val_set, val_sampler, args.test_batch_size, device)
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
        logits = model(digits.normalise(images))
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        correct = (logits.argmax(1) == labels).sum()
        sums.add(loss=loss.detach() * len(labels), correct=correct)

    return step


@torch.inference_mode()
def evaluate(args, model, val, device, watchdog):
    """Return the averages over the whole validation set, each sample once."""
    model.eval()
    sums = Sums(device, "loss", "correct", "images")
    for batch in watchdog.watch(val.loader):
        images, labels = to_device(batch, device)
        logits = model(digits.normalise(images))
        loss = F.cross_entropy(logits, labels)
        correct = (logits.argmax(1) == labels).sum()
        sums.add(loss=loss * len(labels), correct=correct, images=len(labels))
        if args.dry_run:
            break
    return averages(sums.total())


def train_to_evaluation(args, run, train, step, sums, rates, device):
    """Train up to the next evaluation, or until a signal asks to stop; return the averages."""
    position = run.position
    # A new order in each epoch; a run that resumes within an epoch has the same order there.
    train.sampler.set_epoch(position.epoch, position.samples, position.steps_to_evaluation)
    for batch in run.batches(train.loader):
        images, labels = to_device(batch, device)
        # Data, rates and random numbers depend on seed and position: a resume repeats them.
        rates.set(position)
        # dist: each GPU draws its dropout from a generator of its own.
        seed_step(args.seed, position, device, all_devices=True)
        step(images, labels)
        # Python counts this; the step is only what the device does.
        sums.add(images=len(labels))
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


def build(args, device, gpus):
    """Return the model, its optimizer, and lines for the log."""
    model = digits.build(args.model).to(device)
    lines = init_from(args, model, digits.METADATA)
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
        model.parameters(), peak_lr, args.momentum, weight_decay=args.weight_decay, fused=True
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
    model, optimizer, lines = build(args, device, gpus)
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
        "model": model.module if gpus else model,
        "optimizer": optimizer,
        "position": position,
        "sums": sums,
        "best": best,
        # So that whoever gets the checkpoint knows what its outputs mean.
        "metadata": digits.METADATA,
    }
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
    )
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
