"""A language model on a text file with DistributedDataParallel, started by torchrun.

    torchrun --nproc-per-node=2 examples/language_model.py --max-steps 300 --eval-every 100
    torchrun --nproc-per-node=2 examples/language_model.py --text shakespeare.txt
    python scripts/prove.py torchrun --nproc-per-node=2 examples/language_model.py --device cpu

Read it beside mnist/ddp_launch.py. A token is a byte of the text in UTF-8.
"""

import codecs
import math
import sys
from importlib import import_module
from pathlib import Path

# Import common/ from this folder or the one above it, and from nowhere else.
folder = Path(__file__).resolve().parent
sys.path[1:1] = [str(folder), str(folder.parent)]
import_module("common")
# Then take the folder above off the path: a queue.py there would hide Python's own.
del sys.path[2]

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from common import devices, flags, graph, schedule
from common.data import DataObject, EpochSampler, TensorLoader
from common.errors import InputError
from common.metadata import Metadata
from common.metrics import Sums
from common.process import launch
from common.ranks import World, require_same
from common.run import Run
from common.weights import init_from

METADATA = Metadata(tokens="the bytes of a text in UTF-8")


def parse_args():
    parser = flags.Parser(__doc__, task="language_model")
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
    add("--clip", type=flags.positive_float, default=1, help="clip the gradient to this norm")
    flags.add_training_flags(
        parser,
        epochs=1,
        batch_size=16,
        lr=0.003,
        test_batch_size=64,
        warmup_epochs=0.05,
        momentum=None,
        weight_decay=0.1,
        scale_lr="sqrt",
    )
    graph.add_flag(parser)
    return parser.parse_args()


def generate(lines, seed):
    """Generate text: sums such as 17+5=22."""
    a, b = np.random.default_rng(seed).integers(0, 100, size=(2, lines)).tolist()
    return "".join(f"{x}+{y}={x + y}\n" for x, y in zip(a, b, strict=True)).encode()


def load(args):
    """Return a dataset for training and one for validation: windows of int64 [context + 1].

    A window has `context` input tokens and, shifted by one, the tokens to predict. Each token is
    predicted once per epoch. Raises InputError.
    """
    try:
        text = Path(args.text).read_bytes() if args.text else generate(args.synthetic, args.seed)
    except OSError as error:
        raise InputError(f"--text {args.text}: {error.strerror}") from error
    try:
        # An incremental decoder, as the text may end within a character.
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
    """A decoder like GPT-2: tokens [batch, time] to logits of the next ones [..., 256]."""

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
        # A token attends to those before it.
        hidden = torch.ones(time, time, dtype=torch.bool, device=tokens.device).triu(1)
        return self.logits(self.blocks(x, mask=hidden, is_causal=True))


def loss_of(model, windows):
    """Return the summed loss (nats) of windows [batch, context + 1], its tokens and characters."""
    target = windows[:, 1:]
    logits = model(windows[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
    # In UTF-8 the first byte of a character is below 128 or above 191; the others lie between.
    characters = ((target < 128) | (target > 191)).sum()
    return loss, target.numel(), characters


def load_data(args, world):
    """Return a DataObject for training and one for validation."""
    train_set, val_set = load(args)
    # dist: --global-batch-size is split over all ranks.
    batch_size = schedule.batch_size(args, world.size)
    # dist: each rank has its own share of a global batch; else all compute the same gradients.
    train_sampler = EpochSampler(len(train_set), batch_size, world.rank, world.size, seed=args.seed)
    # dist: each window once; torch's DistributedSampler repeats some, which count twice.
    val_sampler = range(world.rank, len(val_set), world.size)
    train_loader = TensorLoader(train_set, train_sampler, batch_size, world.device)
    val_loader = TensorLoader(val_set, val_sampler, args.test_batch_size, world.device)
    train = DataObject(train_set, train_sampler, train_loader)
    return train, DataObject(val_set, val_sampler, val_loader)


def averages(loss, tokens, characters):
    """Nats per token, perplexity per token, and bits per character, from the sums of all ranks."""
    nats = loss / tokens
    # A character has up to four bytes, so a few tokens may contain no first byte.
    bits = loss / math.log(2) / max(1, characters)
    return {"loss": nats, "perplexity": math.exp(min(nats, 100)), "bits_per_char": bits}


@torch.inference_mode()
def evaluate(model, val, run):
    """Return the averages over the whole validation set, each window once."""
    # dist: BatchNorm's statistics differ between ranks: evaluate with rank 0's, as saved.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    sums = Sums(run.world.device, averages)
    for (windows,) in run.batches(val.loader):
        loss, tokens, characters = loss_of(model, windows)
        sums.add(loss=loss, tokens=tokens, characters=characters)
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
    return World(device, dist.get_rank(), dist.get_world_size(), dist.all_reduce, "DDP")


def main():
    args = parse_args()
    world = connect(args)
    train, val = load_data(args, world)
    # dist: else machines with different files would silently train on them.
    require_same(world, train.dataset, val.dataset)
    torch.manual_seed(args.seed)
    model = Transformer(args.context, args.layers, args.width, args.dropout).to(world.device)
    init_from(args, model, METADATA, world)
    devices.adapt(model, args)  # --compile
    # dist: the global batch is world.size times larger, and the rate grows with it.
    lr = schedule.peak_lr(args, world.size)
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0},
    ]
    optimizer = torch.optim.AdamW(groups, lr, betas=(0.9, 0.95), fused=True)
    # dist: averages gradients over all ranks while backward still computes others.
    # It also copies rank 0's weights to all ranks.
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    # dist: evaluate() broadcasts BatchNorm's statistics, so forward need not. As an attribute:
    # torch 2.14 deprecates the argument, and older versions lack its replacement.
    ddp_model.broadcast_buffers = False
    rates = schedule.WarmupCosine(args.warmup_epochs, optimizer)
    # step() adds to them; run.steps() logs them over all ranks, and run.record() resets them.
    sums = Sums(world.device, averages)
    # A checkpoint holds the state of these objects, and the flags. Add your own.
    # dist: the model without its wrapper, so that any recipe can load it.
    state = {"model": model, "optimizer": optimizer, "metadata": METADATA}
    # Locks the folder of the run, and loads the checkpoint of --resume into `state`.
    run = Run(args, world, state, sums, rates, train)

    def step(windows):
        optimizer.zero_grad()
        # dist: through the wrapper; else no gradient is averaged.
        loss, tokens, characters = loss_of(ddp_model, windows)
        (loss / tokens).backward()
        # dist: the gradients are averaged by now, so all ranks clip them alike.
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        sums.add(loss=loss.detach(), tokens=tokens, characters=characters)

    if args.cuda_graph:
        step = graph.Captured(step, world, optimizer)
    # Until --epochs or --max-steps are done, a signal comes, or --dry-run has tried one step.
    while not run.over:
        model.train()
        # Yields batches up to the next evaluation, then saves. Data order, rate and random numbers
        # depend only on seed, position and rank, so a resumed run repeats them.
        for (windows,) in run.steps(train):
            step(windows)
        # After SIGTERM or SIGUSR1 the run is over, and has been saved.
        if not run.over:
            # dist: without the wrapper: there are no gradients to average.
            result = evaluate(model, val, run)
            # Lower is better.
            run.record(result, best=-result["loss"])


if __name__ == "__main__":
    with launch.plain_exits():
        main()
        # dist: closes the connections; NCCL warns without it.
        dist.destroy_process_group()
