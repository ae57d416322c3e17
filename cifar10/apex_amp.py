"""Train on CIFAR-10 with NVIDIA Apex: its mixed precision and its DistributedDataParallel.

    torchrun --nproc-per-node=2 cifar10/apex_amp.py
    torchrun --nproc-per-node=2 cifar10/apex_amp.py --opt-level O2

Read it beside ddp_launch.py. It needs a GPU. Apex 25.05 is the last tag with amp and parallel;
ddp_amp.py does the same with torch alone. With O2 and O3 a resumed run continues from weights and
momentum that were rounded to fp16.
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
from apex import amp, parallel  # amp: tag 25.05, see docs/install.md; PyPI's is another package

import cifar  # beside this file; scripts/take.py copies it
from common import devices, flags, schedule
from common.data import DataObject, EpochSampler, TensorLoader, to_device
from common.errors import InputError
from common.metrics import Best, Sums
from common.position import Position, seed_step
from common.process import launch
from common.ranks import require_same
from common.run import Run
from common.weights import init_from


def parse_args():
    parser = flags.Parser(__doc__)
    parser.set_defaults(dataset="cifar10")
    add = parser.add_argument
    add("--data-dir", default="data", help="folder of CIFAR-10, which is downloaded if missing")
    add(
        "--synthetic",
        nargs="?",
        type=flags.positive_int,
        const=10_000,
        metavar="IMAGES",
        help="train on generated images, 10000 if no number is given",
    )
    add("-a", "--model", "--arch", choices=cifar.MODELS, default="resnet18", help="the network")
    add("--epochs", type=flags.positive_int, default=30, help="passes over the training data")
    add("-b", "--batch-size", type=flags.positive_int, default=128, help="images per process")
    add(
        "-G",
        "--global-batch-size",
        type=flags.positive_int,
        help="images of all processes together; --lr is then the rate for them",
    )
    add("--test-batch-size", type=flags.positive_int, default=1000, help="batch size of evaluation")
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
    add("--warmup-epochs", type=flags.non_negative_float, default=1, help="epochs of a rising rate")
    add("--momentum", type=flags.fraction, default=0.9, help="momentum of SGD")
    add("--weight-decay", "--wd", type=flags.non_negative_float, default=5e-4, help="weight decay")
    add("--channels-last", action="store_true", help="keep images and weights in NHWC order")
    add("--compile", action="store_true", help="compile the model with torch.compile")
    add("--seed", type=flags.seed, default=0, help="seed of weights, order of data, and dropout")
    # amp: O0 is fp32, O1 mixed, O2 fp16 with fp32 master weights, O3 fp16.
    add(
        "--opt-level",
        choices=("O0", "O1", "O2", "O3"),
        default="O1",
        help="how much Apex does in fp16",
    )
    # dist: torch.distributed.launch passes it.
    add("--local-rank", type=int, help=argparse.SUPPRESS)
    flags.add_run_flags(parser)
    args = parser.parse_args()
    if args.lr is None:
        args.lr = cifar.LRS[args.model]
    return args


def load_data(args, device, rank, world_size):
    """Return a DataObject for training and one for validation."""
    train_set, val_set = cifar.load(args.data_dir, args.synthetic, args.seed)
    # dist: all ranks share --global-batch-size.
    batch_size = schedule.per_process(args.batch_size, args.global_batch_size, world_size)
    # dist: each rank has its own share of a global batch; else all compute the same gradients.
    train_sampler = EpochSampler(len(train_set), batch_size, rank, world_size, seed=args.seed)
    # dist: each image once; torch's DistributedSampler repeats some, which count twice.
    val_sampler = range(rank, len(val_set), world_size)
    train_loader = cifar.CropFlipLoader(train_set, train_sampler, batch_size, device)
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
        logits = model(cifar.normalise(images))
        loss = F.cross_entropy(logits, labels)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            # amp: else small fp16 gradients become 0.
            scaled_loss.backward()
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
        logits = model(cifar.normalise(images))
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
    if device.type == "cpu" or args.channels_last:
        # amp: Apex's DDP would mix up the gradients of NHWC weights.
        raise InputError("Apex needs a GPU, and does not work with --channels-last: use ddp_amp.py")
    devices.tune(device, args.deterministic)
    if device.type != "cpu":
        # dist: before the group is made, or every rank opens a context on GPU 0.
        torch.accelerator.set_device_index(device.index)
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


def build(args, device, world_size):
    """Return the model, its optimizer, and lines for the log."""
    model = cifar.build(args.model).to(device)
    lines = init_from(args, model, cifar.METADATA)
    if args.channels_last:
        devices.use_channels_last(model)
    if args.compile:
        devices.compile_model(model)
    # dist: the global batch is world_size times larger.
    factor = schedule.lr_factor(args.scale_lr, world_size, args.global_batch_size)
    peak_lr = args.lr * factor
    optimizer = torch.optim.SGD(
        model.parameters(), peak_lr, args.momentum, weight_decay=args.weight_decay, fused=True
    )
    # amp: before DDP.
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, verbosity=0)
    # amp: Apex's own DDP, which handles its fp16 gradients.
    model = parallel.DistributedDataParallel(model)
    return model, optimizer, lines


def main():
    args = parse_args()
    device, rank, world_size = connect(args)
    train, val = load_data(args, device, rank, world_size)
    # dist: else machines with different files would train on them in silence.
    require_same((train.dataset, val.dataset), dist.all_reduce, device)
    torch.manual_seed(args.seed)
    model, optimizer, lines = build(args, device, world_size)
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
        "metadata": cifar.METADATA,
    }
    if args.opt_level in ("O1", "O2"):
        # amp: to resume with their loss scale.
        state["amp"] = amp
    # Holds the folder of the run, and loads the checkpoint of --resume into `state`.
    run = Run(
        args,
        state,
        device,
        strategy=f"Apex {args.opt_level}, torchrun",
        lr=rates.peak,
        unit="images",
        lines=lines,
        # dist: only rank 0 prints and writes; else all ranks write the same files at once.
        rank=rank,
        world_size=world_size,
        # dist: all ranks go on from the same checkpoint, and wait until rank 0 has saved one.
        all_reduce=dist.all_reduce,
        # amp: a recipe without Apex may have saved.
        optional=("amp",),
    )
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
