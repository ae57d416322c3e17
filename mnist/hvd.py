"""Train on MNIST with Horovod, one process per device, started by horovodrun or mpirun.

    horovodrun -np 2 python mnist/hvd.py
    horovodrun --gloo -np 2 python mnist/hvd.py
    mpirun -np 2 --bind-to none -map-by slot python mnist/hvd.py --fp16-allreduce
    mpirun -np 2 --bind-to none -map-by slot python mnist/hvd.py --use-adasum

HOROVOD_TIMELINE=/tmp/timeline.json records the phases of each tensor's all-reduce, for chrome://tracing or Perfetto.
"""

import os
import sys
from pathlib import Path

import horovod.torch as hvd  # built by scripts/install_horovod.sh
import torch
import torch.nn.functional as F

os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")  # dist: a rank that waits for MPI frees its core
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
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as fp16")  # dist: half the bytes
    parser.add_argument("--use-adasum", action="store_true", help="reduce by Adasum")  # dist: instead of averaging
    return parser.parse_args()


def train_one_epoch(model, train, optimizer, lr, run):
    """Take one step per batch; return the loss and accuracy seen during training."""
    model.train()
    metrics = Metrics(run.device, before=run.sums)  # before: the sums of a resumed epoch, over all ranks
    for images, labels in run.progress(train):
        for group in optimizer.param_groups:  # in each step: warm-up, then a cosine to 0
            group["lr"] = schedule.warmup_cosine(run.args, lr, run.epoch + run.samples / len(train.dataset))
        optimizer.zero_grad()
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        metrics.update(loss, logits, labels)
        run.step(metrics)  # advances the position, which a checkpoint holds beside the weights
        if run.save_due and hvd.rank() == 0:  # dist: rank 0 writes; epoch's end, --checkpoint-every, or a signal
            run.save()
        if run.stopping:  # SIGTERM or SIGUSR1 on any rank: all ranks stop after this step, which is saved
            break
    hvd.allreduce_(metrics.sums, op=hvd.Sum)  # dist: sum over all ranks, then divide once
    return metrics.average(train.waited)


@torch.inference_mode()
def evaluate(model, val, run):
    """Return loss and accuracy over the whole validation set, each image once."""
    hvd.broadcast_parameters(dict(model.named_buffers()), root_rank=0)  # dist: BatchNorm's statistics differ
    model.eval()
    metrics = Metrics(run.device)
    for images, labels in run.progress(val):
        logits = model(images)
        metrics.update(F.cross_entropy(logits, labels), logits, labels)
    hvd.allreduce_(metrics.sums, op=hvd.Sum)  # dist: each rank evaluated only its share
    return metrics.average(val.waited)


def main():
    args = parse_args()
    processes.install_signal_handlers()  # Ctrl-C ends the run, unsaved; SIGTERM saves, then stops all ranks
    processes.die_with_parent()  # dist: else a rank waits forever when its launcher is killed
    train_set, val_set = datasets.mnist(args)
    hvd.init()  # dist: joins the processes that horovodrun or mpirun started
    rank, world_size = hvd.rank(), hvd.size()  # dist: over all machines
    device = flags.pick_device(args, hvd.local_rank(), hvd.local_size())  # dist: one device per process
    processes.share_cores(hvd.local_size())  # dist: else each process starts a thread per core
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)  # dist: else every rank opens a context on GPU 0
    if device.type != "cpu" and not hvd.nccl_built():  # dist: else it fails in the first step
        processes.fail("Horovod was built without NCCL: run scripts/install_horovod.sh again, or use --device cpu")
    averaged = hvd.local_size() if device.type != "cpu" else 1  # dist: with Adasum, NCCL averages on each machine
    if args.use_adasum and not (hvd.mpi_enabled() and (world_size // averaged).bit_count() == 1):  # dist: a power of 2
        processes.fail("--use-adasum needs MPI (mpirun, horovodrun --mpi) and 2, 4, 8... processes (NCCL: machines)")
    schedule.divide_batch(args, world_size)  # dist: all ranks share --global-batch-size
    train_sampler = EpochSampler(len(train_set), args.batch_size, args.seed, rank, world_size)  # dist: its own share
    val_sampler = range(rank, len(val_set), world_size)  # dist: each image once; DistributedSampler repeats some
    train = DataObject(train_set, train_sampler, args.batch_size, device)
    val = DataObject(val_set, val_sampler, args.test_batch_size, device)
    torch.manual_seed(args.seed)
    model = flags.to_device(models.MODELS[args.model](channels=1, size=28), args, device)
    model.to(memory_format=torch.contiguous_format)  # dist: Horovod sends only NCHW, --channels-last or not
    lr = args.lr * schedule.lr_factor(args, averaged if args.use_adasum else world_size)  # dist: larger batch
    optimizer = torch.optim.SGD(model.parameters(), lr, args.momentum, weight_decay=args.weight_decay, fused=True)
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), op=hvd.Adasum if args.use_adasum else hvd.Average,
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none)  # dist: averages gradients
    state = {"model": model, "optimizer": optimizer}
    run = Run(args, f"Horovod, {'MPI' if hvd.mpi_enabled() else 'Gloo'}", device, state, lr, rank, world_size,
              lambda sums: hvd.allreduce_(sums, op=hvd.Sum, name="sums"))  # dist: to stop together
    run.resume()  # only with --resume; a folder that holds another run is refused
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # dist: not broadcast_optimizer_state, which takes a step
    for epoch in range(run.epoch, args.epochs):
        train.sampler.set_epoch(epoch, run.samples)  # a new order each epoch; a resumed epoch continues
        train_metrics = train_one_epoch(model, train, optimizer, lr, run)
        if run.stopping:
            break  # it is saved: --resume continues within this epoch
        run.end_epoch(train_metrics, evaluate(model, val, run))
        if rank == 0:  # dist: only rank 0 writes
            run.log()
            run.save()


if __name__ == "__main__":
    main()
