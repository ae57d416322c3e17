"""Train on CIFAR-10 with nn.DataParallel: one process splits each batch over all visible GPUs.

    python cifar10/dp.py
    CUDA_VISIBLE_DEVICES=0,1 python cifar10/dp.py

Read it beside single.py. --batch-size is the whole batch, split over the GPUs. DataParallel copies
the model to every GPU in every step, and one Python process drives them all; PyTorch's
documentation recommends DistributedDataParallel: ddp_launch.py.
"""

import sys
from pathlib import Path

# So that Python finds common/, and the modules beside this file, also with -P and -m.
sys.path[1:1] = map(str, Path(__file__).resolve().parents[:2])

import torch
import torch.nn.functional as F
from torch import nn

import cifar  # beside this file
from common import checkpoint, devices, flags, launch, lease, profiler, schedule
from common.data import DataObject, EpochSampler, TensorLoader, to_device
from common.errors import InputError
from common.log import Log, new_folder
from common.metrics import Best, Sums, require_finite
from common.position import Position, seed_step
from common.stop import StopSignal
from common.watchdog import Watchdog


def parse_args():
    parser = flags.Parser(__doc__)
    parser.set_defaults(dataset="cifar10")
    add = parser.add_argument
    add("--data-dir", default="data", help="folder of CIFAR-10, downloaded if missing")
    add("--synthetic", nargs="?", type=flags.positive_int, const=10_000, help="generated images")
    add("-a", "--model", "--arch", choices=cifar.MODELS, default="resnet18", help="the model")
    add("--epochs", type=flags.positive_int, default=30, help="passes over the data")
    add("-b", "--batch-size", type=flags.positive_int, default=128, help="images per process")
    add("-G", "--global-batch-size", type=flags.positive_int, help="over all; --lr is for it")
    add("--test-batch-size", type=flags.positive_int, default=1000, help="in evaluation")
    add("--lr", type=flags.positive_float, help="learning rate of one process (by model)")
    add("--scale-lr", choices=("linear", "sqrt", "none"), default="linear", help="by processes")
    add("--warmup-epochs", type=flags.non_negative_float, default=1, help="to the scaled --lr")
    add("--momentum", type=flags.fraction, default=0.9, help="of SGD")
    add("--weight-decay", "--wd", type=flags.non_negative_float, default=5e-4, help="of SGD")
    add("--channels-last", action="store_true", help="NHWC images and weights")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--seed", type=flags.seed, default=0, help="of weights, data and dropout")
    flags.add_run_flags(parser)
    args = parser.parse_args()
    if args.lr is None:
        args.lr = cifar.LRS[args.model]
    return args


def load_data(args, device):
    """Return a DataObject for training and one for validation."""
    train_set, val_set = cifar.load(args.data_dir, args.synthetic, args.seed)
    batch_size = schedule.per_process(args.batch_size, args.global_batch_size)
    train_sampler = EpochSampler(len(train_set), batch_size, seed=args.seed)
    val_sampler = range(len(val_set))
    train_loader = cifar.CropFlipLoader(train_set, train_sampler, batch_size, device)
    val_loader = TensorLoader(val_set, val_sampler, args.test_batch_size, device)
    train = DataObject(train_set, train_sampler, train_loader)
    return train, DataObject(val_set, val_sampler, val_loader)


def averages(total):
    """The loss (nats) and accuracy of the sums of all ranks."""
    return {"loss": total["loss"] / total["images"], "accuracy": total["correct"] / total["images"]}


def text(result):
    return f"loss {result['loss']:.4f} acc {result['accuracy']:.2%}"


@torch.inference_mode()
def evaluate(args, model, val, device, watchdog):
    """Return the averages over the whole validation set, each sample once."""
    model.eval()
    sums = Sums(device, "loss", "correct", "images")
    for batch in watchdog(val.loader):
        images, labels = to_device(batch, device)
        logits = model(cifar.normalise(images))
        loss = F.cross_entropy(logits, labels)
        correct = (logits.argmax(1) == labels).sum()
        sums.add(loss=loss * len(labels), correct=correct, images=len(labels))
        if args.dry_run:
            break
    return averages(sums.total())


def fit(args, device, train, val, model, optimizer, lr, lines):
    """Train and evaluate to the end of the run; with --resume, from its last checkpoint."""
    # With --max-steps a run may end within an epoch.
    epochs = schedule.epochs_of(args.epochs, args.max_steps, train.sampler)
    rates = schedule.WarmupCosine(optimizer, epochs, args.warmup_epochs, start=args.lr / lr)
    position = Position()
    sums = Sums(device, "loss", "correct", "images")
    best = Best()
    # A checkpoint holds the state of these objects, and the flags. Add your own.
    # dist: the model without its wrapper, so that any recipe can load it.
    bare = model.module if isinstance(model, nn.DataParallel) else model
    state = {"model": bare, "optimizer": optimizer}
    state |= {"position": position, "sums": sums, "best": best}
    config = vars(args) | {"saved_by": "DataParallel, world size 1"}
    log_dir = Path(args.log_dir or new_folder(args.dataset))
    folder = Path(args.checkpoint_dir or log_dir)
    writes = not args.dry_run
    log = Log(log_dir if writes else None, "images", args.log_seconds)
    if writes:
        # Before the checkpoint is read: another job may be writing it.
        lease.hold(folder, log_dir)
    found = checkpoint.resume(args.resume, args.checkpoint_dir or args.log_dir, state, config)
    if writes:
        # Refuses a folder that holds another run.
        checkpoint.claim(folder, log_dir, found)
    log.start(position, config, [*lines, *found.lines(position)])
    if position.finished(args.epochs, args.max_steps):
        log.say("nothing left to do: the run has had its --epochs or --max-steps")
    watchdog = Watchdog(args.timeout)
    stop = StopSignal()

    def save(is_best=False):
        # It may take longer than a step. The next batch starts the watchdog again.
        watchdog.cancel()
        if writes:
            checkpoint.save(folder, state, config, is_best)

    while not position.finished(args.epochs, args.max_steps):
        # A new order each epoch; a resumed epoch goes on in the same order.
        train.sampler.set_epoch(position.epoch, position.samples)
        seed_step(args.seed, position, device)
        model.train()
        steps_left = position.steps_left(args.epochs, args.max_steps, train.sampler)
        log.begin(position, steps_left, train.sampler.global_batch)
        batches = watchdog(train.loader)
        if args.profile and writes:
            batches = profiler.trace(batches, log_dir / f"trace-{position.steps}.json.gz")
        epoch_over = True
        for batch in batches:
            if position.evaluation_due(args.eval_every, args.max_steps):
                epoch_over = False
                break
            images, labels = to_device(batch, device)
            rates.set(position.epochs_done(train.sampler.length))
            optimizer.zero_grad()
            logits = model(cifar.normalise(images))
            loss = F.cross_entropy(logits, labels)
            loss.backward()
            optimizer.step()
            correct = (logits.argmax(1) == labels).sum()
            sums.add(loss=loss.detach() * len(labels), correct=correct, images=len(labels))
            # Data order, rates and random state are functions of the seed and this position.
            position.advance(train.sampler.global_batch)
            # Until now there was nothing to save, and SIGTERM ended the run at once.
            stop.listen()
            seed_step(args.seed, position, device)
            save_due = position.multiple_of(args.checkpoint_every)
            if save_due or position.multiple_of(args.log_interval):
                total = sums.total(stop=stop.requested)
                require_finite(total["loss"])
                log.step(position, averages(total) | {"lr": rates.first})
                # SIGTERM or SIGUSR1 on any rank: all ranks stop after the same step.
                if total["stop"]:
                    break
                if save_due:
                    save()
            if args.dry_run:
                break
        log.end(position, watchdog.waited)
        total = sums.total(stop=stop.requested)
        require_finite(total["loss"])
        # Before the evaluation, which may take long.
        save()
        if total["stop"]:
            log.stop(position, folder)
            return
        train_result = averages(total)
        val_result = evaluate(args, model, val, device, watchdog)
        require_finite(val_result["loss"])
        position.end_interval(epoch_over)
        sums.reset()
        done = f"epoch {position.epochs_done(train.sampler.length):.4g}/{epochs:.4g}"
        line = f"{done}: {text(train_result)} | val {text(val_result)}"
        log.evaluation(position, line, train_result | {"lr": rates.first}, val_result)
        save(is_best=best.update(val_result["accuracy"]))
        if args.dry_run:
            break


def main():
    args = parse_args()
    launch.check_world_size(1)
    device = devices.pick(args.device)
    devices.tune(device)
    train, val = load_data(args, device)
    torch.manual_seed(args.seed)
    model = cifar.build(args.model).to(device)
    loaded = checkpoint.init_from(args.init_from, model, args.init_partial)
    if args.channels_last:
        devices.use_channels_last(model)
    # dist: all take part.
    gpus = list(range(torch.accelerator.device_count())) if device.type != "cpu" else []
    if args.compile and len(gpus) > 1:
        # dist: a copy on another GPU would call the first one's compiled model.
        raise InputError(
            "--compile does not work on several GPUs: use ddp_launch.py, or CUDA_VISIBLE_DEVICES=0"
        )
    if args.compile:
        devices.compile_model(model)
    lr = args.lr
    # The schedule multiplies the rate of each of its parameter groups.
    optimizer = torch.optim.SGD(
        model.parameters(), lr, args.momentum, weight_decay=args.weight_decay, fused=True
    )
    if gpus:
        # dist: splits each batch, and adds up the gradients on the first GPU.
        model = nn.DataParallel(model, gpus)
    batch = f"batch {train.sampler.batch_size} per process, {train.sampler.global_batch} global"
    place = f"world size 1 | {devices.describe(device)}"
    setup = f"{args.dataset}: DataParallel, {len(gpus)} GPUs | {place} | {batch} | lr {lr:g}"
    fit(args, device, train, val, model, optimizer, lr, [setup, *loaded])


if __name__ == "__main__":
    with launch.plain_exits():
        main()
