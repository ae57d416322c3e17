"""Train on MNIST with NVIDIA Apex: its mixed precision and its DistributedDataParallel. Needs a GPU.

    torchrun --nproc-per-node=2 mnist/apex_amp.py
    torchrun --nproc-per-node=2 mnist/apex_amp.py --opt-level O2

Read it against ddp_launch.py. Tag 25.05 of Apex is the last that has amp and parallel; ddp_amp.py does the same with
torch alone. With O2 and O3 a resumed run goes on from weights that were rounded to fp16.
"""

import argparse
import gc
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # common/ stands beside this file's folder
from common import data, files, flags, models, processes, schedule
from common.run import Run

amp = flags.require("apex.amp", "initialize", flags.APEX)  # amp: an import that says in one line what is missing
parallel = flags.require("apex.parallel", "DistributedDataParallel", flags.APEX)  # amp: Apex's own wrapper
flags.require_gpu("Apex")  # amp: it refuses tensors on the CPU


def parse_args():
    parser = flags.parser(__doc__, dataset="mnist", models=("convnet", "lenet"),
                          epochs=5, batch_size=64, lr=0.02, weight_decay=0)
    parser.add_argument("--opt-level", choices=("O0", "O1", "O2", "O3"), default="O1",
                        help="O0 fp32, O1 fp16 where safe, O2 fp16 with fp32 master weights, O3 fp16")  # amp: how much
    parser.add_argument("--local-rank", type=int, help=argparse.SUPPRESS)  # dist: torch.distributed.launch passes it
    return parser.parse_args()


def train_one_epoch(model, train, optimizer, scheduler, run):
    """One step per batch; returns the loss and accuracy that the model had on the way."""
    model.train()
    metrics = run.metrics()
    for images, labels in run.batches(train, metrics):
        optimizer.zero_grad()
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()  # amp: small fp16 gradients would be 0 without
        optimizer.step()
        scheduler.step()
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
    run = Run(args, f"Apex {args.opt_level}", launcher, device, rank, world_size, dist.all_reduce)  # amp: level
    if local_rank == 0:
        files.download(args)  # dist: one process per machine downloads ...
    dist.barrier()  # dist: ... while the others wait
    train, val = data.mnist(args, device, rank, world_size)  # dist: each rank reads a share of its own
    model = models.build(args, channels=1, size=28).to(device)
    lr = args.lr * schedule.lr_factor(args, world_size)  # dist: the global batch is world_size times as large
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=args.momentum, weight_decay=args.weight_decay)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, verbosity=0)  # amp: before DDP
    scheduler = schedule.warmup_cosine(optimizer, args, len(train))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "amp": amp}  # amp: its scale
    start_epoch = run.start(state)
    model = parallel.DistributedDataParallel(model)  # amp: the same, by Apex, for its fp16 gradients
    for epoch in range(start_epoch, args.epochs):
        train.sampler.set_epoch(epoch)  # another order in each epoch
        train_metrics = train_one_epoch(model, train, optimizer, scheduler, run)
        run.end_epoch(epoch, train_metrics, evaluate(model.module, val, run))  # dist: DDP needs equal batch counts


if __name__ == "__main__":
    main()
    gc.collect()  # dist: the DDP wrapper, in its cycles, goes before the group, or gloo can abort the process
    dist.destroy_process_group()  # dist: closes the connections; NCCL warns without
