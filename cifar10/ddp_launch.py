"""Train on CIFAR-10 with DistributedDataParallel, one process per device, started by torchrun.

    torchrun --nproc-per-node=2 cifar10/ddp_launch.py
    python -m torch.distributed.launch --nproc-per-node=2 cifar10/ddp_launch.py
"""

import argparse
import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # common/ stands beside this file's folder
from common import cifar10, flags, processes, schedule
from common.data import DataObject, EpochSampler
from common.metrics import Metrics
from common.run import Run


def parse_args():
    parser = flags.parser(__doc__, dataset="cifar10")
    flags.add_data(parser)
    flags.add_training(parser, lrs={"resnet18": 0.1, "convnet": 0.02, "lenet": 0.02}, epochs=30, batch_size=128)
    flags.add_sgd(parser, weight_decay=5e-4)
    parser.add_argument("--local-rank", type=int, help=argparse.SUPPRESS)  # dist: torch.distributed.launch passes it
    return parser.parse_args()


def train_one_epoch(model, train, optimizer, lr, run):
    """One step per batch; returns the loss and accuracy that the model had on the way."""
    model.train()
    metrics = Metrics(run.device, before=run.sums)
    for images, labels in run.progress(train):
        for group in optimizer.param_groups:
            group["lr"] = schedule.warmup_cosine(run.args, lr, run.epoch + run.samples / len(train.dataset))
        optimizer.zero_grad()
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        metrics.update(loss, logits, labels)
        run.step(metrics)  # the position moves on: what a checkpoint has beside the weights
        if run.save_due and dist.get_rank() == 0:  # dist: one rank writes; --checkpoint-every, or SIGUSR1
            run.save()
        if run.stopping:
            break
    dist.all_reduce(metrics.sums)  # dist: over all ranks, before the one division
    return metrics.average(train.waited)


@torch.inference_mode()
def evaluate(model, val, run):
    """Loss and accuracy over the whole validation set, each image once."""
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)  # dist: BatchNorm's statistics differ by rank; evaluate those that rank 0 saves
    model.eval()
    metrics = Metrics(run.device)
    for images, labels in run.progress(val):
        logits = model(images)
        metrics.update(F.cross_entropy(logits, labels), logits, labels)
    dist.all_reduce(metrics.sums)  # dist: each rank has evaluated a share
    return metrics.average(val.waited)


def main():
    args = parse_args()
    processes.install_signal_handlers()  # Ctrl-C ends the run, SIGUSR1 saves and stops it
    processes.die_with_parent()  # dist: or a rank waits for ever for others that are gone
    train_set, val_set = cifar10.load(args)
    local_rank, local_world_size = processes.torchrun_env()  # dist: to take a device of this machine
    device = flags.pick_device(args, local_rank, local_world_size)  # dist: a device per process
    if device.type == "cuda":
        torch.cuda.set_device(device)  # dist: before the group is made, or every rank opens a context on GPU 0
        dist.init_process_group("nccl", device_id=device)  # dist: or NCCL guesses its GPU
    else:
        dist.init_process_group("gloo")  # dist: returns when all have come to MASTER_ADDR:MASTER_PORT
    rank, world_size = dist.get_rank(), dist.get_world_size()  # dist: among all processes
    train_sampler = EpochSampler(len(train_set), args.batch_size, args.seed, rank, world_size)  # dist: a share per rank
    val_sampler = range(rank, len(val_set), world_size)  # dist: each image on one rank; DistributedSampler repeats some
    train = DataObject(train_set, train_sampler, args.batch_size, device)
    val = DataObject(val_set, val_sampler, args.test_batch_size, device)
    torch.manual_seed(args.seed)
    model = cifar10.MODELS[args.model](channels=3, size=32).to(device)
    lr = args.lr * schedule.lr_factor(args, world_size)  # dist: the global batch is world_size times as large
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=args.momentum, weight_decay=args.weight_decay)
    state = {"model": model, "optimizer": optimizer}
    run = Run(args, "DDP, torchrun", device, state, lr, rank, world_size, dist.all_reduce)  # dist: all stop together
    run.resume()
    model = DistributedDataParallel(model)  # dist: starts from rank 0's weights, averages gradients in each backward
    model.broadcast_buffers = False  # dist: evaluate broadcasts them, where it matters, and not every forward
    for epoch in range(run.epoch, args.epochs):
        train.sampler.set_epoch(epoch, run.samples)  # another order in each epoch; a resumed one goes on where it was
        train_metrics = train_one_epoch(model, train, optimizer, lr, run)
        if run.stopping:
            break  # saved; --resume goes on within this epoch
        run.end_epoch(train_metrics, evaluate(model.module, val, run))  # dist: bare, as shares may be unequal
        if rank == 0:  # dist: one rank writes, for all
            run.log()
            run.save()


if __name__ == "__main__":
    main()
    gc.collect()  # dist: the DDP wrapper, in its cycles, goes before the group, or gloo can abort the process
    dist.destroy_process_group()  # dist: closes the connections; NCCL warns without
