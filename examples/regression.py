"""Regression on a table with DistributedDataParallel, started by torchrun.

    torchrun --nproc-per-node=2 examples/regression.py
    torchrun --nproc-per-node=2 examples/regression.py --table houses.csv
    python scripts/prove.py torchrun --nproc-per-node=2 examples/regression.py --device cpu

Read it beside mnist/ddp_launch.py.
"""

import argparse
import sys
import warnings
from pathlib import Path

# So that Python finds the modules beside this file, and common/ beside its folder.
folder = Path(__file__).resolve().parent
sys.path += [str(folder), str(folder.parent)]

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from common import devices, flags, graph, schedule
from common.data import DataObject, EpochSampler, TensorLoader, to_device
from common.errors import InputError, in_one_line
from common.metadata import Metadata
from common.metrics import Best, Sums
from common.position import Position, seed_step
from common.process import launch
from common.ranks import require_same
from common.run import Run
from common.weights import init_from

# dist: send gradients in 16 bits: half the bytes.
COMM_HOOKS = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
# A column whose values differ by a smaller share is constant but for rounding.
ROUNDING = 1e-14


def parse_args():
    parser = flags.Parser(__doc__)
    parser.set_defaults(dataset="regression")
    add = parser.add_argument
    add(
        "--table",
        metavar="FILE",
        help="train on a .npy, or a .csv with a line of names; the last column is the target",
    )
    add(
        "--synthetic",
        type=flags.positive_int,
        default=20_000,
        help="rows to generate if there is no --table",
    )
    add("--width", type=flags.positive_int, default=64, help="units of a hidden layer")
    add("--epochs", type=flags.positive_int, default=5, help="passes over the training data")
    add("-b", "--batch-size", type=flags.positive_int, default=64, help="rows per process")
    add(
        "-G",
        "--global-batch-size",
        type=flags.positive_int,
        help="rows of all processes together; --lr is then the rate for them",
    )
    add("--test-batch-size", type=flags.positive_int, default=1000, help="batch size of evaluation")
    add("--lr", type=flags.positive_float, default=0.001, help="learning rate of one process")
    add(
        "--scale-lr",
        choices=("linear", "sqrt", "none"),
        default="sqrt",
        help="how --lr grows with the number of processes",
    )
    add("--warmup-epochs", type=flags.non_negative_float, default=1, help="epochs of a rising rate")
    add("--weight-decay", "--wd", type=flags.non_negative_float, default=0.01, help="weight decay")
    add("--compile", action="store_true", help="compile the model with torch.compile")
    add("--cuda-graph", action="store_true", help="run each step as one CUDA graph: one launch")
    add("--seed", type=flags.seed, default=0, help="seed of weights, order of data, and dropout")
    # dist: for slow links.
    add("--comm-hook", choices=COMM_HOOKS, help="send gradients in 16 bits")
    # dist: torch.distributed.launch passes it.
    add("--local-rank", type=int, help=argparse.SUPPRESS)
    flags.add_run_flags(parser)
    return parser.parse_args()


def read_table(path):
    """The names of the columns in the file `path`, and its numbers, float64 [rows, columns].

    Raises InputError.
    """
    try:
        if path.endswith(".npy"):
            # Reads no pickle.
            table = np.lib.format.open_memmap(path, mode="r")
            names = []
        else:
            with warnings.catch_warnings():
                # numpy warns if there are no rows.
                warnings.simplefilter("ignore")
                # The names may be in any encoding.
                table = np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2, encoding="latin-1")
            with open(path, encoding="utf-8-sig", errors="replace") as file:
                names = file.readline().strip().split(",")
        # Also integers, but no text, and no complex numbers.
        table = table.astype(np.float64, casting="same_kind")
        if table.ndim != 2 or min(table.shape) < 2:
            raise ValueError(f"its shape is {table.shape}")
        wrong = np.argwhere(~np.isfinite(table))
        if len(wrong):
            row, column = wrong[0]
            # As numpy counts them in its own errors.
            raise ValueError(f"{table[row, column]} at row {row}, column {column + 1}")
    except OSError as error:
        raise InputError(f"--table {path}: {error}") from error
    # A file of others can raise anything.
    except Exception as error:
        raise InputError(
            f"--table {path}: {in_one_line(error)}: give finite numbers, in a .csv with a line of "
            "names and commas between them, or in a .npy [rows, columns]"
        ) from error
    # A name may have a comma in it, and a .npy has no names.
    if len(names) != table.shape[1]:
        names = numbered(table)
    return names, table


def numbered(table):
    """Names for columns that have none."""
    return [f"column {number + 1}" for number in range(table.shape[1])]


def generate(rows, seed):
    """Ten features, of which five count, and a target (Friedman 1991, its first problem)."""
    random = np.random.default_rng(seed)
    x = random.random((rows, 10))
    target = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
    target += 10 * x[:, 3] + 5 * x[:, 4] + random.normal(size=rows)
    table = np.column_stack([x, target])
    return numbered(table), table


def load(args):
    """Return a TensorDataset for training and one for validation; both have the same Metadata.

    A sample is features [columns] and a target [], standardised. Raises InputError.
    """
    names, table = read_table(args.table) if args.table else generate(args.synthetic, args.seed)
    val_count = len(table) // 5
    if val_count == 0:
        raise InputError(f"{len(table)} rows are too few: a fifth of them is for validation")
    # dist: the same on each rank, or they train on each other's validation rows.
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(args.seed))
    val_rows, train_rows = np.split(table[order.numpy()], [val_count])
    # numpy rounds less where the values lie side by side.
    columns = np.ascontiguousarray(train_rows.T)
    mean = columns.mean(axis=1)
    std = columns.std(axis=1)
    std[np.ptp(columns, axis=1) <= ROUNDING * abs(columns).max(axis=1)] = 0
    if std[-1] == 0:
        raise InputError(
            f"the last column, the target, is {mean[-1]:g} in all training rows, so there is "
            "nothing to learn: put the column to predict last"
        )
    metadata = Metadata(columns=names, mean=mean.tolist(), std=std.tolist())
    return dataset_of(train_rows, metadata), dataset_of(val_rows, metadata)


def standardised(rows, metadata):
    """Rows of a table with mean 0 and deviation 1 in each column, or 0 in a constant one.

    They may lack the target, for predictions: a prediction times std[-1] plus mean[-1] is in the
    target's unit. In float64, as large values have no digits left in float32.
    """
    columns = rows.shape[1]
    mean = np.array(metadata["mean"][:columns])
    std = np.array(metadata["std"][:columns])
    return (rows - mean) / np.where(std > 0, std, np.inf)


def dataset_of(rows, metadata):
    """A TensorDataset of features and target, standardised, with its Metadata."""
    table = torch.from_numpy(standardised(rows, metadata)).to(torch.get_default_dtype())
    dataset = TensorDataset(table[:, :-1].contiguous(), table[:, -1].contiguous())
    dataset.metadata = metadata
    return dataset


class Network(nn.Module):
    """Two hidden layers: features [batch, columns] to predictions [batch], both standardised."""

    def __init__(self, columns, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(columns, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 1),
            nn.Flatten(0),
        )

    def forward(self, features):
        return self.layers(features)


def load_data(args, device, rank, world_size):
    """Return a DataObject for training and one for validation."""
    train_set, val_set = load(args)
    # dist: all ranks share --global-batch-size.
    batch_size = schedule.per_process(args.batch_size, args.global_batch_size, world_size)
    # dist: each rank has its own share of a global batch; else all compute the same gradients.
    train_sampler = EpochSampler(len(train_set), batch_size, rank, world_size, seed=args.seed)
    # dist: each row once; torch's DistributedSampler repeats some, which count twice.
    val_sampler = range(rank, len(val_set), world_size)
    train_loader = TensorLoader(train_set, train_sampler, batch_size, device)
    val_loader = TensorLoader(val_set, val_sampler, args.test_batch_size, device)
    train = DataObject(train_set, train_sampler, train_loader)
    return train, DataObject(val_set, val_sampler, val_loader)


def averages(total):
    """The mean squared error, its root, and the mean absolute error, in the target's unit."""
    squared = total["loss"] / total["rows"]
    return {"loss": squared, "rmse": squared**0.5, "mae": total["absolute"] / total["rows"]}


def text(result):
    return f"rmse {result['rmse']:.4f} mae {result['mae']:.4f}"


def make_step(model, optimizer, sums, unit):
    """Return the function that trains on a batch: all that the device does in a step."""

    def step(features, target):
        optimizer.zero_grad()
        error = model(features) - target
        loss = error.square().mean()
        loss.backward()
        optimizer.step()
        # In the unit of the target.
        error = error.detach() * unit
        sums.add(loss=error.square().sum(), absolute=error.abs().sum())

    return step


@torch.inference_mode()
def evaluate(args, model, val, device, watchdog):
    """Return the averages over the whole validation set, each sample once."""
    # dist: BatchNorm's statistics differ between ranks: evaluate with rank 0's, which are saved.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    sums = Sums(device, "loss", "absolute", "rows")
    unit = val.dataset.metadata["std"][-1]
    for batch in watchdog.watch(val.loader):
        features, target = to_device(batch, device)
        error = (model(features) - target) * unit
        sums.add(loss=error.square().sum(), absolute=error.abs().sum(), rows=len(target))
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
        features, target = to_device(batch, device)
        # Data, rates and random numbers depend on seed and position: a resume repeats them.
        rates.set(position)
        # dist: each rank draws its own dropout.
        seed_step(args.seed, position, device, rank)
        step(features, target)
        # Python counts this; the step is only what the device does.
        sums.add(rows=len(target))
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


def build(args, metadata, device, world_size):
    """Return the model, its optimizer, and lines for the log."""
    columns = len(metadata["columns"]) - 1
    model = Network(columns, args.width).to(device)
    lines = init_from(args, model, metadata)
    pairs = zip(metadata["columns"], metadata["std"], strict=True)
    constant = ", ".join(name for name, std in pairs if std == 0)
    if constant:
        lines.append(f"constant in the training rows, so of no effect: {constant}")
    if args.compile:
        devices.compile_model(model)
    # dist: the global batch is world_size times larger.
    factor = schedule.lr_factor(args.scale_lr, world_size, args.global_batch_size)
    peak_lr = args.lr * factor
    optimizer = torch.optim.AdamW(
        model.parameters(), peak_lr, weight_decay=args.weight_decay, fused=True
    )
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
    model, optimizer, lines = build(args, train.dataset.metadata, device, world_size)
    position = Position(train.sampler, args.epochs, args.max_steps, args.eval_every)
    # From --lr up to the rate of each parameter group, and then down to 0.
    rates = schedule.WarmupCosine(optimizer, args.warmup_epochs, args.lr)
    lines += rates.warn_if_short(position)
    sums = Sums(device, "loss", "absolute", "rows")
    # The figures are in the unit of the target.
    unit = train.dataset.metadata["std"][-1]
    step = make_step(model, optimizer, sums, unit)
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
        "metadata": train.dataset.metadata,
    }
    # Holds the folder of the run, and loads the checkpoint of --resume into `state`.
    run = Run(
        args,
        state,
        device,
        strategy="DDP, torchrun",
        lr=rates.peak,
        unit="rows",
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
        is_best = best.update(val_result["rmse"])
        run.save(is_best)
        if args.dry_run:
            break


if __name__ == "__main__":
    with launch.plain_exits():
        main()
        # dist: closes the connections; NCCL warns without it.
        dist.destroy_process_group()
