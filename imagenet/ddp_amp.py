"""Train on ImageNet with DistributedDataParallel and torch.amp: matrix products in 16 bits, weights in 32.

    torchrun --nproc-per-node=2 imagenet/ddp_amp.py
    torchrun --nproc-per-node=2 imagenet/ddp_amp.py --amp-dtype fp16

Read it against ddp_launch.py.
"""

import argparse
import gc
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # common/ stands beside this file's folder
from common import data, files, flags, models, processes, schedule
from common.run import Run

AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # amp: fp16 has more digits, bf16 more range


def parse_args():
    parser = flags.parser(__doc__, dataset="imagenet", models=("resnet50", *models.classifiers(), *models.SMALL),
                          epochs=90, batch_size=256, lr=0.1, weight_decay=1e-4)
    flags.add_imagenet(parser)
    parser.add_argument("--sync-bn", action="store_true", help="BatchNorm over all GPUs")  # dist: for small batches
    parser.add_argument("--amp-dtype", choices=AMP_DTYPES, default="bf16", help="the 16-bit type")  # amp: see scaler
    parser.add_argument("--local-rank", type=int, help=argparse.SUPPRESS)  # dist: torch.distributed.launch passes it
    return parser.parse_args()


def train_one_epoch(model, train, optimizer, scheduler, run, scaler):  # amp: for fp16
    """One step per --accumulate batches; returns the loss and accuracy that the model had on the way."""
    model.train()
    metrics = run.metrics()
    for images, labels in run.batches(train, metrics):
        model.require_backward_grad_sync = run.ends_step  # dist: no_sync() does this: one all-reduce in a step
        with torch.autocast(run.device.type, AMP_DTYPES[run.args.amp_dtype]):  # amp: forward and loss, not backward
            logits = model(images)
            loss = F.cross_entropy(logits, labels, label_smoothing=run.args.label_smoothing)
        scaler.scale(loss / run.batches_in_step).backward()  # amp: or small fp16 gradients become 0; bf16 has the range
        if run.ends_step:
            scaler.step(optimizer)  # amp: leaves the step out if a gradient overflowed ...
            scaler.update()  # amp: ... and scales by less from then on
            scheduler.step()
            optimizer.zero_grad()
        metrics.update(loss, logits, labels)
    return metrics.average()


@torch.inference_mode()
def evaluate(model, val, run):
    """Loss and accuracy over the whole validation set, each image once."""
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)  # dist: BatchNorm's statistics differ by rank; evaluate those that rank 0 saves
    model.eval()
    metrics = run.metrics()
    for images, labels in run.batches(val, metrics):
        with torch.autocast(run.device.type, AMP_DTYPES[run.args.amp_dtype]):  # amp: as in training
            logits = model(images)
        metrics.update(F.cross_entropy(logits, labels), logits, labels)
    return metrics.average()


def main():
    args = parse_args()
    local_rank, local_world_size = processes.launched()  # dist: to take a device, and a share of the cores
    device = flags.pick_device(args, local_rank, local_world_size)  # dist: a device per process
    timeout = timedelta(hours=2)  # dist: enough for a download; in training --timeout rules
    if device.type == "cuda":
        torch.cuda.set_device(device)  # dist: before the group is made, or every rank opens a context on GPU 0
        dist.init_process_group("nccl", device_id=device, timeout=timeout)  # dist: or NCCL guesses its GPU
    else:
        dist.init_process_group("gloo", timeout=timeout)  # dist: returns when all have come to MASTER_ADDR:MASTER_PORT
    rank, world_size = dist.get_rank(), dist.get_world_size()  # dist: over all machines
    launcher = "torchrun" if args.local_rank is None else "torch.distributed.launch"  # dist: for the first line
    run = Run(args, "DDP + torch.amp", launcher, device, rank, world_size, dist.all_reduce)  # amp: for the first line
    if local_rank == 0:
        files.download(args)  # dist: one process per machine downloads ...
    dist.barrier()  # dist: ... while the others wait
    train, val = data.imagenet(args, device, rank, world_size)  # dist: each rank reads a share of its own
    model = models.build(args, channels=3, size=args.image_size, classes=train.classes).to(device)
    if args.sync_bn:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)  # dist: statistics of the global batch
    lr = args.lr * schedule.lr_factor(args, world_size)  # dist: the global batch is world_size times as large
    optimizer = torch.optim.SGD(models.decay_groups(model, args.weight_decay), lr, momentum=args.momentum)
    scheduler = schedule.warmup_cosine(optimizer, args, len(train))
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp_dtype == "fp16")  # amp: bf16 takes no scaling
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}  # amp: its scale too
    start_epoch = run.start(state)
    if args.evaluate:
        return run.end_evaluation(evaluate(model, val, run))
    model = DistributedDataParallel(model)  # dist: starts from rank 0's weights, averages gradients in each backward
    for epoch in range(start_epoch, args.epochs):
        train.sampler.set_epoch(epoch)  # another order in each epoch
        train_metrics = train_one_epoch(model, train, optimizer, scheduler, run, scaler)  # amp: for fp16
        run.end_epoch(epoch, train_metrics, evaluate(model.module, val, run))  # dist: DDP needs equal batch counts


if __name__ == "__main__":
    main()
    gc.collect()  # dist: the DDP wrapper, in its cycles, goes before the group, or gloo can abort the process
    dist.destroy_process_group()  # dist: closes the connections; NCCL warns without
