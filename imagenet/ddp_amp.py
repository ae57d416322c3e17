"""Train on ImageNet with DistributedDataParallel and torch.amp: products in 16 bits, weights in 32.

    torchrun --nproc-per-node=2 imagenet/ddp_amp.py
    torchrun --nproc-per-node=2 imagenet/ddp_amp.py --amp-dtype fp16

Read it beside ddp_launch.py.
"""

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
from torch.nn.parallel import DistributedDataParallel

import jpegs  # beside this file; scripts/take.py copies it along
import networks
from common import devices, flags, graph, schedule
from common.data import DataObject, EpochSampler
from common.metrics import Sums
from common.process import launch
from common.ranks import World, require_same
from common.run import Run
from common.weights import init_from

# amp: fp16 has more precision, bf16 more range.
AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


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
    graph.add_flag(parser)
    # amp: fp16 or bf16.
    add = parser.add_run_group()
    # dist: for small batches.
    add("--sync-bn", action="store_true", help="BatchNorm over the batches of all processes")
    add("--amp-dtype", choices=AMP_DTYPES, default="bf16", help="16-bit type of products")
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


@torch.inference_mode()
def evaluate(model, val, run):
    """Return the averages over the whole validation set, each image once."""
    # dist: BatchNorm's statistics differ between ranks: evaluate with rank 0's, as saved.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    sums = Sums(run.world.device, averages)
    for images, labels in run.batches(val.loader):
        # amp: as in training; the loss in fp32.
        with torch.autocast(run.world.device.type, AMP_DTYPES[run.args.amp_dtype]):
            logits = model(jpegs.normalise(images)).float()
        loss = F.cross_entropy(logits, labels)
        add_to(sums, loss, logits, labels)
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
    return World(device, dist.get_rank(), dist.get_world_size(), dist.all_reduce, "DDP + torch.amp")


def main():
    args = parse_args()
    world = connect(args)
    networks.check(args, world.device)
    train, val = load_data(args, world)
    # dist: else machines with different files would silently train on them.
    require_same(world, train.dataset, val.dataset)
    torch.manual_seed(args.seed)
    metadata = jpegs.metadata(train.dataset)
    classes = len(metadata["classes"])
    model = networks.build(args.model, args.image_size, classes).to(world.device)
    if args.sync_bn:
        # dist: normalise with the statistics of the global batch.
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    init_from(args, model, metadata, world)
    devices.adapt(model, args)  # --channels-last, --compile
    # dist: the global batch is world.size times larger, and the rate grows with it.
    lr = schedule.peak_lr(args, world.size)
    optimizer = torch.optim.SGD(
        networks.decay_groups(model, args.weight_decay), lr, args.momentum, fused=True
    )
    # amp: else fused SGD's momentum is uninitialised if the scaler skips the first step.
    for group in optimizer.param_groups:
        for weight in group["params"]:
            optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    # dist: averages gradients over all ranks while backward still computes others.
    # It also copies rank 0's weights to all ranks.
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    # dist: evaluate() broadcasts BatchNorm's statistics, so forward need not. As an attribute:
    # torch 2.14 deprecates the argument, and older versions lack its replacement.
    ddp_model.broadcast_buffers = False
    amp_dtype = AMP_DTYPES[args.amp_dtype]
    # amp: correct but slow on a CPU without 16-bit units.
    devices.warn_if_slow(world, amp_dtype)
    # amp: fp16 needs loss scaling; bf16 has the range of fp32 and does not.
    scaler = torch.amp.GradScaler(world.device.type, enabled=args.amp_dtype == "fp16")
    rates = schedule.WarmupCosine(args.warmup_epochs, optimizer)
    # step() adds to them; run.steps() logs them over all ranks, and run.record() resets them.
    sums = Sums(world.device, averages)
    # A checkpoint holds the state of these objects, and the flags. Add your own.
    # dist: the model without its wrapper, so that any recipe can load it.
    state = {"model": model, "optimizer": optimizer, "metadata": metadata}
    # amp: so that a resumed run keeps the loss scale.
    state["scaler"] = scaler
    # Locks the folder of the run, and loads the checkpoint of --resume into `state`.
    # amp: the checkpoint may be from a recipe without a scaler.
    run = Run(args, world, state, sums, rates, train, optional=["scaler"])
    world.say(*jpegs.origin(train.dataset, val.dataset))
    if args.evaluate:
        # The weights of --resume, or of --init-from.
        result = evaluate(model, val, run)
        world.say(f"{len(val.dataset):,} val images: {run.log.in_words(result)}")
        return

    def step(images, labels):
        # dist: one all-reduce per step, as no_sync() does.
        ddp_model.require_backward_grad_sync = run.ends_step
        # amp: around forward and loss only, not backward.
        with torch.autocast(world.device.type, amp_dtype):
            # dist: through the wrapper; else no gradient is averaged.
            logits = ddp_model(jpegs.normalise(images))
            loss = F.cross_entropy(logits, labels, label_smoothing=args.label_smoothing)
        # amp: else small fp16 gradients underflow to 0.
        scaler.scale(loss / args.accumulate).backward()
        add_to(sums, loss.detach(), logits, labels)
        if run.ends_step:
            # amp: skips the step if a gradient overflowed; update() then lowers the scale.
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    if args.cuda_graph:
        step = graph.Captured(step, world, optimizer)
    # Until --epochs or --max-steps are done, a signal comes, or --dry-run has tried one step.
    while not run.over:
        model.train()
        # Yields batches up to the next evaluation, then saves. Data order, rate and random numbers
        # depend only on seed, position and rank, so a resumed run repeats them.
        for images, labels in run.steps(train):
            step(images, labels)
        # After SIGTERM or SIGUSR1 the run is over, and has been saved.
        if not run.over:
            # dist: without the wrapper: there are no gradients to average.
            result = evaluate(model, val, run)
            run.record(result, best=result["accuracy"])


if __name__ == "__main__":
    with launch.plain_exits():
        main()
        # dist: closes the connections; NCCL warns without it.
        dist.destroy_process_group()
