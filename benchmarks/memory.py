"""Measure the memory that a save and a resume take on each rank, beside torch, DCP and accelerate.

    python benchmarks/memory.py --layers 6 30 --ranks 1 2 4
    python benchmarks/memory.py --layers 2 --only "torch.save" "torch.load" --out /tmp/memory

The unit is the state: the float32 weights of a stack of linear layers of 16.8 million parameters
each, and the momentum of SGD. A rank that trains holds 1.5 of it: weights, gradients, momentum.
Each case runs in processes of its own, and a second process samples each of them every 5 ms. Only
the process's own memory counts ("RssAnon" in Linux), and not a mapped file, as all ranks share its
pages and the kernel may drop them.
"""

import argparse
import contextlib
import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import runs
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

from common import checkpoint, flags, fsdp, weights
from common.metadata import Metadata
from common.process import launch
from common.ranks import World
from scripts import export

WIDTH = 4096
# Prints the peak memory of another process so far, until that process ends.
WATCH = """
import sys, time
largest = 0
try:
    while True:
        with open(f"/proc/{sys.argv[1]}/status") as file:
            line = next(line for line in file if line.startswith("RssAnon"))
        largest = max(largest, int(line.split()[1]))
        print(largest, flush=True)
        time.sleep(0.005)
except (OSError, StopIteration):
    pass
"""


def parse_args():
    parser = flags.Parser(__doc__)
    add = parser.add_argument
    layers = "linear layers of 16.8 M parameters; sizes that do not fit here are skipped"
    add("--layers", type=flags.positive_int, nargs="+", default=[6], help=layers)
    add("--ranks", type=flags.positive_int, nargs="+", default=[2], help="processes")
    add("--only", choices=CASES, nargs="+", default=list(CASES), help="measure these")
    runs.add_out(parser)
    # For the processes that this script starts.
    add("--case", choices=CASES, help=argparse.SUPPRESS)
    add("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


class Training:
    """A model, its optimizer and its state, on each rank of a group."""

    def __init__(self, layers, folder, sharded=False):
        self.folder = folder
        self.seconds = 0
        self.model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
        if sharded:
            for layer in self.model:
                fully_shard(layer)
            fully_shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, 0.9, foreach=sharded)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        if sharded:
            self.state = {
                "model": fsdp.WholeModel(self.model),
                "optimizer": fsdp.WholeOptimizer(self.optimizer),
            }

    def step(self):
        self.model(torch.zeros(8, WIDTH)).sum().backward()
        self.optimizer.step()

    def parts(self):
        return {name: part.state_dict() for name, part in self.state.items()}

    @contextlib.contextmanager
    def timed(self):
        """Time this block, during which training stands still."""
        began = time.perf_counter()
        yield
        self.seconds = time.perf_counter() - began


def on_rank_0(write):
    """Let rank 0 write while the others wait, as in a run."""
    if dist.get_rank() == 0:
        write()
    dist.barrier()


def world_of(training):
    device = next(training.model.parameters()).device
    return World(device, dist.get_rank(), dist.get_world_size(), dist.all_reduce)


def train(training):
    training.step()


def save(training):
    training.step()
    with training.timed():
        parts = training.parts()
        on_rank_0(lambda: checkpoint.save(training.folder, parts, {}))


def resume(training):
    path = str(training.folder / "last.pt")
    with training.timed():
        checkpoint.resume(path, None, training.state, {}, [], set(), world_of(training))
    training.step()


def init_from(training):
    path = str(training.folder / "last.pt")
    args = argparse.Namespace(
        init_from=path, init_partial=False, resume=None, log_dir=None, evaluate=False
    )
    with training.timed():
        weights.init_from(args, training.model, Metadata(), world_of(training))
    training.step()


def export_weights(training):
    """Export the weights, in a process without a model."""
    training.model = training.optimizer = training.state = None
    weights_file = training.folder / f"weights-{dist.get_world_size()}"
    sys.argv = ["export.py", str(training.folder / "last.pt"), str(weights_file)]
    with training.timed():
        on_rank_0(export.main)


def torch_save(training):
    training.step()
    with training.timed():
        on_rank_0(lambda: torch.save(training.parts(), training.folder / "plain.pt"))


def torch_load(training):
    with training.timed():
        saved = torch.load(training.folder / "plain.pt", map_location="cpu")
        for name, part in training.state.items():
            part.load_state_dict(saved[name])
    # `saved` stays in memory, as in a script whose main() has loaded it.
    training.step()


def dcp_save(training):
    training.step()
    with training.timed():
        dcp.save(training.parts(), checkpoint_id=training.folder / "dcp")


def dcp_async_save(training):
    """The run trains during the save."""
    training.step()
    with training.timed():
        saving = dcp.async_save(training.parts(), checkpoint_id=training.folder / "async")
    training.step()
    saving.result()


def dcp_load(training):
    training.step()
    with training.timed():
        parts = training.parts()
        dcp.load(parts, checkpoint_id=training.folder / "dcp")
        for name, part in training.state.items():
            part.load_state_dict(parts[name])
    training.step()


def with_accelerate(training, load):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    training.model, training.optimizer = accelerator.prepare(training.model, training.optimizer)
    folder = str(training.folder / "accelerate")
    training.step()
    with training.timed():
        if load:
            accelerator.load_state(folder)
        else:
            accelerator.save_state(folder)
    training.step()


# What each process does. A load follows the save that it reads.
CASES = {
    "a run that begins": train,
    "a run that saves": save,
    "a run that resumes": resume,
    "init-from": init_from,
    "scripts/export.py": export_weights,
    "FSDP: begins": train,
    "FSDP: saves one file": save,
    "FSDP: resumes from one file": resume,
    "torch.save": torch_save,
    "torch.load": torch_load,
    "dcp.save": dcp_save,
    "dcp.async_save": dcp_async_save,
    "dcp.load": dcp_load,
    "accelerate: save_state": functools.partial(with_accelerate, load=False),
    "accelerate: load_state": functools.partial(with_accelerate, load=True),
}


def run_case(args):
    """In one rank: print this case's peak memory, in units of the state, and its seconds."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    # Torch takes the memory that it needs itself at the first step.
    Training(1, args.folder).step()
    before = own_memory()
    command = [sys.executable, "-S", "-c", WATCH, str(os.getpid())]
    with tempfile.TemporaryFile("w+") as seen:
        watcher = subprocess.Popen(command, stdout=seen)
        (layers,) = args.layers
        training = Training(layers, args.folder, sharded=args.case.startswith("FSDP"))
        CASES[args.case](training)
        watcher.terminate()
        watcher.wait()
        seen.seek(0)
        largest = int(seen.read().split()[-1]) * 1024
    memory = (largest - before) / state_bytes(layers)
    # In one write, so that the lines of several ranks do not mix.
    sys.stdout.write(f"case: {dist.get_rank()} {memory:.2f} {training.seconds:.1f}\n")
    dist.barrier()
    dist.destroy_process_group()


def own_memory():
    """The bytes of this process's own memory."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024


def state_bytes(layers):
    return layers * WIDTH**2 * 8


def measure(layers, case, ranks, folder):
    """Run a case, and return [(memory, seconds)] of its ranks."""
    command = runs.run(
        f"{runs.LAUNCHERS['ddp_launch'].format(ranks)} {__file__} --layers {layers} "
        f"--case '{case}' --folder {folder}",
        threads=1,
    )
    found = sorted(line.split() for line in command.lines() if line.startswith("case: "))
    return [(float(memory), float(seconds)) for _, _, memory, seconds in found]


def measure_all(args):
    """Yield the figures of each case, with each number of layers and of ranks that fits here."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") - 4e9
    cases = args.only
    if importlib.util.find_spec("accelerate") is None:
        cases = [case for case in cases if not case.startswith("accelerate")]
    for layers in args.layers:
        with tempfile.TemporaryDirectory(prefix="memory-") as folder:
            for case in cases:
                for ranks in args.ranks:
                    # 2.8: what dcp.async_save takes.
                    if 2.8 * state_bytes(layers) * ranks < free:
                        found = measure(layers, case, ranks, Path(folder))
                        run = {"layers": layers, "case": case, "processes": ranks}
                        yield run | {"of ranks": found}


def page(measured):
    """A table, with the largest number of processes that each model was measured with."""
    (one,) = measured
    most = {}
    for run in one["runs"]:
        most[run["layers"]] = max(run["processes"], most.get(run["layers"], 1))
    columns = ["case"]
    for layers, ranks in most.items():
        unit = "ranks" if ranks > 1 else "rank"
        size = f"{layers * WIDTH**2 / 1e6:.0f} M parameters, {ranks} {unit}"
        columns += [f"{size}: rank 0", *(["another rank"] if ranks > 1 else []), "seconds"]
    rows = {}
    for run in one["runs"]:
        if run["processes"] == most[run["layers"]]:
            (memory, seconds), *others = run["of ranks"]
            cells = [f"{memory:.2f}", *([f"{max(others)[0]:.2f}"] if others else [])]
            row = rows.setdefault(run["case"], [run["case"]])
            row += [*cells, f"{seconds:.1f}" if seconds else ""]
    explained = (
        "The peak of each rank's private memory, in units of the state (weights and momentum). "
        "seconds: the time of the save or the load on rank 0."
    )
    table = runs.table(columns, list(rows.values()))
    return runs.document("Memory of a save and a resume", explained, table, runs.origin(one))


def main():
    args = parse_args()
    if args.case:
        run_case(args)
        return
    measured = runs.about(1) | {"runs": []}
    for run in measure_all(args):
        print(run, file=sys.stderr)
        measured["runs"].append(run)
    runs.write(args.out, "memory", [measured], page([measured]))
    print(page([measured]))


if __name__ == "__main__":
    with launch.plain_exits():
        main()
