"""Train on MNIST with Horovod, one process per device, started by horovodrun or mpirun.

    horovodrun -np 2 python mnist/hvd.py
    horovodrun --gloo -np 2 python mnist/hvd.py --amp-dtype bf16
    mpirun -np 2 --bind-to none --map-by slot python mnist/hvd.py --fp16-allreduce
    mpirun -np 2 --bind-to none --map-by slot python mnist/hvd.py --use-adasum

Read it beside single.py. HOROVOD_TIMELINE=/tmp/timeline.json records the phases of each tensor's
all-reduce, for chrome://tracing or Perfetto.
"""

import os
import sys
from pathlib import Path

# So that Python finds the modules beside this file, and common/ beside its folder.
folder = Path(__file__).resolve().parent
sys.path += [str(folder), str(folder.parent)]

import horovod.torch as hvd  # built by scripts/install_horovod.sh
import torch
import torch.nn.functional as F

# dist: a rank that waits for MPI frees its core.
os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")

import digits  # beside this file; scripts/take.py copies it
from common import devices, flags, schedule
from common.data import DataObject, EpochSampler, TensorLoader, to_device
from common.errors import InputError
from common.metrics import Best, Sums
from common.position import Position, seed_step
from common.process import launch
from common.ranks import require_same
from common.run import Run
from common.weights import init_from

# amp: fp16 has more digits, bf16 more range.
AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def parse_args():
    parser = flags.Parser(__doc__)
    parser.set_defaults(dataset="mnist")
    add = parser.add_argument
    add("--data-dir", default="data", help="folder of MNIST, which is downloaded if missing")
    add(
        "--synthetic",
        nargs="?",
        type=flags.positive_int,
        const=10_000,
        metavar="IMAGES",
        help="train on generated images, 10000 if no number is given",
    )
    add("-a", "--model", "--arch", choices=digits.MODELS, default="convnet", help="the network")
    add("--epochs", type=flags.positive_int, default=5, help="passes over the training data")
    add("-b", "--batch-size", type=flags.positive_int, default=64, help="images per process")
    add(
        "-G",
        "--global-batch-size",
        type=flags.positive_int,
        help="images of all processes together; --lr is then the rate for them",
    )
    add("--test-batch-size", type=flags.positive_int, default=1000, help="batch size of evaluation")
    add("--lr", type=flags.positive_float, default=0.02, help="learning rate of one process")
    add(
        "--scale-lr",
        choices=("linear", "sqrt", "none"),
        default="linear",
        help="how --lr grows with the number of processes",
    )
    add("--warmup-epochs", type=flags.non_negative_float, default=1, help="epochs of a rising rate")
    add("--momentum", type=flags.fraction, default=0.9, help="momentum of SGD")
    add("--weight-decay", "--wd", type=flags.non_negative_float, default=0, help="weight decay")
    add("--channels-last", action="store_true", help="keep images and weights in NHWC order")
    add("--compile", action="store_true", help="compile the model with torch.compile")
    add("--seed", type=flags.seed, default=0, help="seed of weights, order of data, and dropout")
    # dist: half the bytes.
    add("--fp16-allreduce", action="store_true", help="send gradients as fp16")
    # dist: instead of averaging.
    add("--use-adasum", action="store_true", help="reduce gradients by Adasum")
    # amp: as in ddp_amp.py, but fp32 if not given.
    add("--amp-dtype", choices=AMP_DTYPES, help="16-bit type of products, with torch.amp")
    flags.add_run_flags(parser)
    return parser.parse_args()


def load_data(args, device, rank, world_size):
    """Return a DataObject for training and one for validation."""
    train_set, val_set = digits.load(args.data_dir, args.synthetic, args.seed)
    # dist: all ranks share --global-batch-size.
    batch_size = schedule.per_process(args.batch_size, args.global_batch_size, world_size)
    # dist: each rank has its own share of a global batch; else all compute the same gradients.
    train_sampler = EpochSampler(len(train_set), batch_size, rank, world_size, seed=args.seed)
    # dist: each image once; torch's DistributedSampler repeats some, which count twice.
    val_sampler = range(rank, len(val_set), world_size)
    train_loader = TensorLoader(train_set, train_sampler, batch_size, device)
    val_loader = TensorLoader(val_set, val_sampler, args.test_batch_size, device)
    train = DataObject(train_set, train_sampler, train_loader)
    return train, DataObject(val_set, val_sampler, val_loader)


# amp: within it products are in 16 bits, and the loss is in fp32.
def autocast(args, device):
    """torch.amp's context in the type of --amp-dtype, which does nothing without it."""
    return torch.autocast(device.type, AMP_DTYPES.get(args.amp_dtype), args.amp_dtype is not None)


# dist: scaler.step(optimizer) alone looks for overflows before the gradients of other ranks have
# come, so that some ranks would skip a step that others take.
def take_step(optimizer, scaler):
    """Average the gradients of all ranks, and take a step with them."""
    # Adasum's optimizer has no other way.
    if not scaler.is_enabled():
        optimizer.step()
        return
    # dist: waits for the all-reduces that backward has started.
    optimizer.synchronize()
    # amp: divides by the scale, and finds the same overflows on all ranks. Clipping comes after it.
    scaler.unscale_(optimizer)
    # dist: else step() would all-reduce once more.
    with optimizer.skip_synchronize():
        # amp: skips the step if a gradient overflowed, and then lowers the scale.
        scaler.step(optimizer)
    scaler.update()


# dist: adds up in place, as dist.all_reduce does.
def all_reduce(tensor):
    # dist: Horovod is fast where a name always means a tensor of the same size.
    hvd.allreduce_(tensor, op=hvd.Sum, name=f"sums of {tensor.numel()}")


def averages(total):
    """The mean loss (nats) and the accuracy."""
    return {"loss": total["loss"] / total["images"], "accuracy": total["correct"] / total["images"]}


def text(result):
    return f"loss {result['loss']:.4f} acc {result['accuracy']:.2%}"


def make_step(args, model, optimizer, scaler, sums):
    """Return the function that trains on a batch: all that the device does in a step."""

    def step(images, labels):
        optimizer.zero_grad()
        # amp: forward and loss only.
        with autocast(args, images.device):
            logits = model(digits.normalise(images))
            loss = F.cross_entropy(logits, labels)
        # amp: else small fp16 gradients become 0.
        scaler.scale(loss).backward()
        take_step(optimizer, scaler)
        correct = (logits.argmax(1) == labels).sum()
        sums.add(loss=loss.detach() * len(labels), correct=correct)

    return step


@torch.inference_mode()
def evaluate(args, model, val, device, watchdog):
    """Return the averages over the whole validation set, each sample once."""
    # dist: BatchNorm's statistics differ between ranks: evaluate with rank 0's, which are saved.
    hvd.broadcast_parameters(dict(model.named_buffers()), root_rank=0)
    model.eval()
    sums = Sums(device, "loss", "correct", "images")
    for batch in watchdog.watch(val.loader):
        images, labels = to_device(batch, device)
        # amp: as in training.
        with autocast(args, device):
            logits = model(digits.normalise(images))
            loss = F.cross_entropy(logits, labels)
        correct = (logits.argmax(1) == labels).sum()
        sums.add(loss=loss * len(labels), correct=correct, images=len(labels))
        if args.dry_run:
            break
    # dist: each rank evaluated only its share: sum over all, then divide once.
    return averages(sums.total(all_reduce))


def train_to_evaluation(args, run, train, step, sums, rates, device, rank):
    """Train up to the next evaluation, or until a signal asks to stop; return the averages."""
    position = run.position
    # A new order in each epoch; a run that resumes within an epoch has the same order there.
    train.sampler.set_epoch(position.epoch, position.samples, position.steps_to_evaluation)
    for batch in run.batches(train.loader):
        images, labels = to_device(batch, device)
        # Data, rates and random numbers depend on seed and position: a resume repeats them.
        rates.set(position)
        # dist: each rank draws its own dropout.
        seed_step(args.seed, position, device, rank)
        step(images, labels)
        # Python counts this; the step is only what the device does.
        sums.add(images=len(labels))
        position.advance()
        if run.check_due():
            # dist: over all ranks. The same message says whether one of them got SIGTERM or USR1.
            figures = averages(sums.total(run.stop.carried_by(all_reduce)))
            run.log.step(figures | {"lr": rates.current})
            # dist: so all ranks stop after the same step; else they wait for each other.
            if run.stop.agreed:
                break
            if run.save_due:
                run.save()
        if args.dry_run:
            break
    # dist: over all ranks, as above.
    return averages(sums.total(run.stop.carried_by(all_reduce)))


# dist: Horovod may have been built without what the flags need.
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


# dist: the rate grows with the gradients that are averaged. Adasum averages none, but with NCCL
# those of each machine.
def averaged(args, device):
    """The number of gradients that are averaged to one."""
    if not args.use_adasum:
        return hvd.size()
    return hvd.local_size() if device.type != "cpu" else 1


def connect(args):
    """Join the other processes; return the device of this one, its rank, and the world size."""
    # dist: joins the processes that horovodrun or mpirun started.
    hvd.init()
    # dist: over all machines.
    rank = hvd.rank()
    world_size = hvd.size()
    launch.check_world_size(world_size)
    # dist: one device per process.
    device = devices.pick(args.device, hvd.local_rank(), hvd.local_size())
    # dist: else each process starts a thread per core.
    launch.share_cores(hvd.local_size())
    devices.tune(device, args.deterministic)
    # dist: a wrong build is refused before a data set is downloaded.
    check_horovod(args, device)
    if device.type != "cpu":
        # dist: else every rank opens a context on GPU 0.
        torch.accelerator.set_device_index(device.index)
    return device, rank, world_size


def build(args, device, world_size):
    """Return the model, its optimizer, and lines for the log."""
    model = digits.build(args.model).to(device)
    lines = init_from(args, model, digits.METADATA)
    if args.channels_last:
        devices.use_channels_last(model)
    if args.compile:
        devices.compile_model(model)
    # dist: Horovod sends only NCHW, --channels-last or not.
    model.to(memory_format=torch.contiguous_format)
    # dist: the global batch is world_size times larger.
    factor = schedule.lr_factor(args.scale_lr, averaged(args, device), args.global_batch_size)
    peak_lr = args.lr * factor
    optimizer = torch.optim.SGD(
        model.parameters(), peak_lr, args.momentum, weight_decay=args.weight_decay, fused=True
    )
    # dist: averages the gradients of all ranks in backward, while it still computes others.
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        model.named_parameters(),
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    )
    # dist: all begin with rank 0's weights. Not broadcast_optimizer_state, as it takes a real step
    # with a fresh SGD.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return model, optimizer, lines


def main():
    args = parse_args()
    device, rank, world_size = connect(args)
    train, val = load_data(args, device, rank, world_size)
    # dist: else machines with different files would train on them in silence.
    require_same((train.dataset, val.dataset), all_reduce, device)
    torch.manual_seed(args.seed)
    model, optimizer, lines = build(args, device, world_size)
    position = Position(train.sampler, args.epochs, args.max_steps, args.eval_every)
    # amp: scales the loss, for fp16; bf16 has the range and needs none.
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp_dtype == "fp16")
    # From --lr up to the rate of each parameter group, and then down to 0.
    rates = schedule.WarmupCosine(optimizer, args.warmup_epochs, args.lr)
    lines += rates.warn_if_short(position)
    sums = Sums(device, "loss", "correct", "images")
    step = make_step(args, model, optimizer, scaler, sums)
    best = Best()
    # A checkpoint holds the state of these objects, and the flags. Add your own.
    state = {
        "model": model,
        "optimizer": optimizer,
        "position": position,
        "sums": sums,
        "best": best,
        # amp: with the scale of the loss.
        "scaler": scaler,
        # So that whoever gets the checkpoint knows what its outputs mean.
        "metadata": digits.METADATA,
    }
    # amp: a CPU without 16-bit units computes right, but slowly.
    if args.amp_dtype:
        lines += devices.warn_if_slow(device, AMP_DTYPES[args.amp_dtype])
    # dist: what carries its messages.
    kind = "MPI" if hvd.mpi_enabled() else "Gloo"
    # Holds the folder of the run, and loads the checkpoint of --resume into `state`.
    run = Run(
        args,
        state,
        device,
        strategy=f"Horovod, {kind}",
        lr=rates.peak,
        unit="images",
        lines=lines,
        # dist: only rank 0 prints and writes; else all ranks write the same files at once.
        rank=rank,
        world_size=world_size,
        # dist: all ranks go on from the same checkpoint, and wait until rank 0 has saved one.
        all_reduce=all_reduce,
        # amp: a recipe without a scaler may have saved.
        optional=("scaler",),
    )
    while not position.over:
        model.train()
        train_result = train_to_evaluation(args, run, train, step, sums, rates, device, rank)
        # Before the evaluation, which may take long.
        run.save()
        if run.stop.agreed:
            run.leave()
            break
        val_result = evaluate(args, model, val, device, run.watchdog)
        # If the epoch is over, the next one begins.
        position.record_evaluation()
        sums.reset()
        line = f"{text(train_result)} | val {text(val_result)}"
        run.log.evaluation(line, train_result | {"lr": rates.current}, val_result)
        is_best = best.update(val_result["accuracy"])
        run.save(is_best)
        if args.dry_run:
            break


if __name__ == "__main__":
    with launch.plain_exits():
        main()
