"""Train on MNIST with DistributedDataParallel and torch.amp: matrix products in 16 bits, weights in 32.

    torchrun --nproc-per-node=2 mnist/ddp_amp.py
    torchrun --nproc-per-node=2 mnist/ddp_amp.py --amp-dtype fp16

Read it beside ddp_launch.py.
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
from common import datasets, flags, hooks, models, processes, schedule
from common.data import DataObject, EpochSampler
from common.metrics import Metrics
from common.run import Run

AMP_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}  # amp: fp16 has more digits, bf16 more range


def parse_args():
    parser = flags.parser(__doc__, dataset="mnist")
    flags.add_data(parser)
    flags.add_training(parser, lrs={"convnet": 0.02, "lenet": 0.02}, epochs=5, batch_size=64)
    flags.add_sgd(parser, weight_decay=0)
    parser.add_argument(
        "--amp-dtype", choices=AMP_DTYPES, default="bf16", help="the 16-bit type"
    )  # amp: fp16 or bf16
    parser.add_argument(
        "--comm-hook", choices=hooks.HOOKS, default="none", help="compression"
    )  # dist: for slow links
    parser.add_argument(
        "--powersgd-rank", type=flags.COUNT, default=2, metavar="COLUMNS"
    )  # dist: fewer send less
    parser.add_argument(
        "--local-rank", type=int, help=argparse.SUPPRESS
    )  # dist: torch.distributed.launch passes it
    return parser.parse_args()


def train_one_epoch(model, train, optimizer, lr, run):
    """Take one step per batch; return the loss and accuracy seen during training."""
    model.train()
    scaler = run.state["scaler"]  # amp: scales the loss, for fp16
    metrics = Metrics(
        run.device, before=run.sums
    )  # before: the sums of a resumed epoch, over all ranks
    for images, labels in run.progress(train):
        for group in optimizer.param_groups:  # in each step: warm-up, then a cosine to 0
            group["lr"] = schedule.warmup_cosine(
                run.args, lr, run.epoch + run.samples / len(train.dataset)
            )
        optimizer.zero_grad()
        with torch.autocast(
            run.device.type, AMP_DTYPES[run.args.amp_dtype]
        ):  # amp: forward and loss only
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        scaler.scale(loss).backward()  # amp: else small fp16 gradients become 0; bf16 has the range
        scaler.step(optimizer)  # amp: skips the step if a gradient overflowed ...
        scaler.update()  # amp: ... and then lowers the scale
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
        with torch.autocast(
            run.device.type, AMP_DTYPES[run.args.amp_dtype]
        ):  # amp: as in training; the loss in fp32
            logits = model(images).float()
        metrics.update(F.cross_entropy(logits, labels), logits, labels)
    dist.all_reduce(metrics.sums)  # dist: each rank evaluated only its share
    return metrics.average(val.waited)


def main():
    args = parse_args()
    processes.install_signal_handlers()  # Ctrl-C ends the run, unsaved; SIGTERM saves, then stops all ranks
    processes.die_with_parent()  # dist: else a rank waits forever when its launcher is killed
    train_set, val_set = datasets.mnist(args)
    local_rank, local_world_size = (
        processes.torchrun_env()
    )  # dist: torchrun sets both, for each machine
    device = flags.pick_device(args, local_rank, local_world_size)  # dist: one device per process
    if device.type != "cpu":
        torch.accelerator.set_device_index(
            device.index
        )  # dist: first, or every rank opens a context on GPU 0
    dist.init_process_group(
        "gloo" if device.type == "cpu" else None, device_id=device.index
    )  # dist: NCCL for CUDA
    rank, world_size = dist.get_rank(), dist.get_world_size()  # dist: over all machines
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
    for weight in (
        model.parameters()
    ):  # amp: fused SGD starts from garbage if the scaler skips its first step
        optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    state = {"model": model, "optimizer": optimizer}
    state["scaler"] = torch.amp.GradScaler(
        device.type, enabled=args.amp_dtype == "fp16"
    )  # amp: bf16 needs none
    run = Run(
        args, "DDP + torch.amp, torchrun", device, state, lr, rank, world_size, dist.all_reduce
    )  # amp: the name
    run.resume()  # only with --resume; a folder that holds another run is refused
    model = DistributedDataParallel(
        model, gradient_as_bucket_view=True
    )  # dist: averages gradients in backward
    model.broadcast_buffers = (
        False  # dist: not in every forward: the wrapper has sent them once, evaluate() does again
    )
    hooks.register(model, args)  # dist: with --comm-hook, gradients travel in fewer bytes
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


if __name__ == "__main__":
    main()
    gc.collect()  # dist: frees the model, in a cycle in torch 2.11; if it outlives the group, Gloo can abort
    dist.destroy_process_group()  # dist: closes the connections; NCCL warns without it
