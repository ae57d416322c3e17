"""Train on MNIST with DistributedDataParallel, one process per device, started by mp.spawn.

    python mnist/ddp_spawn.py -g 2
    MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python mnist/ddp_spawn.py -n 2 -g 1 -nr 0
    MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python mnist/ddp_spawn.py -n 2 -g 1 -nr 1

Read it beside single.py. The last two make one run on two machines; the address is that of the
first. On one machine set CUDA_VISIBLE_DEVICES.
"""

import os
import sys
from pathlib import Path

# So that Python finds the modules beside this file, and common/ beside its folder.
folder = Path(__file__).resolve().parent
sys.path += [str(folder), str(folder.parent)]

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.nn.parallel import DistributedDataParallel

import digits  # beside this file; scripts/take.py copies it
from common import devices, flags, graph, schedule
from common.data import DataObject, EpochSampler, TensorLoader, to_device
from common.errors import InputError
from common.metrics import Best, Sums
from common.position import Position, seed_step
from common.process import launch, spawn
from common.ranks import require_same
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
    add("--cuda-graph", action="store_true", help="run each step as one CUDA graph: one launch")
    add("--seed", type=flags.seed, default=0, help="seed of weights, order of data, and dropout")
    # dist: how many processes there are, and which of them this machine starts.
    gpus = max(1, torch.accelerator.device_count())
    add("-n", "--nodes", type=flags.positive_int, default=1, help="number of machines")
    add("-g", "--gpus", type=flags.positive_int, default=gpus, help="processes on each machine")
    add("-nr", "--nr", type=flags.non_negative_int, default=0, help="number of this machine")
    flags.add_run_flags(parser)
    return parser.parse_args()


def load_data(args, device, rank, world_size):
    """Return a DataObject for training and one for validation."""
    train_set, val_set = digits.load(args.data_dir, args.synthetic, args.seed)
    # dist: all ranks share --global-batch-size.
    batch_size = schedule.per_process(args.batch_size, args.global_batch_size, world_size)
    # dist: each rank has its own share of a global batch; else all compute the same gradients.
    train_sampler = EpochSampler(len(train_set), batch_size, rank, world_size, seed=args.seed)
    # dist: each image once; torch's DistributedSampler repeats some, which count twice.
    val_sampler = range(rank, len(val_set), world_size)
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
    # dist: BatchNorm's statistics differ between ranks: evaluate with rank 0's, which are saved.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
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


def connect(local_rank, args):
    """Join the other processes; return the device of this one, its rank, and the world size."""
    # dist: over all machines.
    rank = args.nr * args.gpus + local_rank
    world_size = args.nodes * args.gpus
    # dist: init_process_group reads them.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    # dist: one device per process.
    device = devices.pick(args.device, local_rank, args.gpus)
    # dist: else each process starts a thread per core.
    launch.share_cores(args.gpus)
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
    launch.check_world_size(world_size)
    return device, rank, world_size


def build(args, device, world_size):
    """Return the model, its optimizer, and lines for the log."""
    model = digits.build(args.model).to(device)
    lines = init_from(args, model, digits.METADATA)
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
    # dist: averages the gradients of all ranks in backward, while it still computes others.
    # It also copies rank 0's weights to all ranks.
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    # dist: do not send BatchNorm's statistics in every forward, as evaluate() does. It is set here
    # because torch 2.14 warns of the argument, and older ones lack its successor.
    model.broadcast_buffers = False
    return model, optimizer, lines


# dist: mp.spawn calls it in each process, with the number of the process.
def start(local_rank, args):
    with launch.plain_exits():
        main(local_rank, args)
        # dist: closes the connections; NCCL warns without it.
        dist.destroy_process_group()


def main(local_rank, args):
    device, rank, world_size = connect(local_rank, args)
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
        "metadata": digits.METADATA,
    }
    # Holds the folder of the run, and loads the checkpoint of --resume into `state`.
    run = Run(
        args,
        state,
        device,
        strategy="DDP, mp.spawn",
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
        # dist: once, in the process that starts the others.
        args = parse_args()
        address = {"MASTER_ADDR", "MASTER_PORT"}
        if args.nr >= args.nodes or (args.nodes > 1 and not address <= os.environ.keys()):
            # dist: else they wait for each other.
            raise InputError(
                "-n N: give each machine an -nr from 0 to N-1, and set MASTER_ADDR and MASTER_PORT "
                "on all of them to an address and a free port of the first"
            )
        if args.nodes == 1:
            # dist: where they meet; what another tool left in these variables is elsewhere.
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(get_free_port()))
        else:
            # dist: the first says nothing else for as long as another is missing.
            place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            print(f"-nr {args.nr}: all {args.nodes} machines wait for each other at {place}")
        # dist: else USR1 or USR2 ends a process that still loads torch.
        spawn.ignore_signals()
        # dist: passes signals on to them, and waits.
        spawn.join(mp.spawn(start, args=(args,), nprocs=args.gpus, join=False))
