"""Train on ImageNet with Horovod, one process per device, started by horovodrun or mpirun.

    horovodrun -np 2 python imagenet/hvd.py
    horovodrun --gloo -np 2 python imagenet/hvd.py
    mpirun -np 2 --bind-to none python imagenet/hvd.py --fp16-allreduce
    mpirun -np 2 --bind-to none python imagenet/hvd.py --use-adasum

HOROVOD_TIMELINE=/tmp/timeline.json records each tensor's way through the all-reduce, for chrome://tracing or Perfetto.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # common/ stands beside this file's folder
from common import data, failures, files, flags, models, schedule
from common.run import Run

hvd = flags.require("horovod.torch", "init", flags.HOROVOD)  # dist: an import that says in one line what is missing


def parse_args():
    parser = flags.parser(__doc__, dataset="imagenet", models=("resnet50", *models.classifiers(), *models.SMALL),
                          epochs=90, batch_size=256, lr=0.1, weight_decay=1e-4)
    flags.add_imagenet(parser)
    parser.add_argument("--sync-bn", action="store_true", help="BatchNorm over all GPUs")  # dist: for small batches
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as fp16")  # dist: half the bytes
    parser.add_argument("--use-adasum", action="store_true", help="reduce by Adasum")  # dist: instead of the average
    return parser.parse_args()


def train_one_epoch(model, train, optimizer, scheduler, run):
    """One step per --accumulate batches; returns the loss and accuracy that the model had on the way."""
    model.train()
    metrics = run.metrics()
    for images, labels in run.batches(train, metrics):
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
    hvd.broadcast_parameters(dict(model.named_buffers()), root_rank=0)  # dist: BatchNorm's statistics differ by rank
    model.eval()
    metrics = run.metrics()
    for images, labels in run.batches(val, metrics):
        logits = model(images)
        metrics.update(F.cross_entropy(logits, labels), logits, labels)
    return metrics.average()


def main():
    args = parse_args()
    hvd.init()  # dist: joins the processes that horovodrun or mpirun started
    device = flags.pick_device(args, hvd.local_rank(), hvd.local_size())  # dist: a device per process
    if device.type == "cuda":
        torch.cuda.set_device(device)  # dist: or every rank computes on GPU 0
    local_mean = hvd.local_size() if device.type == "cuda" and hvd.nccl_built() else 1  # dist: NCCL averages a machine
    if args.use_adasum and not (hvd.mpi_enabled() and (hvd.size() // local_mean).bit_count() == 1):  # dist: its limits
        failures.fail("--use-adasum needs MPI (mpirun, horovodrun --mpi) and 2, 4, 8... processes (with NCCL machines)")
    run = Run(args, "Horovod", "MPI" if hvd.mpi_enabled() else "horovodrun --gloo", device, hvd.rank(), hvd.size(),
              lambda sums: hvd.allreduce_(sums, op=hvd.Sum, name="sums"))  # dist: for sums over all ranks
    if hvd.local_rank() == 0:
        files.download(args)  # dist: one process per machine downloads ...
    hvd.barrier()  # dist: ... while the others wait
    train, val = data.imagenet(args, device, hvd.rank(), hvd.size())  # dist: each rank reads a share of its own
    model = models.build(args, channels=3, size=args.image_size, classes=train.classes).to(device)
    if args.sync_bn:
        model = models.replace_batch_norm(model, hvd.SyncBatchNorm)  # dist: statistics of the global batch
    lr = args.lr * schedule.lr_factor(args, local_mean if args.use_adasum else hvd.size())  # dist: batches in a step
    optimizer = torch.optim.SGD(models.decay_groups(model, args.weight_decay), lr, momentum=args.momentum)
    how = {"compression": hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
           "backward_passes_per_step": args.accumulate,  # dist: one all-reduce in a step
           "op": hvd.Adasum if args.use_adasum else hvd.Average}  # dist: how the gradients travel and combine
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **how)  # dist: step() waits for all ranks
    scheduler = schedule.warmup_cosine(optimizer, args, len(train))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    start_epoch = run.start(state)
    if args.evaluate:
        return run.end_evaluation(evaluate(model, val, run))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # dist: rank 0's weights; all have loaded the momentum
    for epoch in range(start_epoch, args.epochs):
        train.sampler.set_epoch(epoch)  # another order in each epoch
        train_metrics = train_one_epoch(model, train, optimizer, scheduler, run)
        run.end_epoch(epoch, train_metrics, evaluate(model, val, run))


if __name__ == "__main__":
    main()
