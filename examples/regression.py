"""Regression on a table with DistributedDataParallel, started by torchrun.

    torchrun --nproc-per-node=2 examples/regression.py
    torchrun --nproc-per-node=2 examples/regression.py --table houses.csv
    python scripts/prove.py torchrun --nproc-per-node=2 examples/regression.py --device cpu

Read it beside mnist/ddp_launch.py.
"""

import sys
import warnings
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
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from common import devices, flags, graph, schedule
from common.data import DataObject, EpochSampler, TensorLoader, read_array
from common.errors import InputError, in_one_line
from common.metadata import Metadata
from common.metrics import Sums
from common.process import launch
from common.ranks import World, require_same
from common.run import Run
from common.weights import init_from

# A column whose relative spread is smaller is constant, up to rounding.
ROUNDING = 1e-14


def parse_args():
    parser = flags.Parser(__doc__, task="regression")
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
    flags.add_training_flags(
        parser, epochs=5, batch_size=64, lr=0.001, momentum=None, weight_decay=0.01, scale_lr="sqrt"
    )
    graph.add_flag(parser)
    return parser.parse_args()


def read_table(path):
    """The names of the columns in the file `path`, and its numbers, float64 [rows, columns].

    Raises InputError.
    """
    try:
        if path.endswith(".npy"):
            table = read_array(path)
            names = []
        else:
            with warnings.catch_warnings():
                # NumPy warns if there are no rows.
                warnings.simplefilter("ignore")
                # Latin-1 decodes any bytes: the names may be in any encoding.
                table = np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2, encoding="latin-1")
            with open(path, encoding="utf-8-sig", errors="replace") as file:
                names = file.readline().strip().split(",")
        # Integers are fine; text and complex numbers are not.
        table = table.astype(np.float64, casting="same_kind")
        if table.ndim != 2 or min(table.shape) < 2:
            raise ValueError(f"its shape is {table.shape}")
        wrong = np.argwhere(~np.isfinite(table))
        if len(wrong):
            row, column = wrong[0]
            # Counted as in NumPy's own errors.
            raise ValueError(f"{table[row, column]} at row {row}, column {column + 1}")
    except OSError as error:
        raise InputError(f"--table {path}: {error}") from error
    # An untrusted file can raise any exception.
    except Exception as error:
        raise InputError(
            f"--table {path}: {in_one_line(error)}: give finite numbers, in a .csv with a line of "
            "names and commas between them, or in a .npy [rows, columns]"
        ) from error
    # A column name may contain a comma, and a .npy has no names.
    if len(names) != table.shape[1]:
        names = numbered(table)
    return names, table


def numbered(table):
    """Names for columns that have none."""
    return [f"column {number + 1}" for number in range(table.shape[1])]


def generate(rows, seed):
    """Ten features, of which five matter, and a target (Friedman 1991, the first problem)."""
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
    # dist: the same split on each rank, or they train on each other's validation rows.
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(args.seed))
    val_rows, train_rows = np.split(table[order.numpy()], [val_count])
    # NumPy's mean is more accurate over contiguous values.
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
    """Scale each column to mean 0 and deviation 1; a constant one becomes 0.

    Rows to predict may lack the target: a prediction times std[-1] plus mean[-1] is in its unit.
    Computes in float64, as float32 lacks the precision for large values.
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


def load_data(args, world):
    """Return a DataObject for training and one for validation."""
    train_set, val_set = load(args)
    pairs = zip(train_set.metadata["columns"], train_set.metadata["std"], strict=True)
    constant = ", ".join(name for name, std in pairs if std == 0)
    if constant:
        world.say(f"constant in the training rows, so of no effect: {constant}")
    # dist: --global-batch-size is split over all ranks.
    batch_size = schedule.batch_size(args, world.size)
    # dist: each rank has its own share of a global batch; else all compute the same gradients.
    train_sampler = EpochSampler(len(train_set), batch_size, world.rank, world.size, seed=args.seed)
    # dist: each row once; torch's DistributedSampler repeats some, which count twice.
    val_sampler = range(world.rank, len(val_set), world.size)
    train_loader = TensorLoader(train_set, train_sampler, batch_size, world.device)
    val_loader = TensorLoader(val_set, val_sampler, args.test_batch_size, world.device)
    train = DataObject(train_set, train_sampler, train_loader)
    return train, DataObject(val_set, val_sampler, val_loader)


def averages(loss, absolute, rows):
    """The mean squared error, its root, and the mean absolute error, in the target's unit."""
    squared = loss / rows
    return {"loss": squared, "rmse": squared**0.5, "mae": absolute / rows}


@torch.inference_mode()
def evaluate(model, val, run):
    """Return the averages over the whole validation set, each row once."""
    # dist: BatchNorm's statistics differ between ranks: evaluate with rank 0's, as saved.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    sums = Sums(run.world.device, averages)
    unit = val.dataset.metadata["std"][-1]
    for features, target in run.batches(val.loader):
        error = (model(features) - target) * unit
        sums.add(loss=error.square().sum(), absolute=error.abs().sum(), rows=len(target))
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
    metadata = train.dataset.metadata
    columns = len(metadata["columns"]) - 1
    model = Network(columns, args.width).to(world.device)
    init_from(args, model, metadata, world)
    devices.adapt(model, args)  # --compile
    # dist: the global batch is world.size times larger, and the rate grows with it.
    lr = schedule.peak_lr(args, world.size)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr, weight_decay=args.weight_decay, fused=True
    )
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
    state = {"model": model, "optimizer": optimizer, "metadata": metadata}
    # Locks the folder of the run, and loads the checkpoint of --resume into `state`.
    run = Run(args, world, state, sums, rates, train)
    # Averages in the unit of the target.
    unit = metadata["std"][-1]

    def step(features, target):
        optimizer.zero_grad()
        # dist: through the wrapper; else no gradient is averaged.
        error = ddp_model(features) - target
        loss = error.square().mean()
        loss.backward()
        optimizer.step()
        error = error.detach() * unit
        sums.add(loss=error.square().sum(), absolute=error.abs().sum(), rows=len(target))

    if args.cuda_graph:
        step = graph.Captured(step, world, optimizer)
    # Until --epochs or --max-steps are done, a signal comes, or --dry-run has tried one step.
    while not run.over:
        model.train()
        # Yields batches up to the next evaluation, then saves. Data order, rate and random numbers
        # depend only on seed, position and rank, so a resumed run repeats them.
        for features, target in run.steps(train):
            step(features, target)
        # After SIGTERM or SIGUSR1 the run is over, and has been saved.
        if not run.over:
            # dist: without the wrapper: there are no gradients to average.
            result = evaluate(model, val, run)
            # Lower is better.
            run.record(result, best=-result["rmse"])


if __name__ == "__main__":
    with launch.plain_exits():
        main()
        # dist: closes the connections; NCCL warns without it.
        dist.destroy_process_group()
