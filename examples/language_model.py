"""A language model on a text file with DistributedDataParallel, started by torchrun.

    torchrun --nproc-per-node=2 examples/language_model.py --max-steps 300 --eval-every 100
    torchrun --nproc-per-node=2 examples/language_model.py --text shakespeare.txt

Read it beside mnist/ddp_launch.py. A token is a byte of the text in UTF-8.
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

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from common import (
    checkpoint,
    devices,
    flags,
    flight_recorder,
    hooks,
    launch,
    lease,
    profiler,
    schedule,
)
from common.data import DataObject, EpochSampler, TensorLoader, to_device
from common.errors import InputError
from common.log import Log, new_folder
from common.metrics import Best, Sums, require_finite
from common.position import Position, seed_step
from common.ranks import require_same
from common.stop import StopSignal
from common.watchdog import Watchdog


def parse_args():
    parser = flags.Parser(__doc__)
    parser.set_defaults(dataset="language_model")
    add = parser.add_argument
    add("--text", metavar="FILE", help="its last tenth is for validation")
    add("--synthetic", type=flags.positive_int, default=50_000, help="generated lines, or --text")
    add("--context", type=flags.positive_int, default=64, help="tokens that the model sees")
    add("--layers", type=flags.positive_int, default=2, help="of the transformer")
    add("--width", type=flags.positive_int, default=64, help="of the transformer; 16 per head")
    add("--dropout", type=flags.fraction, default=0.1, help="of the transformer")
    add("--epochs", type=flags.positive_int, default=1, help="passes over the data")
    add(
        "-b",
        "--batch-size",
        type=flags.positive_int,
        default=16,
        help="windows of text per process",
    )
    add("-G", "--global-batch-size", type=flags.positive_int, help="over all; --lr is for it")
    add("--test-batch-size", type=flags.positive_int, default=64, help="in evaluation")
    add("--lr", type=flags.positive_float, default=0.003, help="learning rate of one process")
    add("--scale-lr", choices=("linear", "sqrt", "none"), default="sqrt", help="by processes")
    add("--warmup-epochs", type=flags.non_negative_float, default=0.05, help="to the scaled --lr")
    add("--weight-decay", "--wd", type=flags.non_negative_float, default=0.1, help="of matrices")
    add("--clip", type=flags.positive_float, default=1, help="largest norm of the gradient")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--seed", type=flags.seed, default=0, help="of weights, data and dropout")
    # dist: compress gradients, for slow links.
    add("--comm-hook", choices=hooks.HOOKS, default="none", help="how gradients travel")
    add("--powersgd-rank", type=flags.positive_int, default=2, help="columns; fewer send less")
    # dist: torch.distributed.launch passes it.
    add("--local-rank", type=int, help=argparse.SUPPRESS)
    flags.add_run_flags(parser)
    return parser.parse_args()


def generate(lines, seed):
    """Sums as text, such as 17+5=22."""
    a, b = np.random.default_rng(seed).integers(0, 100, size=(2, lines)).tolist()
    return "".join(f"{x}+{y}={x + y}\n" for x, y in zip(a, b, strict=True)).encode()


def load(args):
    """Return a dataset for training and one for validation: windows of int64 [context + 1].

    A window is an input of `context` tokens and, shifted by one, their successors. Each token is
    predicted once per epoch. Raises InputError.
    """
    try:
        text = Path(args.text).read_bytes() if args.text else generate(args.synthetic, args.seed)
    except OSError as error:
        raise InputError(f"--text {args.text}: {error.strerror}") from error
    tokens = torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64))
    val_tokens = len(tokens) // 10
    if val_tokens <= args.context:
        raise InputError(f"{len(tokens)} bytes of text are too few for --context {args.context}")
    parts = tokens.split([len(tokens) - val_tokens, val_tokens])
    return [TensorDataset(part.unfold(0, args.context + 1, args.context)) for part in parts]


class Transformer(nn.Module):
    """A decoder as GPT-2's: tokens [batch, time] to logits of their successors [..., 256]."""

    def __init__(self, context, layers, width, dropout):
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.place = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 16, 4 * width, dropout, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(
            layer, layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.logits = nn.Linear(width, 256)

    def forward(self, tokens):
        time = tokens.shape[1]
        x = self.token(tokens) + self.place(torch.arange(time, device=tokens.device))
        # A token sees those before it.
        hidden = torch.ones(time, time, dtype=torch.bool, device=tokens.device).triu(1)
        return self.logits(self.blocks(x, mask=hidden, is_causal=True))


def loss_of(model, tokens):
    """Return the summed loss (nats) of windows [batch, context + 1], and amounts for the sums."""
    target = tokens[:, 1:]
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
    # In UTF-8 a character begins with a byte below 128 or above 191; its others lie between.
    characters = ((target < 128) | (target > 191)).sum()
    return loss, {"loss": loss.detach(), "tokens": target.numel(), "characters": characters}


def load_data(args, device, rank, world_size):
    """Return a DataObject for training and one for validation."""
    train_set, val_set = load(args)
    # dist: all ranks share --global-batch-size.
    batch_size = schedule.per_process(args.batch_size, args.global_batch_size, world_size)
    # dist: its own share of each global batch; else all ranks compute the same gradients.
    train_sampler = EpochSampler(len(train_set), batch_size, rank, world_size, seed=args.seed)
    # dist: each window once; torch's DistributedSampler repeats some, which count twice.
    val_sampler = range(rank, len(val_set), world_size)
    train_loader = TensorLoader(train_set, train_sampler, batch_size, device)
    val_loader = TensorLoader(val_set, val_sampler, args.test_batch_size, device)
    train = DataObject(train_set, train_sampler, train_loader)
    return train, DataObject(val_set, val_sampler, val_loader)


def averages(total):
    """Nats per token, perplexity (of a token), and bits per character, of all ranks."""
    loss = total["loss"] / total["tokens"]
    bits = total["loss"] / math.log(2) / total["characters"]
    return {"loss": loss, "perplexity": math.exp(min(loss, 100)), "bits_per_char": bits}


def text(result):
    return f"perplexity {result['perplexity']:.3f} bits/char {result['bits_per_char']:.3f}"


@torch.inference_mode()
def evaluate(args, model, val, device, watchdog):
    """Return the averages over the whole validation set, each sample once."""
    # dist: BatchNorm's statistics differ between ranks: evaluate with rank 0's, which are saved.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    sums = Sums(device, "loss", "tokens", "characters")
    for batch in watchdog(val.loader):
        (tokens,) = to_device(batch, device)
        _, amounts = loss_of(model, tokens)
        sums.add(**amounts)
        if args.dry_run:
            break
    # dist: each rank evaluated only its share: sum over all, then divide once.
    return averages(sums.total(dist.all_reduce))


def fit(args, device, train, val, model, optimizer, lr, lines, rank, world_size):
    """Train and evaluate to the end of the run; with --resume, from its last checkpoint."""
    # With --max-steps a run may end within an epoch.
    epochs = schedule.epochs_of(args.epochs, args.max_steps, train.sampler)
    rates = schedule.WarmupCosine(optimizer, epochs, args.warmup_epochs, start=args.lr / lr)
    position = Position()
    sums = Sums(device, "loss", "tokens", "characters")
    best = Best(lowest=True)
    # A checkpoint holds the state of these objects, and the flags. Add your own.
    # dist: the model without its wrapper, so that any recipe can load it.
    state = {"model": model.module, "optimizer": optimizer}
    state |= {"position": position, "sums": sums, "best": best}
    config = vars(args) | {"saved_by": f"DDP, torchrun, world size {world_size}"}
    # dist: flags of the launch and of communication may differ in a run that goes on.
    may_differ = checkpoint.MAY_DIFFER | {"comm_hook", "local_rank", "powersgd_rank"}
    log_dir = Path(args.log_dir or new_folder(args.dataset))
    folder = Path(args.checkpoint_dir or log_dir)
    # dist: only rank 0 prints and writes; else all ranks write the same files at once.
    writes = not args.dry_run and rank == 0
    log = Log(log_dir if writes else None, "windows", args.log_seconds, quiet=rank != 0)
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
        if writes:
            checkpoint.save(folder, state, config, is_best)

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
            (tokens,) = to_device(batch, device)
            rates.set(position.epochs_done(train.sampler.length))
            optimizer.zero_grad()
            loss, amounts = loss_of(model, tokens)
            (loss / amounts["tokens"]).backward()
            # Backward has averaged the gradients, so all ranks clip them alike.
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            sums.add(**amounts)
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
        # dist: without the wrapper, as the shares of the ranks may differ in their batches.
        val_result = evaluate(args, model.module, val, device, watchdog)
        require_finite(val_result["loss"])
        position.end_interval(epoch_over)
        sums.reset()
        done = f"epoch {position.epochs_done(train.sampler.length):.4g}/{epochs:.4g}"
        line = f"{done}: {text(train_result)} | val {text(val_result)}"
        log.evaluation(position, line, train_result | {"lr": rates.first}, val_result)
        save(is_best=best.update(val_result["loss"]))
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
    model = Transformer(args.context, args.layers, args.width, args.dropout).to(device)
    loaded = checkpoint.init_from(args.init_from, model, args.init_partial)
    if args.compile:
        devices.compile_model(model)
    # dist: the global batch is world_size times larger.
    lr = args.lr * schedule.lr_factor(args.scale_lr, world_size, args.global_batch_size)
    # The schedule multiplies the rate of each of its parameter groups.
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0},
    ]
    optimizer = torch.optim.AdamW(groups, lr, betas=(0.9, 0.95), fused=True)
    # dist: averages the gradients of all ranks in backward, while others are still computed.
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    # dist: do not send BatchNorm's statistics in every forward, as evaluate() does. It is set here
    # because torch 2.14 warns of the argument, and torch 2.11 lacks its successor.
    model.broadcast_buffers = False
    if args.comm_hook == "powersgd" and args.compile:
        # dist: torch's hook fails with a compiled model.
        raise InputError("--comm-hook powersgd: leave out --compile")
    # dist: with --comm-hook, gradients travel in fewer bytes.
    hooks.register(model, args.comm_hook, args.powersgd_rank)
    batch = f"batch {train.sampler.batch_size} per process, {train.sampler.global_batch} global"
    place = f"world size {world_size} | {devices.describe(device)}"
    setup = f"{args.dataset}: DDP, torchrun | {place} | {batch} | lr {lr:g}"
    fit(args, device, train, val, model, optimizer, lr, [setup, *loaded], rank, world_size)


if __name__ == "__main__":
    with launch.plain_exits():
        main()
        # dist: closes the connections; NCCL warns without it.
        dist.destroy_process_group()
