"""Train on ImageNet with Horovod, one process per device, started by horovodrun or mpirun.

    horovodrun -np 2 python imagenet/hvd.py
    horovodrun --gloo -np 2 python imagenet/hvd.py --amp-dtype bf16
    mpirun -np 2 --bind-to none --map-by slot python imagenet/hvd.py --fp16-allreduce
    mpirun -np 2 --bind-to none --map-by slot python imagenet/hvd.py --use-adasum

Read it beside single.py. HOROVOD_TIMELINE=/tmp/timeline.json records the phases of each tensor's
all-reduce, for chrome://tracing or Perfetto.
"""

import os
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
import torch.nn.functional as F

# dist: --help works without Horovod; connect() says how to get it.
try:
    import horovod.torch as hvd
except ModuleNotFoundError:
    hvd = None

# dist: let a rank that waits in MPI yield its core.
os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")

import jpegs  # beside this file; scripts/take.py copies it along
import networks
from common import devices, flags, schedule
from common.data import DataObject, EpochSampler
from common.errors import InputError
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
    add = parser.add_run_group()
    # dist: for small batches.
    add("--sync-bn", action="store_true", help="BatchNorm over the batches of all processes")
    # dist: halves the bytes to send.
    add("--fp16-allreduce", action="store_true", help="send gradients as fp16")
    # dist: instead of averaging.
    add("--use-adasum", action="store_true", help="reduce gradients by Adasum")
    # amp: as in ddp_amp.py, but fp32 by default.
    add("--amp-dtype", choices=AMP_DTYPES, help="16-bit type of products, with torch.amp")
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


# amp: inside, products are in 16 bits, and the loss is in fp32.
def autocast(args, device):
    """torch.amp's context for --amp-dtype; it does nothing without the flag."""
    return torch.autocast(device.type, AMP_DTYPES.get(args.amp_dtype), args.amp_dtype is not None)


# dist: scaler.step(optimizer) alone would check for overflows before the all-reduce is done, so
# that some ranks would skip a step that others take.
def take_step(optimizer, scaler):
    """Wait for the gradients of all ranks, and take a step with them."""
    # Adasum always takes this path: its optimizer has no synchronize().
    if not scaler.is_enabled():
        optimizer.step()
        return
    # dist: waits for the all-reduces that backward has started.
    optimizer.synchronize()
    # amp: divides by the scale, and finds the same overflows on all ranks. Clip after this.
    scaler.unscale_(optimizer)
    # dist: else step() would all-reduce once more.
    with optimizer.skip_synchronize():
        # amp: skips the step if a gradient overflowed; update() then lowers the scale.
        scaler.step(optimizer)
    scaler.update()


# dist: sums in place, like dist.all_reduce.
def all_reduce(tensor):
    # dist: with a name, Horovod negotiates only the first time.
    hvd.allreduce_(tensor, op=hvd.Sum, name=f"sums of {tensor.numel()}")


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
    hvd.broadcast_parameters(dict(model.named_buffers()), root_rank=0)
    model.eval()
    sums = Sums(run.world.device, averages)
    for images, labels in run.batches(val.loader):
        # amp: as in training.
        with autocast(run.args, run.world.device):
            logits = model(jpegs.normalise(images))
            loss = F.cross_entropy(logits, labels)
        add_to(sums, loss, logits, labels)
    # dist: each rank evaluated only its share: sum over all, then divide once.
    return sums.result(all_reduce)


# dist: Horovod may have been built without support for these flags.
def check_horovod(args, device):
    """Raise InputError if this build of Horovod cannot do what the flags ask for."""
    if device.type != "cpu" and not hvd.nccl_built():
        raise InputError(
            "Horovod was built without NCCL: run scripts/install_horovod.sh again, "
            "or use --device cpu"
        )
    if args.use_adasum and args.amp_dtype == "fp16":
        raise InputError("--use-adasum takes no scaled gradients: use --amp-dtype bf16 with it")
    groups = hvd.size() // averaged(args, device)
    if args.use_adasum and not (hvd.mpi_enabled() and groups.bit_count() == 1):
        raise InputError(
            "--use-adasum needs MPI (mpirun, horovodrun --mpi) and 2, 4, 8... processes "
            "(with NCCL: machines)"
        )


# dist: the rate grows with the number of gradients averaged. Adasum averages none, or with NCCL
# only those of one machine.
def averaged(args, device):
    """The number of gradients averaged into one."""
    if not args.use_adasum:
        return hvd.size()
    return hvd.local_size() if device.type != "cpu" else 1


def connect(args):
    """Join the other processes; return the World of this one."""
    # dist: no package index has Horovod built.
    if hvd is None:
        raise InputError("Horovod is not installed: run scripts/install_horovod.sh")
    # dist: all processes that horovodrun or mpirun started wait here for each other.
    hvd.init()
    # dist: one device per process; else all open a context on GPU 0.
    device = devices.use(args, hvd.local_rank(), hvd.local_size())
    # dist: check the build before downloading a data set.
    check_horovod(args, device)
    # dist: Horovod's transport, for the log.
    kind = "MPI" if hvd.mpi_enabled() else "Gloo"
    # dist: only rank 0 writes files. Every few steps an all-reduce adds up the metrics, and tells
    # all ranks whether one got a signal, so that they stop after the same step.
    return World(device, hvd.rank(), hvd.size(), all_reduce, f"Horovod, {kind}")


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
        model = networks.replace_batch_norm(model, hvd.SyncBatchNorm)
    init_from(args, model, metadata, world)
    devices.adapt(model, args)  # --channels-last, --compile
    # dist: Horovod cannot send weights in NHWC; with --channels-last only the images have it.
    model.to(memory_format=torch.contiguous_format)
    # dist: the global batch is world.size times larger, and the rate grows with it.
    lr = schedule.peak_lr(args, averaged(args, world.device))
    optimizer = torch.optim.SGD(
        networks.decay_groups(model, args.weight_decay), lr, args.momentum, fused=True
    )
    # dist: averages gradients over all ranks while backward still computes others.
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        model.named_parameters(),
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        # dist: one all-reduce per step.
        backward_passes_per_step=args.accumulate,
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    )
    # dist: all start with rank 0's weights. No broadcast_optimizer_state: with a fresh SGD it takes
    # a step, which changes the weights.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if args.amp_dtype:
        # amp: correct but slow on a CPU without 16-bit units.
        devices.warn_if_slow(world, AMP_DTYPES[args.amp_dtype])
    # amp: fp16 needs loss scaling; bf16 has the range of fp32 and does not.
    scaler = torch.amp.GradScaler(world.device.type, enabled=args.amp_dtype == "fp16")
    rates = schedule.WarmupCosine(args.warmup_epochs, optimizer)
    # step() adds to them; run.steps() logs them over all ranks, and run.record() resets them.
    sums = Sums(world.device, averages)
    # A checkpoint holds the state of these objects, and the flags. Add your own.
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
        # amp: around forward and loss only, not backward.
        with autocast(args, world.device):
            logits = model(jpegs.normalise(images))
            loss = F.cross_entropy(logits, labels, label_smoothing=args.label_smoothing)
        # amp: else small fp16 gradients underflow to 0.
        scaler.scale(loss / args.accumulate).backward()
        add_to(sums, loss.detach(), logits, labels)
        if run.ends_step:
            take_step(optimizer, scaler)
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
