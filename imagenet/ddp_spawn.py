"""Train on ImageNet with DistributedDataParallel, one process per device, started by mp.spawn.

    python imagenet/ddp_spawn.py -g 2
    MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python imagenet/ddp_spawn.py -n 2 -g 1 -nr 0
    MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python imagenet/ddp_spawn.py -n 2 -g 1 -nr 1

The last two make one run: start one on each of two machines, with the address of the first.
"""

import gc
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # common/ stands beside this file's folder
from common import data, failures, files, flags, models, processes, schedule
from common.run import Run


def parse_args():
    parser = flags.parser(__doc__, dataset="imagenet", models=("resnet50", *models.classifiers(), *models.SMALL),
                          epochs=90, batch_size=256, lr=0.1, weight_decay=1e-4)
    flags.add_imagenet(parser)
    parser.add_argument("--sync-bn", action="store_true", help="BatchNorm over all GPUs")  # dist: for small batches
    parser.add_argument("-n", "--nodes", type=flags.number(int, 1), default=1, help="machines")  # dist: world size
    parser.add_argument("-g", "--gpus", type=flags.number(int, 1), default=max(1, torch.cuda.device_count()),
                        help="processes on each machine, one per GPU")  # dist: on the CPU as many as asked for
    parser.add_argument("-nr", "--nr", type=flags.number(int, 0), default=0, help="this machine, from 0")  # dist: rank
    return parser.parse_args()


def train_one_epoch(model, train, optimizer, scheduler, run):
    """One step per --accumulate batches; returns the loss and accuracy that the model had on the way."""
    model.train()
    metrics = run.metrics()
    for images, labels in run.batches(train, metrics):
        model.require_backward_grad_sync = run.ends_step  # dist: no_sync() does this: one all-reduce in a step
        logits = model(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=run.args.label_smoothing)
        (loss / run.batches_in_step).backward()
        if run.ends_step:
            optimizer.step()
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
        logits = model(images)
        metrics.update(F.cross_entropy(logits, labels), logits, labels)
    return metrics.average()


def main(local_rank, args):  # dist: what each process that mp.spawn starts calls, with its number
    rank, world_size = args.nr * args.gpus + local_rank, args.nodes * args.gpus  # dist: over all machines
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))  # dist: where init_process_group looks for them
    processes.end_with_parent()  # dist: or a rank waits for ever for others that are gone
    device = flags.pick_device(args, local_rank, args.gpus)  # dist: a device per process
    timeout = timedelta(hours=2)  # dist: enough for a download; in training --timeout rules
    if device.type == "cuda":
        torch.cuda.set_device(device)  # dist: before the group is made, or every rank opens a context on GPU 0
        dist.init_process_group("nccl", device_id=device, timeout=timeout)  # dist: or NCCL guesses its GPU
    else:
        dist.init_process_group("gloo", timeout=timeout)  # dist: returns when all have come to MASTER_ADDR:MASTER_PORT
    run = Run(args, "DDP", "mp.spawn", device, rank, world_size, dist.all_reduce)  # dist: for sums over all ranks
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
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    start_epoch = run.start(state)
    if args.evaluate:
        return run.end_evaluation(evaluate(model, val, run))
    model = DistributedDataParallel(model)  # dist: starts from rank 0's weights, averages gradients in each backward
    for epoch in range(start_epoch, args.epochs):
        train.sampler.set_epoch(epoch)  # another order in each epoch
        train_metrics = train_one_epoch(model, train, optimizer, scheduler, run)
        run.end_epoch(epoch, train_metrics, evaluate(model.module, val, run))  # dist: DDP needs equal batch counts
    del model  # dist: the DDP wrapper goes before the group, or gloo can abort the process ...
    gc.collect()  # dist: ... and it sits in reference cycles
    dist.destroy_process_group()  # dist: closes the connections; NCCL warns without


if __name__ == "__main__":
    args = parse_args()  # dist: once, in the process that starts the others
    flags.pick_device(args, 0, args.gpus)  # dist: too few GPUs are one line here, not one from each process
    if args.nr >= args.nodes:  # dist: else the others would wait for a rank that is not there
        failures.fail(f"-nr {args.nr}: the machines of -n {args.nodes} are numbered from 0 to {args.nodes - 1}")
    if args.nodes > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():  # dist: to find each other
        failures.fail("-n: set MASTER_ADDR and MASTER_PORT to the first machine's address and a free port on it")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # dist: where the processes meet
    os.environ.setdefault("MASTER_PORT", str(processes.free_port()))  # dist: on one machine any free port will do
    if args.nr == 0:
        processes.check_port()  # dist: rank 0 listens there, and would say in many lines that it cannot
    with processes.signals_ignored():  # dist: by the new processes, which this one ends on Ctrl-C
        context = mp.spawn(main, args=(args,), nprocs=args.gpus, join=False)  # dist: calls main in new processes
    processes.join(context)  # dist: until all of them have ended, or one has failed
