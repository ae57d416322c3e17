"""Train on ImageNet with DistributedDataParallel, one process per device, started by torchrun.

    torchrun --nproc-per-node=2 imagenet/ddp_launch.py
    python -m torch.distributed.launch --nproc-per-node=2 imagenet/ddp_launch.py
"""

import argparse
import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # dist: before init_process_group; imported later, it keeps the group alive
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
import jpegs  # beside this file
import networks
from common import flags, hooks, processes, schedule
from common.data import DataObject, EpochSampler
from common.metrics import Metrics
from common.run import Run


def parse_args():
    parser = flags.parser(__doc__, dataset="imagenet")
    jpegs.add_flags(parser)
    networks.add_flags(parser)
    parser.add_argument("--sync-bn", action="store_true", help="BatchNorm over all GPUs")  # dist: for small batches
    parser.add_argument("--comm-hook", choices=hooks.HOOKS, default="none", help="compression")  # dist: for slow links
    parser.add_argument("--powersgd-rank", type=flags.COUNT, default=2, metavar="COLUMNS")  # dist: fewer send less
    parser.add_argument("--local-rank", type=int, help=argparse.SUPPRESS)  # dist: torch.distributed.launch passes it
    return parser.parse_args()


def train_one_epoch(model, train, optimizer, lr, run):
    """Take one step per --accumulate batches; return the loss and accuracy seen during training."""
    model.train()
    metrics = Metrics(run.device, before=run.sums, top5=True)  # before: the sums of a resumed epoch, over all ranks
    for number, (images, labels) in enumerate(run.progress(train), 1):
        ends_step = number % run.accumulate == 0
        model.require_backward_grad_sync = ends_step  # dist: as no_sync() does: one all-reduce per step
        for group in optimizer.param_groups:  # in each step: warm-up, then a cosine to 0
            group["lr"] = schedule.warmup_cosine(run.args, lr, run.epoch + run.samples / len(train.dataset))
        logits = model(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=run.args.label_smoothing)
        (loss / run.accumulate).backward()
        metrics.update(loss, logits, labels)
        if not ends_step:
            continue
        optimizer.step()
        optimizer.zero_grad()
        run.step(metrics)  # advances the position, which a checkpoint holds beside the weights
        if run.save_due and dist.get_rank() == 0:  # dist: rank 0 writes; epoch's end, --checkpoint-every, or a signal
            run.save()
        if run.stopping:  # SIGTERM or SIGUSR1 on any rank: all ranks stop after this step, which is saved
            break
    dist.all_reduce(metrics.sums)  # dist: sum over all ranks, then divide once
    return metrics.average(train.waited)


@torch.inference_mode()
def evaluate(model, val, run):
    """Return loss and accuracy over the whole validation set, each image once."""
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)  # dist: BatchNorm's statistics differ; evaluate with rank 0's, which are saved
    model.eval()
    metrics = Metrics(run.device, top5=True)
    for images, labels in run.progress(val):
        logits = model(images)
        metrics.update(F.cross_entropy(logits, labels), logits, labels)
    dist.all_reduce(metrics.sums)  # dist: each rank evaluated only its share
    return metrics.average(val.waited)


def main():
    args = parse_args()
    processes.install_signal_handlers()  # Ctrl-C ends the run, unsaved; SIGTERM saves, then stops all ranks
    processes.die_with_parent()  # dist: else a rank waits forever when its launcher is killed
    train_set, val_set = jpegs.imagenet(args)
    local_rank, local_world_size = processes.torchrun_env()  # dist: torchrun sets both, for each machine
    device = flags.pick_device(args, local_rank, local_world_size)  # dist: one device per process
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)  # dist: first, or every rank opens a context on GPU 0
    dist.init_process_group("gloo" if device.type == "cpu" else None, device_id=device.index)  # dist: NCCL for CUDA
    rank, world_size = dist.get_rank(), dist.get_world_size()  # dist: over all machines
    schedule.divide_batch(args, world_size)  # dist: all ranks share --global-batch-size
    batch_size = args.batch_size * args.accumulate  # per step
    train_sampler = EpochSampler(len(train_set), batch_size, args.seed, rank, world_size)  # dist: its own share
    val_sampler = range(rank, len(val_set), world_size)  # dist: each image once; DistributedSampler repeats some
    train = DataObject(train_set, train_sampler, args.batch_size, device, args.workers)
    val = DataObject(val_set, val_sampler, args.test_batch_size, device, args.workers)
    torch.manual_seed(args.seed)
    model = networks.build(args, device, train_set.classes)
    if args.sync_bn:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)  # dist: statistics of the global batch
    lr = args.lr * schedule.lr_factor(args, world_size)  # dist: the global batch is world_size times larger
    optimizer = torch.optim.SGD(networks.decay_groups(model, args.weight_decay), lr, args.momentum, fused=True)
    state = {"model": model, "optimizer": optimizer}
    run = Run(args, "DDP, torchrun", device, state, lr, rank, world_size, dist.all_reduce)  # dist: to stop together
    run.resume()  # only with --resume; a folder that holds another run is refused
    if args.evaluate:
        networks.report(run, evaluate(model, val, run))
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)  # dist: averages gradients in backward
    model.broadcast_buffers = False  # dist: not in every forward: the wrapper has sent them once, evaluate() does again
    hooks.register(model, args)  # dist: with --comm-hook, gradients travel in fewer bytes
    for epoch in range(run.epoch, args.epochs):
        train.sampler.set_epoch(epoch, run.samples)  # a new order each epoch; a resumed epoch continues
        train_metrics = train_one_epoch(model, train, optimizer, lr, run)
        if run.stopping:
            break  # it is saved: --resume continues within this epoch
        run.end_epoch(train_metrics, evaluate(model.module, val, run))  # dist: unwrapped, as shares may differ in size
        if rank == 0:  # dist: only rank 0 writes
            run.log()
            run.save()


if __name__ == "__main__":
    main()
    gc.collect()  # dist: frees the model, in a cycle in torch 2.11; if it outlives the group, Gloo can abort
    dist.destroy_process_group()  # dist: closes the connections; NCCL warns without it
