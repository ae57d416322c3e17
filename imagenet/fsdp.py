"""Train on ImageNet with fully_shard (FSDP2): each process holds a shard of the weights.

    torchrun --nproc-per-node=2 imagenet/fsdp.py
    torchrun --nproc-per-node=2 imagenet/fsdp.py --param-dtype bf16

Read it beside ddp_launch.py.
"""

import math
import sys
from importlib import import_module
from pathlib import Path

# Import common/ and images/ from this folder or the one above it, and from nowhere else.
folder = Path(__file__).resolve().parent
sys.path[1:1] = [str(folder), str(folder.parent)]
for package in ("common", "images"):
    import_module(package)
# Then take the folder above off the path: a queue.py there would hide Python's own.
del sys.path[2]

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import default_collate

import jpegs  # beside this file; scripts/take.py copies it along
import networks
from common import devices, flags, schedule
from common.data import DataObject, EpochSampler
from common.fsdp import WholeModel, WholeOptimizer, blocks, share_out
from common.metrics import Sums
from common.process import launch
from common.ranks import World, require_same
from common.run import Run
from common.weights import init_from


def parse_args():
    parser = flags.Parser(__doc__, task="imagenet")
    jpegs.add_flags(parser)
    networks.add_flags(parser)
    flags.add_training_flags(
        parser,
        epochs=90,
        batch_size=256,
        lr=None,
        test_batch_size=256,
        warmup_epochs=5,
        weight_decay=1e-4,
    )
    add = parser.add_run_group()
    # dist: for small batches.
    add("--sync-bn", action="store_true", help="BatchNorm over the batches of all processes")
    # fsdp: the type of the gathered weights.
    add("--param-dtype", choices=("fp32", "bf16"), default="fp32", help="type of computation")
    # fsdp: saves an all-gather, takes more memory.
    add(
        "--no-reshard-after-forward",
        action="store_false",
        dest="reshard",
        help="keep the gathered weights until backward has used them",
    )
    args = parser.parse_args()
    if args.lr is None:
        args.lr = networks.LRS[args.model]
    if args.workers is None:
        args.workers = devices.cores_per_process()
    return args


def load_data(args, world):
    """Return a DataObject for training and one for validation."""
    train_set, val_set = jpegs.load(
        args.data_dir, args.synthetic, args.seed, args.image_size, args.loader
    )
    # dist: --global-batch-size is split over all ranks.
    batch_size = schedule.batch_size(args, world.size)
    # A step takes --accumulate batches.
    per_step = batch_size * args.accumulate
    # dist: each rank has its own share of a global batch; else all compute the same gradients.
    train_sampler = EpochSampler(len(train_set), per_step, world.rank, world.size, seed=args.seed)
    # dist: each image once; torch's DistributedSampler repeats some, which count twice.
    val_sampler = range(world.rank, len(val_set), world.size)
    train_loader = jpegs.loader(train_set, train_sampler, batch_size, args.workers, world.device)
    val_loader = jpegs.loader(
        val_set, val_sampler, args.test_batch_size, args.workers, world.device
    )
    train = DataObject(train_set, train_sampler, train_loader)
    return train, DataObject(val_set, val_sampler, val_loader)


def averages(loss, correct, correct5, images):
    """The mean loss (nats) and the accuracies, from the sums over all images."""
    return {"loss": loss / images, "accuracy": correct / images, "top5": correct5 / images}


def add_to(sums, loss, logits, labels):
    """Add a batch: its mean `loss` [], `logits` [batch, classes] and `labels` [batch]."""
    hits = logits.topk(min(5, logits.shape[1])).indices == labels.unsqueeze(1)
    count = len(labels)
    sums.add(loss=loss * count, correct=hits[:, 0].sum(), correct5=hits.sum(), images=count)


# fsdp: not inference_mode, as training reuses the memory of the gathered weights.
@torch.no_grad()
def evaluate(model, val, run):
    """Return the averages over the whole validation set, each image once."""
    # dist: BatchNorm's statistics differ between ranks: evaluate with rank 0's, as saved.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    sums = Sums(run.world.device, averages)
    for images, labels in run.batches(val.loader):
        logits = model(jpegs.normalise(images))
        loss = F.cross_entropy(logits, labels)
        add_to(sums, loss, logits, labels)
    # fsdp: each forward is a collective, so a rank with fewer batches calls it once more.
    samples_at_once = run.args.test_batch_size * run.world.size
    most = 1 if run.args.dry_run else math.ceil(len(val.dataset) / samples_at_once)
    if len(val.loader) < most:
        images, _ = default_collate([val.dataset[0]])
        model(jpegs.normalise(images.to(run.world.device)))
    # dist: each rank evaluated only its share: sum over all, then divide once.
    return sums.result(dist.all_reduce)


def connect(args):
    """Join the other processes; return the World of this one."""
    # dist: the LOCAL_RANK and LOCAL_WORLD_SIZE that torchrun sets.
    local_rank, local_world_size = launch.torchrun_env()
    # dist: one device per process, before init_process_group; else all open a context on GPU 0.
    device = devices.use(args, local_rank, local_world_size)
    # dist: Gloo for CPUs; with None torch picks the accelerator's backend, NCCL for CUDA.
    backend = "gloo" if device.type == "cpu" else None
    timeout = launch.group_timeout(args.timeout)
    # dist: all processes wait here for each other.
    dist.init_process_group(backend, timeout=timeout, device_id=device.index)
    # dist: only rank 0 writes files. Every few steps an all-reduce adds up the metrics, and tells
    # all ranks whether one got a signal, so that they stop after the same step.
    return World(device, dist.get_rank(), dist.get_world_size(), dist.all_reduce, "FSDP")


def shard(args, model, world):
    """Shard each weight of `model` over the ranks; it stays on the meta device."""
    # fsdp: by default it would use the GPU, even with --device cpu.
    mesh = dist.init_device_mesh(world.device.type, (world.size,))
    policy = MixedPrecisionPolicy()
    root_policy = policy
    if args.param_dtype == "bf16":
        # fsdp: correct but slow on a CPU without 16-bit units.
        devices.warn_if_slow(world, torch.bfloat16)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        # fsdp: the root returns logits in fp32, for the loss.
        root_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        if norms:
            # fsdp: BatchNorm stays fp32, like its running statistics.
            fully_shard(norms, mesh=mesh)
    for block in blocks(model):
        # fsdp: forward and backward gather one block at a time, use it, and free it.
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=args.reshard)
    fully_shard(model, mesh=mesh, mp_policy=root_policy)


def build(args, metadata, world):
    """Return the model, sharded over the ranks."""
    classes = len(metadata["classes"])
    # fsdp: only rank 0 has the full model, on the CPU: it may not fit on a device.
    whole = None
    if world.rank == 0:
        whole = networks.build(args.model, args.image_size, classes)
        init_from(args, whole, metadata, world)
    # fsdp: on the meta device weights take no memory.
    with torch.device("meta"):
        model = networks.build(args.model, args.image_size, classes)
    if args.sync_bn:
        # dist: normalise with the statistics of the global batch.
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    devices.adapt(model, args)  # --channels-last, --compile
    # fsdp: fully_shard does not support NHWC weights; the images stay NHWC.
    model.to(memory_format=torch.contiguous_format)
    # fsdp: before the optimizer, which then holds only this rank's shards.
    shard(args, model, world)
    # fsdp: each rank gets its shards of rank 0's weights.
    share_out(whole, model, world.device)
    return model


def main():
    args = parse_args()
    world = connect(args)
    networks.check(args, world.device)
    train, val = load_data(args, world)
    # dist: else machines with different files would silently train on them.
    require_same(world, train.dataset, val.dataset)
    torch.manual_seed(args.seed)
    metadata = jpegs.metadata(train.dataset)
    model = build(args, metadata, world)
    # dist: the global batch is world.size times larger, and the rate grows with it.
    lr = schedule.peak_lr(args, world.size)
    # fsdp: foreach, as fused SGD does not support shards.
    optimizer = torch.optim.SGD(
        networks.decay_groups(model, args.weight_decay), lr, args.momentum, foreach=True
    )
    rates = schedule.WarmupCosine(args.warmup_epochs, optimizer)
    # step() adds to them; run.steps() logs them over all ranks, and run.record() resets them.
    sums = Sums(world.device, averages)
    # A checkpoint holds the state of these objects, and the flags. Add your own.
    # fsdp: saved unsharded, so that any recipe can load it.
    state = {
        "model": WholeModel(model),
        "optimizer": WholeOptimizer(optimizer),
        "metadata": metadata,
    }
    # Locks the folder of the run, and loads the checkpoint of --resume into `state`.
    run = Run(args, world, state, sums, rates, train)
    world.say(*jpegs.origin(train.dataset, val.dataset))
    if args.evaluate:
        # The weights of --resume, or of --init-from.
        result = evaluate(model, val, run)
        world.say(f"{len(val.dataset):,} val images: {run.log.in_words(result)}")
        return

    def step(images, labels):
        # fsdp: one all-reduce per step, as no_sync() does.
        model.set_requires_gradient_sync(run.ends_step)
        logits = model(jpegs.normalise(images))
        loss = F.cross_entropy(logits, labels, label_smoothing=args.label_smoothing)
        (loss / args.accumulate).backward()
        add_to(sums, loss.detach(), logits, labels)
        if run.ends_step:
            optimizer.step()
            optimizer.zero_grad()

    # Until --epochs or --max-steps are done, a signal comes, or --dry-run has tried one step.
    while not run.over:
        model.train()
        # Yields batches up to the next evaluation, then saves. Data order, rate and random numbers
        # depend only on seed, position and rank, so a resumed run repeats them.
        for images, labels in run.steps(train):
            step(images, labels)
        # After SIGTERM or SIGUSR1 the run is over, and has been saved.
        if not run.over:
            result = evaluate(model, val, run)
            run.record(result, best=result["accuracy"])


if __name__ == "__main__":
    with launch.plain_exits():
        main()
        # dist: closes the connections; NCCL warns without it.
        dist.destroy_process_group()
