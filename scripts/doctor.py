"""Check, before a job, that its processes find each other, compute correct sums, and share the data.

    python scripts/doctor.py
    torchrun --nproc-per-node=2 scripts/doctor.py
    horovodrun -np 2 python scripts/doctor.py
    mpirun -np 2 --bind-to none python scripts/doctor.py --dataset mnist --batch-size 32
    sbatch slurm/ddp_2nodes.sh scripts/doctor.py --data-dir data
    sbatch slurm/hvd_2nodes.sh scripts/doctor.py --data-dir data

Start it in place of a recipe, with the flags of the data set's single.py. The line that begins with "doctor" says "all
is well", with status 0, or what is wrong and what to do, and status 1 (2 for wrong input). It trains nothing and writes
no results. With --data-dir it reads the data set as a recipe does, and downloads it if it is missing; without, it uses
blank images: as many for training, and a fifth for validation. For a recipe of your own, `--recipe ../mine/train.py
--data load` uses its flags, and the two datasets that its load(args) returns; without --data the datasets are not
checked. --dataset none needs no recipe.
"""

import argparse
import faulthandler
import functools
import itertools
import json
import operator
import os
import runpy
import signal
import socket
import statistics
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(1, str(ROOT))
from benchmarks import allreduce, machine
from common import flags, processes, schedule
from common.data import DataObject, EpochSampler, ImageTensor
from common.processes import fail

DATA = {"mnist": ("datasets.mnist", 60_000), "cifar10": ("cifar.load", 50_000),  # the images are for training
        "imagenet": ("jpegs.imagenet", 1_281_167)}
SMALL, LARGE = 4, 2**24  # bytes to reduce
SLOW = 1.25  # times the median: a rank for which all others wait
STARTED = {  # the variable with the number of processes: its launcher, and what to do if each of them runs alone
    "OMPI_COMM_WORLD_SIZE": ("mpirun", "scripts/install_horovod.sh builds Horovod with the installed MPI"),
    "SLURM_STEP_NUM_TASKS": ("srun", "Horovod needs srun --mpi=pmix, and DDP one torchrun per node: see slurm/"),
}


def parse_args():
    """Return (the recipe's parsed arguments, the function that returns its datasets, or None)."""
    parser = flags.Parser(__doc__)
    parser.epilog = "It also accepts the flags of the recipe: see the recipe's --help."
    parser.add_argument("--dataset", choices=[*DATA, "none"], default="cifar10", help="the data set of the recipe")
    parser.add_argument("--recipe", type=Path, metavar="FILE", help="a recipe of your own")
    parser.add_argument("--data", metavar="NAME", help="the function in it that returns the datasets")
    parser.add_argument("--data-dir", metavar="DIR", help="folder of the data set, downloaded if missing")
    parser.add_argument("--timeout", type=flags.COUNT, default=60, metavar="SECONDS", help="longest time for a step")
    parser.add_argument("--local-rank", help=argparse.SUPPRESS)  # torch.distributed.launch passes it
    own, others = parser.parse_known_args()
    sys.argv[1:] = [f"--timeout={own.timeout}", *others, *(["--data-dir", own.data_dir] if own.data_dir else [])]
    if own.dataset == "none" and not own.recipe:
        return flags.parser(__doc__, "none").parse_args(), None
    path, data = own.recipe, own.data
    if not path:
        path, (data, images) = ROOT / own.dataset / "single.py", DATA[own.dataset]
        sys.argv[1:1] = [] if own.data_dir else [f"--synthetic={images}"]
    elif not path.is_file():
        parser.error(f"--recipe {path}: there is no such file")
    sys.path.insert(0, str(path.parent))  # for its own imports
    module = argparse.Namespace(**runpy.run_path(str(path)))
    try:
        parse, load = (name and operator.attrgetter(name)(module) for name in ("parse_args", data))
    except AttributeError as error:
        parser.error(f"{path} has no {error.name}: it needs parse_args(), and the function that --data names")
    args = parse()
    return args, blank if not own.recipe and args.synthetic else load


def blank(args):
    """One-pixel images, as many as --synthetic generates."""
    return [ImageTensor(torch.zeros(length, 1, 1, 1, dtype=torch.uint8), torch.zeros(length, dtype=torch.int64),
                        ((0.5,), (0.5,))) for length in (args.synthetic, max(1, args.synthetic // 5))]


def faults_of_launch(group):
    """The fault, if a launcher started several processes that are not connected."""
    torchruns = os.environ.get("GROUP_WORLD_SIZE")  # the number of torchruns that have joined
    for name, (launcher, cure) in STARTED.items():
        started = int(os.environ.get(name, 1))
        if started > int(torchruns or group.world_size):
            if torchruns:
                cure = f"torchrun needs --nnodes={started} and a common --rdzv-endpoint, as in slurm/ddp_2nodes.sh"
            return [f"{launcher} started {started} of these, and this one is rank {group.rank} of {group.world_size}, "
                    f"so they are not connected: {cure}"]
    return []


def describe(group, args):
    """A description of this process, for the others."""
    gpu = torch.cuda.get_device_properties(group.device) if group.device.type == "cuda" else None
    return {"host": socket.gethostname(), "local_rank": group.local_rank, "threads": torch.get_num_threads(),
            "cores": sorted(os.sched_getaffinity(0)), "device": f"{group.device} ({gpu.name})" if gpu else "cpu",
            "place": f"GPU {gpu.uuid}" if gpu else f"local rank {group.local_rank}",
            "same": {f"--{name.replace('_', '-')}": str(value) for name, value in vars(args).items()}
            | machine.versions()}


def first_with(values):
    """{value: the first rank that has it}, for a list with a value per rank."""
    return {value: values.index(value) for value in values}


def faults_of(ranks):
    """The faults that the descriptions of all ranks show, with what to do."""
    faults = []
    for name in dict.fromkeys(name for rank in ranks for name in rank["same"]):
        found = first_with([rank["same"].get(name) for rank in ranks])
        if len(found) > 1:
            faults.append(f"{name} is {', '.join(f'{value} on rank {rank}' for value, rank in found.items())}: "
                          "start all ranks with the same flags, from the same environment")
    places = [f"{rank['place']} of {rank['host']}" for rank in ranks]
    return faults + [f"ranks {places.index(place)} and {rank} both have {place}, and so the same device: start one "
                     "launcher on each host, and give each host a name of its own"
                     for rank, place in enumerate(places) if places.index(place) != rank][:1]


def seconds_of_work(group, dataset):
    """{kind: seconds of a piece of work without communication}: the shortest of three means over 0.2 s."""
    matrix, block = torch.rand(512, 512, device=group.device), torch.rand(2**22, device=group.device)
    pieces = {"arithmetic": lambda: (matrix @ matrix).sum().item(), "memory": lambda: block.clone()[-1].item()}
    if dataset:
        images = DataObject(dataset, range(group.rank, len(dataset), group.world_size), 100, group.device)
        batches = itertools.chain.from_iterable(itertools.repeat(images))
        pieces["reading data"] = lambda: next(batches)

    def mean(piece):
        began, count = time.perf_counter(), 0
        while (passed := time.perf_counter() - began) < 0.2:
            piece()
            count += 1
        return passed / count

    found = {}
    for name, piece in pieces.items():
        group.barrier()  # all at the same time, as in training
        found[name] = min(mean(piece) for _ in range(3))
    return found


def slow_ranks(ranks, seconds):
    """Yield a warning for each rank that takes longer than the others for its `seconds` of each kind of work."""
    for name in seconds[0]:
        middle = statistics.median(each[name] for each in seconds)
        for number, each in enumerate(seconds):
            if each[name] > SLOW * middle:
                yield (f"rank {number} on {ranks[number]['host']} takes {each[name] / middle:.2f} times the median for "
                       f"{name}, and all others wait for it: look for other programs, limits of power or of the cgroup")


def warnings_of(ranks):
    """Yield what makes a host slow."""
    for host in sorted({rank["host"] for rank in ranks}):
        here = [rank for rank in ranks if rank["host"] == host]
        threads, cores = sum(rank["threads"] for rank in here), len({core for rank in here for core in rank["cores"]})
        if threads > cores:
            yield (f"{len(here)} processes with {threads} threads share {cores} cores of {host}: "
                   f"set OMP_NUM_THREADS={max(1, cores // len(here))}, or start fewer")


def faults_of_data(group, args, train_set, val_set):
    """Return (the faults of the data that the ranks would read, a description of it)."""
    sizes = group.gather(torch.tensor([len(train_set), len(val_set)])).tolist()
    if len(found := first_with(list(map(tuple, sizes)))) > 1:
        each = ", ".join(f"{a} and {b} images on rank {rank}" for (a, b), rank in found.items())
        return [f"the data set is not the same on all ranks ({each}): bring the same files to all hosts"], None
    accumulate = getattr(args, "accumulate", 1)
    sampler = EpochSampler(len(train_set), args.batch_size * accumulate, args.seed, group.rank, group.world_size)
    val_sampler, counts = range(group.rank, len(val_set), group.world_size), []
    for dataset, share in (train_set, sampler), (val_set, val_sampler):
        indices = DataObject(dataset, share, args.batch_size, group.device).indices()
        counts.append(torch.bincount(indices, minlength=len(dataset)).int().to(group.device))
        group.all_reduce(counts[-1])  # how often each image is read, over all ranks
    never, twice, not_once = (int(wrong.sum()) for wrong in (counts[0] == 0, counts[0] > 1, counts[1] != 1))
    faults = [f"the shards of training are wrong, an epoch reads {twice} images more than once and {never} "
              "never"] * bool(twice or never >= sampler.global_batch)
    faults += [f"the shards of validation are wrong, {not_once} images are not read exactly once"] * bool(not_once)
    return faults, (f"an epoch trains on {len(train_set) - never:,} of {len(train_set):,} images, each once"
                    f"{f' ({never:,} fill no global batch)' * (never > 0)}, and validates on {len(val_set):,}, "
                    f"each once; none is repeated as padding\nbatch {args.batch_size} per process"
                    f"{f' x {accumulate} accumulated' * (accumulate > 1)}, {sampler.global_batch} global | "
                    f"{len(train_set) // sampler.global_batch} steps per epoch")


def main():
    args, load = parse_args()
    processes.install_signal_handlers()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # there is nothing to save
    processes.die_with_parent()
    datasets = load and load(args)  # before the group exists, as a download can take long

    def say(line=""):
        faulthandler.dump_traceback_later(args.timeout, exit=True, file=sys.__stderr__)
        if line and group.rank == 0:
            print(line, flush=True)

    def stop_if(faults):
        if faults:
            say("doctor: " + "; ".join(faults))
            group.barrier()  # once one rank ends, the launcher ends the others
            os._exit(1)

    say()
    group = allreduce.join(functools.partial(flags.pick_device, args))
    flags.tune_cpu(group.device)  # as a recipe does
    if hasattr(args, "global_batch_size"):
        schedule.divide_batch(args, group.world_size)
    stop_if(faults_of_launch(group))
    for size in (SMALL, LARGE):
        if not allreduce.sum_is_right(group, size):  # decided alone: no collective can be trusted
            fail(f"the all-reduce of {size} bytes over {group.backend} gives a wrong sum: try another backend or, on "
                 "GPUs, NCCL_P2P_DISABLE=1 and then NCCL_IB_DISABLE=1", status=1)
    ranks = [json.loads(text) for text in group.gather_text(json.dumps(describe(group, args)))]
    say(", ".join(map(" ".join, machine.versions().items())))
    say("| rank | host | local rank | device | cores | threads |\n| ---: | --- | ---: | --- | ---: | ---: |")
    for number, rank in enumerate(ranks):
        say(f"| {number} | {rank['host']} | {rank['local_rank']} | {rank['device']} | {len(rank['cores'])} | "
            f"{rank['threads']} |")
    stop_if(faults_of(ranks))
    if group.world_size > 1:
        small, large = (statistics.median(allreduce.seconds_of(group, size, repeats=3)) for size in (SMALL, LARGE))
        bandwidth = allreduce.bus_bandwidth(LARGE, large, group.world_size)
        say(f"all-reduce over {group.backend}: the sums are right | {SMALL} bytes take {small * 1e6:.0f} us | "
            f"bus bandwidth {bandwidth / 1e9:.2f} GB/s for {LARGE >> 20} MiB")
    if datasets:
        faults, what_is_read = faults_of_data(group, args, *datasets)
        stop_if(faults)
        say(f"{args.dataset}{', generated' if getattr(args, 'synthetic', None) else ''}: {what_is_read}")
    if hasattr(args, "lr"):
        factor = schedule.lr_factor(args, group.world_size)
        say(f"learning rate {args.lr * factor:g} (--lr {args.lr:g} times {factor:g})")
    work = group.gather_text(json.dumps(seconds_of_work(group, datasets and load is not blank and datasets[0])))
    warnings = [*warnings_of(ranks), *slow_ranks(ranks, [json.loads(text) for text in work])]
    for warning in warnings:
        say(f"warning: {warning}")
    hosts = len({rank["host"] for rank in ranks})
    say(f"doctor: all is well{' but for the warnings' if warnings else ''}: world size {group.world_size} on {hosts} "
        f"host{'s' * (hosts > 1)}, device {group.device.type} ({machine.hardware(group.device)})")
    group.leave()


if __name__ == "__main__":
    main()
