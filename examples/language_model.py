"""A language model on a text file with DistributedDataParallel, started by torchrun.

    torchrun --nproc-per-node=2 examples/language_model.py --max-steps 300 --eval-every 100
    torchrun --nproc-per-node=2 examples/language_model.py --text shakespeare.txt
    python scripts/prove.py torchrun --nproc-per-node=2 examples/language_model.py --device cpu

Read it beside mnist/ddp_launch.py. A token is a byte of the text in UTF-8.
"""

import argparse
import codecs
import math
import sys
from pathlib import Path

# So that Python finds the modules beside this file, and common/ beside its folder.
folder = Path(__file__).resolve().parent
sys.path += [str(folder), str(folder.parent)]

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from common import devices, flags, graph, schedule
from common.data import DataObject, EpochSampler, TensorLoader, to_device
from common.errors import InputError
from common.metadata import Metadata
from common.metrics import Best, Sums
from common.position import Position, seed_step
from common.process import launch
from common.ranks import require_same
from common.run import Run
from common.weights import init_from

METADATA = Metadata(tokens="the bytes of a text in UTF-8")

# dist: send gradients in 16 bits: half the bytes.
COMM_HOOKS = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}


def parse_args():
    parser = flags.Parser(__doc__)
    parser.set_defaults(dataset="language_model")
    add = parser.add_argument
    add("--text", metavar="FILE", help="train on this file; its last tenth is for validation")
    add(
        "--synthetic",
        type=flags.positive_int,
        default=50_000,
        help="lines to generate if there is no --text",
    )
    add("--context", type=flags.positive_int, default=64, help="tokens that the model sees")
    add("--layers", type=flags.positive_int, default=2, help="layers of the transformer")
    add(
        "--width",
        type=flags.positive_int,
        default=64,
        help="channels of the transformer, 16 to each head",
    )
    add("--dropout", type=flags.fraction, default=0.1, help="dropout of the transformer")
    add("--epochs", type=flags.positive_int, default=1, help="passes over the training data")
    add("-b", "--batch-size", type=flags.positive_int, default=16, help="windows per process")
    add(
        "-G",
        "--global-batch-size",
        type=flags.positive_int,
        help="windows of all processes together; --lr is then the rate for them",
    )
    add("--test-batch-size", type=flags.positive_int, default=64, help="batch size of evaluation")
    add("--lr", type=flags.positive_float, default=0.003, help="learning rate of one process")
    add(
        "--scale-lr",
        choices=("linear", "sqrt", "none"),
        default="sqrt",
        help="how --lr grows with the number of processes",
    )
    add(
        "--warmup-epochs",
        type=flags.non_negative_float,
        default=0.05,
        help="epochs of a rising rate",
    )
    add(
        "--weight-decay",
        "--wd",
        type=flags.non_negative_float,
        default=0.1,
        help="weight decay of matrices",
    )
    add("--clip", type=flags.positive_float, default=1, help="largest norm of the gradient")
    add("--compile", action="store_true", help="compile the model with torch.compile")
    add("--cuda-graph", action="store_true", help="run each step as one CUDA graph: one launch")
    add("--seed", type=flags.seed, default=0, help="seed of weights, order of data, and dropout")
    # dist: for slow links.
    add("--comm-hook", choices=COMM_HOOKS, help="send gradients in 16 bits")
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
    try:
        # The file may end within a character.
        codecs.getincrementaldecoder("utf-8")().decode(text)
    except UnicodeDecodeError as error:
        raise InputError(
            f"--text {args.text}: byte {error.start} is no UTF-8: convert it, such as with "
            "iconv --from-code=UTF-16 --to-code=UTF-8"
        ) from error
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
        if width % 16:
            raise InputError(f"--width {width}: give a multiple of 16, as a head has 16 channels")
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
    """Return the summed loss (nats) of windows [batch, context + 1], and their characters."""
    target = tokens[:, 1:]
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
    # In UTF-8 a character begins with a byte below 128 or above 191; its others lie between.
    characters = ((target < 128) | (target > 191)).sum()
    return loss, characters


def predictions(tokens):
    """The number of tokens that windows [batch, context + 1] predict: all but the first of each."""
    return tokens[:, 1:].numel()


def load_data(args, device, rank, world_size):
    """Return a DataObject for training and one for validation."""
    train_set, val_set = load(args)
    # dist: all ranks share --global-batch-size.
    batch_size = schedule.per_process(args.batch_size, args.global_batch_size, world_size)
    # dist: each rank has its own share of a global batch; else all compute the same gradients.
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
    # A character has up to four bytes: few tokens may begin none.
    bits = total["loss"] / math.log(2) / max(1, total["characters"])
    return {"loss": loss, "perplexity": math.exp(min(loss, 100)), "bits_per_char": bits}


def text(result):
    return f"perplexity {result['perplexity']:.3f} bits/char {result['bits_per_char']:.3f}"


def make_step(args, model, optimizer, sums):
    """Return the function that trains on a batch: all that the device does in a step."""

    def step(tokens):
        optimizer.zero_grad()
        loss, characters = loss_of(model, tokens)
        (loss / predictions(tokens)).backward()
        # Backward has averaged the gradients, so all ranks clip them alike.
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        sums.add(loss=loss.detach(), characters=characters)

    return step


@torch.inference_mode()
def evaluate(args, model, val, device, watchdog):
    """Return the averages over the whole validation set, each sample once."""
    # dist: BatchNorm's statistics differ between ranks: evaluate with rank 0's, which are saved.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    sums = Sums(device, "loss", "tokens", "characters")
    for batch in watchdog.watch(val.loader):
        (tokens,) = to_device(batch, device)
        loss, characters = loss_of(model, tokens)
        sums.add(loss=loss, characters=characters, tokens=predictions(tokens))
        if args.dry_run:
            break
    # dist: each rank evaluated only its share: sum over all, then divide once.
    return averages(sums.total(dist.all_reduce))


def train_to_evaluation(args, run, train, step, sums, rates, device, rank):
    """Train up to the next evaluation, or until a signal asks to stop; return the averages."""
    position = run.position
    # A new order in each epoch; a run that resumes within an epoch has the same order there.
    train.sampler.set_epoch(position.epoch, position.samples, position.steps_to_evaluation)
    for batch in run.batches(train.loader):
        (tokens,) = to_device(batch, device)
        # Data, rates and random numbers depend on seed and position: a resume repeats them.
        rates.set(position)
        # dist: each rank draws its own dropout.
        seed_step(args.seed, position, device, rank)
        step(tokens)
        # Python counts this; the step is only what the device does.
        sums.add(tokens=predictions(tokens))
        position.advance()
        if run.check_due():
            # dist: over all ranks. The same message says whether one of them got SIGTERM or USR1.
            figures = averages(sums.total(run.stop.carried_by(dist.all_reduce)))
            run.log.step(figures | {"lr": rates.current})
            # dist: so all ranks stop after the same step; else they wait for each other.
            if run.stop.agreed:
                break
            if run.save_due:
                run.save()
        if args.dry_run:
            break
    # dist: over all ranks, as above.
    return averages(sums.total(run.stop.carried_by(dist.all_reduce)))


def connect(args):
    """Join the other processes; return the device of this one, its rank, and the world size."""
    # dist: torchrun says which process of this machine this is, and how many there are.
    local_rank, local_world_size = launch.torchrun_env()
    # dist: one device per process.
    device = devices.pick(args.device, local_rank, local_world_size)
    devices.tune(device, args.deterministic)
    if device.type != "cpu":
        # dist: before the group is made, or every rank opens a context on GPU 0.
        torch.accelerator.set_device_index(device.index)
    if args.cuda_graph:
        # A capture needs a stream of its own, to which all that is built from here on belongs.
        graph.prepare(args, device)
    # dist: with None torch chooses by the device: NCCL for CUDA.
    backend = "gloo" if device.type == "cpu" else None
    timeout = launch.group_timeout(args.timeout)
    # dist: all processes wait here for each other.
    dist.init_process_group(backend, timeout=timeout, device_id=device.index)
    # dist: over all machines.
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    launch.check_world_size(world_size)
    return device, rank, world_size


def build(args, device, world_size):
    """Return the model, its optimizer, and lines for the log."""
    model = Transformer(args.context, args.layers, args.width, args.dropout).to(device)
    lines = init_from(args, model, METADATA)
    if args.compile:
        devices.compile_model(model)
    # dist: the global batch is world_size times larger.
    factor = schedule.lr_factor(args.scale_lr, world_size, args.global_batch_size)
    peak_lr = args.lr * factor
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0},
    ]
    optimizer = torch.optim.AdamW(groups, peak_lr, betas=(0.9, 0.95), fused=True)
    # dist: averages the gradients of all ranks in backward, while it still computes others.
    # It also copies rank 0's weights to all ranks.
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    # dist: do not send BatchNorm's statistics in every forward, as evaluate() does. It is set here
    # because torch 2.14 warns of the argument, and older ones lack its successor.
    model.broadcast_buffers = False
    if args.comm_hook:
        # dist: gradients travel in fewer bytes.
        model.register_comm_hook(None, COMM_HOOKS[args.comm_hook])
    return model, optimizer, lines


def main():
    args = parse_args()
    device, rank, world_size = connect(args)
    train, val = load_data(args, device, rank, world_size)
    # dist: else machines with different files would train on them in silence.
    require_same((train.dataset, val.dataset), dist.all_reduce, device)
    torch.manual_seed(args.seed)
    model, optimizer, lines = build(args, device, world_size)
    position = Position(train.sampler, args.epochs, args.max_steps, args.eval_every)
    # From --lr up to the rate of each parameter group, and then down to 0.
    rates = schedule.WarmupCosine(optimizer, args.warmup_epochs, args.lr)
    lines += rates.warn_if_short(position)
    sums = Sums(device, "loss", "tokens", "characters")
    step = make_step(args, model, optimizer, sums)
    best = Best(lowest=True)
    # A checkpoint holds the state of these objects, and the flags. Add your own.
    state = {
        # dist: without its wrapper, so that any recipe can load it.
        "model": model.module,
        "optimizer": optimizer,
        "position": position,
        "sums": sums,
        "best": best,
        # So that whoever gets the checkpoint knows what its outputs mean.
        "metadata": METADATA,
    }
    # Holds the folder of the run, and loads the checkpoint of --resume into `state`.
    run = Run(
        args,
        state,
        device,
        strategy="DDP, torchrun",
        lr=rates.peak,
        unit="windows",
        lines=lines,
        # dist: only rank 0 prints and writes; else all ranks write the same files at once.
        rank=rank,
        world_size=world_size,
        # dist: all ranks go on from the same checkpoint, and wait until rank 0 has saved one.
        all_reduce=dist.all_reduce,
    )
    if args.cuda_graph:
        # One launch per step, as a small model lets the GPU wait for Python.
        step = graph.Captured(step, device, optimizer, say=run.log.say)
    while not position.over:
        model.train()
        train_result = train_to_evaluation(args, run, train, step, sums, rates, device, rank)
        # Before the evaluation, which may take long.
        run.save()
        if run.stop.agreed:
            run.leave()
            break
        # dist: without the wrapper, as a rank may have fewer batches than another.
        val_result = evaluate(args, model.module, val, device, run.watchdog)
        # If the epoch is over, the next one begins.
        position.record_evaluation()
        sums.reset()
        line = f"{text(train_result)} | val {text(val_result)}"
        run.log.evaluation(line, train_result | {"lr": rates.current}, val_result)
        is_best = best.update(val_result["loss"])
        run.save(is_best)
        if args.dry_run:
            break


if __name__ == "__main__":
    with launch.plain_exits():
        main()
        # dist: closes the connections; NCCL warns without it.
        dist.destroy_process_group()
