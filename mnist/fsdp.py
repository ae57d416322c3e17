"""Train on MNIST with fully_shard (FSDP2): each process holds a share of the weights.

    torchrun --nproc-per-node=2 mnist/fsdp.py
    torchrun --nproc-per-node=2 mnist/fsdp.py --param-dtype bf16

Read it beside ddp_launch.py.
"""

import argparse
import math
import sys
from pathlib import Path

# So that Python finds common/, and the modules beside this file, also with -P and -m.
sys.path[1:1] = map(str, Path(__file__).resolve().parents[:2])
from common.parent import die_with_parent

# dist: before torch, which loads for seconds; else a rank outlives a launcher that is killed.
die_with_parent()

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import default_collate

import digits  # beside this file
from common import (
    checkpoint,
    devices,
    flags,
    flight_recorder,
    launch,
    lease,
    profiler,
    schedule,
    sharded,
)
from common.data import DataObject, EpochSampler, TensorLoader, to_device
from common.log import Log, new_folder
from common.metrics import Best, Sums, require_finite
from common.position import Position, seed_step
from common.ranks import require_same
from common.stop import StopSignal
from common.watchdog import Watchdog


def parse_args():
    parser = flags.Parser(__doc__)
    parser.set_defaults(dataset="mnist")
    add = parser.add_argument
    add("--data-dir", default="data", help="folder of MNIST, downloaded if missing")
    add("--synthetic", nargs="?", type=flags.positive_int, const=10_000, help="generated images")
    add(
        "-a", "--model", "--arch", choices=digits.MODELS, default="convnet", help="ConvNet or LeNet"
    )
    add("--epochs", type=flags.positive_int, default=5, help="passes over the data")
    add("-b", "--batch-size", type=flags.positive_int, default=64, help="images per process")
    add("-G", "--global-batch-size", type=flags.positive_int, help="over all; --lr is for it")
    add("--test-batch-size", type=flags.positive_int, default=1000, help="in evaluation")
    add("--lr", type=flags.positive_float, default=0.02, help="learning rate of one process")
    add("--scale-lr", choices=("linear", "sqrt", "none"), default="linear", help="by processes")
    add("--warmup-epochs", type=flags.non_negative_float, default=1, help="to the scaled --lr")
    add("--momentum", type=flags.fraction, default=0.9, help="of SGD")
    add("--weight-decay", "--wd", type=flags.non_negative_float, default=0, help="of SGD")
    add("--channels-last", action="store_true", help="NHWC images and weights")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--seed", type=flags.seed, default=0, help="of weights, data and dropout")
    # fsdp: of the gathered weights.
    add("--param-dtype", choices=("fp32", "bf16"), default="fp32", help="in forward and backward")
    # fsdp: one all-gather less, for more memory.
    add("--no-reshard-after-forward", action="store_false", dest="reshard", help="keep weights")
    # dist: torch.distributed.launch passes it.
    add("--local-rank", type=int, help=argparse.SUPPRESS)
    flags.add_run_flags(parser)
    return parser.parse_args()


def load_data(args, device, rank, world_size):
    """Return a DataObject for training and one for validation."""
    train_set, val_set = digits.load(args.data_dir, args.synthetic, args.seed)
    # dist: all ranks share --global-batch-size.
    batch_size = schedule.per_process(args.batch_size, args.global_batch_size, world_size)
    # dist: its own share of each global batch; else all ranks compute the same gradients.
    train_sampler = EpochSampler(len(train_set), batch_size, rank, world_size, seed=args.seed)
    # dist: each image once; torch's DistributedSampler repeats some, which count twice.
    val_sampler = range(rank, len(val_set), world_size)
    train_loader = TensorLoader(train_set, train_sampler, batch_size, device)
    val_loader = TensorLoader(val_set, val_sampler, args.test_batch_size, device)
    train = DataObject(train_set, train_sampler, train_loader)
    return train, DataObject(val_set, val_sampler, val_loader)


def averages(total):
    """The loss (nats) and accuracy of the sums of all ranks."""
    return {"loss": total["loss"] / total["images"], "accuracy": total["correct"] / total["images"]}


def text(result):
    return f"loss {result['loss']:.4f} acc {result['accuracy']:.2%}"


# fsdp: not inference_mode(): the first forward makes buffers of FSDP, and can be this one.
@torch.no_grad()
def evaluate(args, model, val, device, watchdog, world_size):
    """Return the averages over the whole validation set, each sample once."""
    # dist: BatchNorm's statistics differ between ranks: evaluate with rank 0's, which are saved.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    sums = Sums(device, "loss", "correct", "images")
    for batch in watchdog(val.loader):
        images, labels = to_device(batch, device)
        logits = model(digits.normalise(images))
        loss = F.cross_entropy(logits, labels)
        correct = (logits.argmax(1) == labels).sum()
        sums.add(loss=loss * len(labels), correct=correct, images=len(labels))
        if args.dry_run:
            break
    # fsdp: forward gathers weights, so all ranks have to call it equally often.
    most = 1 if args.dry_run else math.ceil(len(val.dataset) / (args.test_batch_size * world_size))
    if len(val.loader) < most:
        images, _ = default_collate([val.dataset[0]])
        model(digits.normalise(images.to(device)))
    # dist: each rank evaluated only its share: sum over all, then divide once.
    return averages(sums.total(dist.all_reduce))


def fit(args, device, train, val, model, optimizer, lr, lines, rank, world_size):
    """Train and evaluate to the end of the run; with --resume, from its last checkpoint."""
    # With --max-steps a run may end within an epoch.
    epochs = schedule.epochs_of(args.epochs, args.max_steps, train.sampler)
    rates = schedule.WarmupCosine(optimizer, epochs, args.warmup_epochs, start=args.lr / lr)
    position = Position()
    sums = Sums(device, "loss", "correct", "images")
    best = Best()
    # A checkpoint holds the state of these objects, and the flags. Add your own.
    # fsdp: whole in the checkpoint, so that any recipe can load it.
    state = {"model": sharded.WholeModel(model), "optimizer": sharded.WholeOptimizer(optimizer)}
    state |= {"position": position, "sums": sums, "best": best}
    config = vars(args) | {"saved_by": f"FSDP, torchrun, world size {world_size}"}
    # dist: flags of the launch and of communication may differ in a run that goes on.
    may_differ = checkpoint.MAY_DIFFER | {"local_rank", "param_dtype", "reshard"}
    log_dir = Path(args.log_dir or new_folder(args.dataset))
    folder = Path(args.checkpoint_dir or log_dir)
    # dist: only rank 0 prints and writes; else all ranks write the same files at once.
    writes = not args.dry_run and rank == 0
    log = Log(log_dir if writes else None, "images", args.log_seconds, quiet=rank != 0)
    if writes:
        # Before the checkpoint is read: another job may be writing it.
        lease.hold(folder, log_dir)
    found = checkpoint.resume(
        args.resume,
        args.checkpoint_dir or args.log_dir,
        state,
        config,
        may_differ,
        # dist: to check that all ranks read the same file.
        all_reduce=dist.all_reduce,
    )
    if writes:
        # Refuses a folder that holds another run.
        checkpoint.claim(folder, log_dir, found)
    log.start(position, config, [*lines, *found.lines(position)])
    if position.finished(args.epochs, args.max_steps):
        log.say("nothing left to do: the run has had its --epochs or --max-steps")
    # dist: before it ends a rank that waits, the rank writes what it communicated last.
    recorder = flight_recorder.writer(args.log_dir, rank, world_size, device)
    watchdog = Watchdog(args.timeout, before_end=recorder)
    stop = StopSignal()

    def save(is_best=False):
        # It may take longer than a step. The next batch starts the watchdog again.
        watchdog.cancel()
        # fsdp: on all ranks, as each has a share of what rank 0 saves.
        whole = {name: part.state_dict() for name, part in state.items()}
        if writes:
            checkpoint.save(folder, whole, config, is_best)

    while not position.finished(args.epochs, args.max_steps):
        # A new order each epoch; a resumed epoch goes on in the same order.
        train.sampler.set_epoch(position.epoch, position.samples)
        seed_step(args.seed, position, device, rank)
        model.train()
        steps_left = position.steps_left(args.epochs, args.max_steps, train.sampler)
        log.begin(position, steps_left, train.sampler.global_batch)
        batches = watchdog(train.loader)
        if args.profile and writes:
            batches = profiler.trace(batches, log_dir / f"trace-{position.steps}.json.gz")
        epoch_over = True
        for batch in batches:
            if position.evaluation_due(args.eval_every, args.max_steps):
                epoch_over = False
                break
            images, labels = to_device(batch, device)
            rates.set(position.epochs_done(train.sampler.length))
            optimizer.zero_grad()
            logits = model(digits.normalise(images))
            loss = F.cross_entropy(logits, labels)
            loss.backward()
            optimizer.step()
            correct = (logits.argmax(1) == labels).sum()
            sums.add(loss=loss.detach() * len(labels), correct=correct, images=len(labels))
            # Data order, rates and random state are functions of the seed and this position.
            position.advance(train.sampler.global_batch)
            # Until now there was nothing to save, and SIGTERM ended the run at once.
            stop.listen()
            # dist: each rank draws its own dropout.
            seed_step(args.seed, position, device, rank)
            save_due = position.multiple_of(args.checkpoint_every)
            if save_due or position.multiple_of(args.log_interval):
                # dist: also sums the flag: ranks that stop at different steps wait for each other.
                total = sums.total(dist.all_reduce, stop=stop.requested)
                require_finite(total["loss"])
                log.step(position, averages(total) | {"lr": rates.first})
                # SIGTERM or SIGUSR1 on any rank: all ranks stop after the same step.
                if total["stop"]:
                    break
                if save_due:
                    save()
            if args.dry_run:
                break
        log.end(position, watchdog.waited)
        # dist: over all ranks.
        total = sums.total(dist.all_reduce, stop=stop.requested)
        require_finite(total["loss"])
        # Before the evaluation, which may take long.
        save()
        if total["stop"]:
            log.stop(position, folder)
            # dist: torchrun --max-restarts starts the ranks again that were not told to stop.
            launch.restart_unless_told(stop)
            return
        train_result = averages(total)
        val_result = evaluate(args, model, val, device, watchdog, world_size)
        require_finite(val_result["loss"])
        position.end_interval(epoch_over)
        sums.reset()
        done = f"epoch {position.epochs_done(train.sampler.length):.4g}/{epochs:.4g}"
        line = f"{done}: {text(train_result)} | val {text(val_result)}"
        log.evaluation(position, line, train_result | {"lr": rates.first}, val_result)
        save(is_best=best.update(val_result["accuracy"]))
        if args.dry_run:
            break


def main():
    args = parse_args()
    # dist: torchrun sets both, for each machine.
    local_rank, local_world_size = launch.torchrun_env()
    # dist: one device per process.
    device = devices.pick(args.device, local_rank, local_world_size)
    devices.tune(device)
    if device.type != "cpu":
        # dist: first, or every rank opens a context on GPU 0.
        torch.accelerator.set_device_index(device.index)
    # dist: NCCL for CUDA, Gloo on a CPU.
    dist.init_process_group("gloo" if device.type == "cpu" else None, device_id=device.index)
    # dist: over all machines.
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    launch.check_world_size(world_size)
    train, val = load_data(args, device, rank, world_size)
    # dist: else machines with different files would train on them in silence.
    require_same((train.dataset, val.dataset), dist.all_reduce, device)
    torch.manual_seed(args.seed)
    model = digits.build(args.model).to(device)
    loaded = checkpoint.init_from(args.init_from, model, args.init_partial)
    if args.channels_last:
        devices.use_channels_last(model)
    if args.compile:
        devices.compile_model(model)
    # dist: the global batch is world_size times larger.
    lr = args.lr * schedule.lr_factor(args.scale_lr, world_size, args.global_batch_size)
    # fsdp: it refuses NHWC weights; the images stay NHWC.
    model.to(memory_format=torch.contiguous_format)
    # fsdp: else it takes the GPU, also with --device cpu.
    mesh = dist.init_device_mesh(device.type, (world_size,))
    policy = MixedPrecisionPolicy()
    root_policy = policy
    if args.param_dtype == "bf16":
        # fsdp: a CPU without 16-bit units computes right, but slowly.
        loaded += devices.warn_if_slow(device, torch.bfloat16)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        # fsdp: logits in fp32, for the loss.
        root_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        if norms:
            # fsdp: BatchNorm stays fp32, like its running statistics.
            fully_shard(norms, mesh=mesh)
    for block in sharded.blocks(model):
        # fsdp: each is gathered when forward and backward reach it, and then freed.
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=args.reshard)
    # fsdp: before the optimizer, which then has a share of each weight.
    fully_shard(model, mesh=mesh, mp_policy=root_policy)
    # The schedule multiplies the rate of each of its parameter groups.
    # fsdp: foreach, as fused SGD takes no shards.
    optimizer = torch.optim.SGD(
        model.parameters(), lr, args.momentum, weight_decay=args.weight_decay, foreach=True
    )
    batch = f"batch {train.sampler.batch_size} per process, {train.sampler.global_batch} global"
    place = f"world size {world_size} | {devices.describe(device)}"
    setup = f"{args.dataset}: FSDP, torchrun | {place} | {batch} | lr {lr:g}"
    fit(args, device, train, val, model, optimizer, lr, [setup, *loaded], rank, world_size)


if __name__ == "__main__":
    with launch.plain_exits():
        main()
        # dist: closes the connections; NCCL warns without it.
        dist.destroy_process_group()
