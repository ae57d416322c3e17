"""Train on MNIST with DistributedDataParallel, one process per device, started by mp.spawn.

    python mnist/ddp_spawn.py -g 2
    MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python mnist/ddp_spawn.py -n 2 -g 1 -nr 0
    MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python mnist/ddp_spawn.py -n 2 -g 1 -nr 1

The last two make one run on two machines; the address is that of the first. On one machine set CUDA_VISIBLE_DEVICES.
"""

import gc
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # dist: before init_process_group; imported later, it keeps the group alive
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import datasets, flags, models, processes, schedule
from common.data import DataObject, EpochSampler
from common.metrics import Metrics
from common.run import Run


def parse_args():
    parser = flags.parser(__doc__, dataset="mnist")
    flags.add_data(parser)
    flags.add_training(parser, lrs={"convnet": 0.02, "lenet": 0.02}, epochs=5, batch_size=64)
    flags.add_sgd(parser, weight_decay=0)
    parser.add_argument(
        "-n", "--nodes", type=flags.COUNT, default=1, help="machines"
    )  # dist: for the world size
    parser.add_argument(
        "-g",
        "--gpus",
        type=flags.COUNT,
        default=max(1, torch.accelerator.device_count()),
        help="processes on each machine, one per GPU",
    )  # dist: on a CPU, any number
    parser.add_argument(
        "-nr", "--nr", type=flags.number(int, 0), default=0, help="this machine, from 0"
    )  # dist: rank
    return parser.parse_args()


def train_one_epoch(model, train, optimizer, lr, run):
    """Take one step per batch; return the loss and accuracy seen during training."""
    model.train()
    metrics = Metrics(
        run.device, before=run.sums
    )  # before: the sums of a resumed epoch, over all ranks
    for images, labels in run.progress(train):
        for group in optimizer.param_groups:  # in each step: warm-up, then a cosine to 0
            group["lr"] = schedule.warmup_cosine(
                run.args, lr, run.epoch + run.samples / len(train.dataset)
            )
        optimizer.zero_grad()
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        metrics.update(loss, logits, labels)
        run.step(metrics)  # advances the position, which a checkpoint holds beside the weights
        if (
            run.save_due and dist.get_rank() == 0
        ):  # dist: rank 0 writes; epoch's end, --checkpoint-every, or a signal
            run.save()
        if (
            run.stopping
        ):  # SIGTERM or SIGUSR1 on any rank: all ranks stop after this step, which is saved
            break
    dist.all_reduce(metrics.sums)  # dist: sum over all ranks, then divide once
    return metrics.average(train.waited)


@torch.inference_mode()
def evaluate(model, val, run):
    """Return loss and accuracy over the whole validation set, each image once."""
    for buffer in model.buffers():
        dist.broadcast(
            buffer, src=0
        )  # dist: BatchNorm's statistics differ; evaluate with rank 0's, which are saved
    model.eval()
    metrics = Metrics(run.device)
    for images, labels in run.progress(val):
        logits = model(images)
        metrics.update(F.cross_entropy(logits, labels), logits, labels)
    dist.all_reduce(metrics.sums)  # dist: each rank evaluated only its share
    return metrics.average(val.waited)


def main(local_rank, args):  # dist: mp.spawn calls it in each process, with its number
    rank, world_size = (
        args.nr * args.gpus + local_rank,
        args.nodes * args.gpus,
    )  # dist: over all machines
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size)
    )  # dist: init_process_group reads them
    processes.install_signal_handlers()  # Ctrl-C ends the run, unsaved; SIGTERM saves, then stops all ranks
    processes.die_with_parent()  # dist: else a rank waits forever when its launcher is killed
    train_set, val_set = datasets.mnist(args)
    device = flags.pick_device(args, local_rank, args.gpus)  # dist: one device per process
    processes.share_cores(args.gpus)  # dist: else each process starts a thread per core
    if device.type != "cpu":
        torch.accelerator.set_device_index(
            device.index
        )  # dist: first, or every rank opens a context on GPU 0
    dist.init_process_group(
        "gloo" if device.type == "cpu" else None, device_id=device.index
    )  # dist: NCCL for CUDA
    schedule.divide_batch(args, world_size)  # dist: all ranks share --global-batch-size
    train_sampler = EpochSampler(
        len(train_set), args.batch_size, args.seed, rank, world_size
    )  # dist: its own share
    val_sampler = range(
        rank, len(val_set), world_size
    )  # dist: each image once; DistributedSampler repeats some
    train = DataObject(train_set, train_sampler, args.batch_size, device)
    val = DataObject(val_set, val_sampler, args.test_batch_size, device)
    torch.manual_seed(args.seed)
    model = flags.to_device(models.MODELS[args.model](channels=1, size=28), args, device)
    lr = args.lr * schedule.lr_factor(
        args, world_size
    )  # dist: the global batch is world_size times larger
    optimizer = torch.optim.SGD(
        model.parameters(), lr, args.momentum, weight_decay=args.weight_decay, fused=True
    )
    state = {"model": model, "optimizer": optimizer}
    run = Run(
        args, "DDP, mp.spawn", device, state, lr, rank, world_size, dist.all_reduce
    )  # dist: to stop together
    run.resume()  # only with --resume; a folder that holds another run is refused
    model = DistributedDataParallel(
        model, gradient_as_bucket_view=True
    )  # dist: averages gradients in backward
    model.broadcast_buffers = (
        False  # dist: not in every forward: the wrapper has sent them once, evaluate() does again
    )
    for epoch in range(run.epoch, args.epochs):
        train.sampler.set_epoch(
            epoch, run.samples
        )  # a new order each epoch; a resumed epoch continues
        train_metrics = train_one_epoch(model, train, optimizer, lr, run)
        if run.stopping:
            break  # it is saved: --resume continues within this epoch
        run.end_epoch(
            train_metrics, evaluate(model.module, val, run)
        )  # dist: unwrapped, as shares may differ in size
        if rank == 0:  # dist: only rank 0 writes
            run.log()
            run.save()
    del (
        model
    )  # dist: free the DDP wrapper before the group, or Gloo's threads live on and can abort ...
    gc.collect()  # dist: ... (in a cycle in torch 2.11)
    dist.destroy_process_group()  # dist: closes the connections; NCCL warns without it


if __name__ == "__main__":
    args = parse_args()  # dist: once, in the process that starts the others
    if args.nr >= args.nodes or (
        args.nodes > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    ):
        processes.fail(
            "-n N: give each machine an -nr from 0 to N-1, and set MASTER_ADDR and MASTER_PORT on all of "
            "them to an address and a free port of the first"
        )  # dist: else they wait for each other
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # dist: where the processes meet
    os.environ.setdefault(
        "MASTER_PORT", str(get_free_port())
    )  # dist: any free port, on one machine
    processes.join(
        mp.spawn(main, args=(args,), nprocs=args.gpus, join=False)
    )  # dist: join passes signals on to them
