"""Train on MNIST with fully_shard (FSDP2): each process holds a share of the weights, started by torchrun.

    torchrun --nproc-per-node=2 mnist/fsdp.py
    torchrun --nproc-per-node=2 mnist/fsdp.py --param-dtype bf16

Read it beside ddp_launch.py.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import datasets, flags, models, processes, schedule, sharded
from common.data import DataObject, EpochSampler
from common.metrics import Metrics
from common.run import Run


def parse_args():
    parser = flags.parser(__doc__, dataset="mnist")
    flags.add_data(parser)
    flags.add_training(parser, lrs={"convnet": 0.02, "lenet": 0.02}, epochs=5, batch_size=64)
    flags.add_sgd(parser, weight_decay=0)
    parser.add_argument(
        "--param-dtype", choices=("fp32", "bf16"), default="fp32"
    )  # fsdp: of gathered weights
    parser.add_argument(
        "--no-reshard-after-forward", action="store_false", dest="reshard"
    )  # fsdp: one all-gather less
    parser.add_argument(
        "--local-rank", type=int, help=argparse.SUPPRESS
    )  # dist: torch.distributed.launch passes it
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
        if run.save_due:  # epoch's end, --checkpoint-every, or a signal
            sharded.save(run)  # fsdp: on all ranks, as each has a share of what rank 0 saves
        if (
            run.stopping
        ):  # SIGTERM or SIGUSR1 on any rank: all ranks stop after this step, which is saved
            break
    dist.all_reduce(metrics.sums)  # dist: sum over all ranks, then divide once
    return metrics.average(train.waited)


@torch.no_grad()  # fsdp: not inference_mode(): the first forward makes FSDP's buffers, and can be this one
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
    sharded.even_out(
        model, val, run
    )  # fsdp: forward gathers weights, so all ranks have to call it equally often
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
    model.to(
        memory_format=torch.contiguous_format
    )  # fsdp: it refuses NHWC weights; the images stay NHWC
    mesh = dist.init_device_mesh(
        device.type, (world_size,)
    )  # fsdp: else it takes the GPU, also with --device cpu
    low, high = (
        (torch.bfloat16, torch.float32) if args.param_dtype == "bf16" else (None, None)
    )  # fsdp: None: fp32
    if low and (norms := [module for module in model.modules() if isinstance(module, _BatchNorm)]):
        fully_shard(norms, mesh=mesh)  # fsdp: BatchNorm stays fp32, like its running statistics
    for block in sharded.blocks(
        model
    ):  # fsdp: each is gathered when forward and backward reach it, and then freed
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy(low, high),
            reshard_after_forward=args.reshard,
        )
    fully_shard(
        model, mesh=mesh, mp_policy=MixedPrecisionPolicy(low, high, high)
    )  # fsdp: before the optimizer
    optimizer = torch.optim.SGD(
        model.parameters(), lr, args.momentum, weight_decay=args.weight_decay, fused=True
    )
    state = {"model": model, "optimizer": optimizer}
    sharded.set_up(
        model, optimizer
    )  # fsdp: foreach, as fused SGD takes no shards; and how to load them
    run = Run(
        args, "FSDP, torchrun", device, state, lr, rank, world_size, dist.all_reduce
    )  # dist: to stop together
    run.resume()  # only with --resume; a folder that holds another run is refused
    for epoch in range(run.epoch, args.epochs):
        train.sampler.set_epoch(
            epoch, run.samples
        )  # a new order each epoch; a resumed epoch continues
        train_metrics = train_one_epoch(model, train, optimizer, lr, run)
        if run.stopping:
            break  # it is saved: --resume continues within this epoch
        run.end_epoch(train_metrics, evaluate(model, val, run))  # fsdp: nothing is wrapped
        if rank == 0:  # dist: only rank 0 writes
            run.log()
        sharded.save(run)  # fsdp: all ranks give their shares


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # dist: closes the connections; NCCL warns without it
