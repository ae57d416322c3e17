"""Before a job, check that its processes find each other, compute correct sums, and share data.

    python scripts/doctor.py
    torchrun --nproc-per-node=2 scripts/doctor.py
    horovodrun -np 2 python scripts/doctor.py
    mpirun -np 2 --bind-to none python scripts/doctor.py --dataset mnist --batch-size 32
    sbatch slurm/ddp_2nodes.sh scripts/doctor.py --data-dir data
    sbatch slurm/hvd_2nodes.sh scripts/doctor.py --data-dir data

Start it in place of a recipe, with the flags of the data set's ddp_launch.py. The line that begins
with "doctor" says "all is well" (status 0), or what is wrong and what to do (status 1, or 2 for
wrong input). The doctor trains nothing and writes no results. With --data-dir it reads the data set
as a recipe does, and downloads it if it is missing; without, it checks only which rank would read
which samples. `--recipe ../mine/train.py` checks your own script, which needs parse_args() and
load_data(args, world), as the recipes have them. --dataset none checks no data.
"""

import argparse
import faulthandler
import inspect
import itertools
import math
import os
import runpy
import shutil
import socket
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(1, str(ROOT))

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from common import devices, flags, schedule
from common.data import DataObject, EpochSampler
from common.errors import InputError, RunError
from common.process import cgroups, launch
from common.ranks import World
from scripts import machine
from scripts.group import bus_bandwidth, join, seconds_of, sum_is_right

# The images of each data set for training, and for validation.
IMAGES = {"mnist": (60_000, 10_000), "cifar10": (50_000, 10_000), "imagenet": (1_281_167, 50_000)}
# The bytes to reduce.
SMALL = 4
LARGE = 2**24
# A rank that takes this many times the median is slow: all others wait for it.
SLOW = 1.25
# Warn above this share of a memory limit: model, gradients and optimizer state come on top.
NEARLY_FULL = 0.9
# Variables in which launchers and manifests say where processes meet: a name, or name:port.
MEETINGS = ("PET_RDZV_ENDPOINT", "PET_MASTER_ADDR", "MASTER_ADDR")
# By the variable with its number of processes: a launcher, and what to do if each runs alone.
CURES = {
    "OMPI_COMM_WORLD_SIZE": (
        "mpirun",
        "scripts/install_horovod.sh builds Horovod with the installed MPI",
    ),
    "PMI_SIZE": (
        "the mpirun of MPICH",
        "use horovodrun, or the mpirun of the Open MPI that Horovod was built with",
    ),
    "SLURM_STEP_NUM_TASKS": (
        "srun",
        "Horovod needs srun --mpi=pmix, and DDP one torchrun per node: see slurm/",
    ),
}


def parse_args():
    """Return (the doctor's own arguments, those of the recipe, the recipe or None)."""
    parser = flags.Parser(__doc__)
    parser.epilog = "It also accepts the flags of the recipe: see the recipe's --help."
    add = parser.add_argument
    add("--dataset", choices=[*IMAGES, "none"], default="cifar10", help="data set to check")
    add("--recipe", type=Path, metavar="FILE", help="your own script")
    add("--data-dir", metavar="DIR", help="folder of the data set, downloaded if missing")
    add("--timeout", type=flags.positive_int, default=60, help="longest time for a step (s)")
    add("--device", default="auto", help="cuda, xpu, mps, cpu")
    # torch.distributed.launch passes it.
    add("--local-rank", help=argparse.SUPPRESS)
    own, others = parser.parse_known_args()
    if own.recipe is None and own.dataset == "none":
        if others:
            raise InputError(f"unrecognized arguments: {' '.join(others)}")
        return own, SimpleNamespace(), None
    path = own.recipe or ROOT / own.dataset / "ddp_launch.py"
    if not path.is_file():
        raise InputError(f"--recipe {path}: there is no such file")
    sys.argv[1:] = others
    if own.data_dir:
        sys.argv += ["--data-dir", own.data_dir]
    # For its own imports.
    sys.path.insert(0, str(path.parent))
    recipe = SimpleNamespace(**runpy.run_path(str(path)))
    for name, parameters in (("parse_args", 0), ("load_data", 2)):
        function = vars(recipe).get(name)
        if function is None or len(inspect.signature(function).parameters) != parameters:
            raise InputError(f"{path} needs the function {name}, as mnist/ddp_launch.py has it")
    return own, recipe.parse_args(), recipe


def data_of(own, args, recipe, group):
    """The recipe's DataObjects for training and validation; without files only their samplers."""
    if own.recipe or own.data_dir or args.synthetic:
        world = World(group.device, group.rank, group.world_size, group.all_reduce, "the doctor")
        return recipe.load_data(args, world)
    train_length, val_length = IMAGES[own.dataset]
    per_step = schedule.batch_size(args, group.world_size) * args.accumulate
    train_sampler = EpochSampler(
        train_length, per_step, group.rank, group.world_size, seed=args.seed
    )
    val_sampler = range(group.rank, val_length, group.world_size)
    train = DataObject(range(train_length), train_sampler, loader=None)
    return train, DataObject(range(val_length), val_sampler, loader=None)


def passes_of_a_step(args):
    """How many batches a step takes: --accumulate, which not every recipe has."""
    return vars(args).get("accumulate", 1)


def name_of_data(own, args):
    """The data set, and whether its files were read."""
    if vars(args).get("synthetic"):
        return f"{args.task}, generated"
    if own.recipe or own.data_dir:
        return args.task
    return f"{args.task}, whose files were not read"


def faults_of_launch(group):
    """The fault, if a launcher started several processes that are not connected."""
    # The number of torchruns that have joined.
    torchruns = os.environ.get("GROUP_WORLD_SIZE")
    for name in launch.SIZES:
        started = launch.number_in_environment(name, default=1)
        launcher, cure = CURES.get(name, ("a launcher", f"unset {name} if no launcher did"))
        joined = group.world_size
        if torchruns and name in CURES:
            joined = int(torchruns)
            cure = (
                f"torchrun needs --nnodes={started} and a common --rdzv-endpoint, "
                "as in slurm/ddp_2nodes.sh"
            )
        if started > joined:
            return [
                f"{launcher} started {started} processes, but this one is rank {group.rank} of "
                f"{group.world_size}, so they are not connected: {cure}"
            ]
    return []


def check_meetings():
    """Raise RunError if a name at which the processes are to meet has no address."""
    for variable in MEETINGS:
        host = os.environ.get(variable, "").partition(":")[0]
        if host and not name_resolves(host):
            raise RunError(
                f"{variable} is {os.environ[variable]}, and the name {host} does not resolve: in "
                "Kubernetes it needs a headless Service that selects the pods, with "
                "publishNotReadyAddresses, and the pods need its name as their subdomain"
            )


def describe(group, own, args):
    """A description of this process, for the others."""
    # The doctor takes these flags itself, so the recipe does not see them.
    same = vars(args) | {"device": own.device, "timeout": own.timeout}
    gpu = torch.cuda.get_device_properties(group.device) if group.device.type == "cuda" else None
    return {
        "host": socket.gethostname(),
        "local_rank": group.local_rank,
        "threads": torch.get_num_threads(),
        "cores": devices.own_cores(),
        "cpu_quota": cgroups.cpu_quota(),
        "resolves": name_resolves(socket.gethostname()),
        "shared_memory": shared_memory_left(),
        "device": f"{group.device} ({gpu.name})" if gpu else str(group.device),
        "place": f"GPU {gpu.uuid}" if gpu else f"local rank {group.local_rank}",
        "same": {f"--{name.replace('_', '-')}": str(value) for name, value in same.items()}
        | machine.versions(),
    }


def name_resolves(host):
    """Whether this machine knows the address of `host`."""
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def first_with(values):
    """{value: the first rank that has it}, for a list with a value per rank."""
    return {value: values.index(value) for value in values}


def faults_of(ranks):
    """The faults that the descriptions of all ranks show, with what to do."""
    faults = []
    for name in dict.fromkeys(name for rank in ranks for name in rank["same"]):
        found = first_with([rank["same"].get(name) for rank in ranks])
        if len(found) > 1:
            each = ", ".join(f"{value} on rank {rank}" for value, rank in found.items())
            faults.append(
                f"{name} is {each}: start all ranks with the same flags, from the same environment"
            )
    places = [f"{rank['place']} of {rank['host']}" for rank in ranks]
    for rank, place in enumerate(places):
        if places.index(place) != rank:
            faults.append(
                f"ranks {places.index(place)} and {rank} both have {place}, and so the same "
                "device: start one launcher on each host, and give each host a name of its own"
            )
            break
    return faults


def seconds_of_work(group, loader):
    """{kind: seconds of a piece of work without communication}: the best mean over 0.2 s."""
    matrix = torch.rand(512, 512, device=group.device)
    block = torch.rand(2**22, device=group.device)
    pieces = {
        "arithmetic": lambda: (matrix @ matrix).sum().item(),
        "memory": lambda: block.clone()[-1].item(),
    }
    if loader is not None:
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        pieces["reading data"] = lambda: next(batches)

    def mean(piece):
        began = time.perf_counter()
        count = 0
        passed = 0.0
        while passed < 0.2:
            piece()
            count += 1
            passed = time.perf_counter() - began
        return passed / count

    found = {}
    for name, piece in pieces.items():
        # All at the same time, as in training.
        group.barrier()
        found[name] = min(mean(piece) for _ in range(3))
    return found


def by_host(ranks):
    """{host: the descriptions of its ranks}."""
    hosts = {}
    for rank in sorted(ranks, key=lambda rank: rank["host"]):
        hosts.setdefault(rank["host"], []).append(rank)
    return hosts


def warnings_of(ranks):
    """Yield what makes a host or a rank slow, or may end a run on it."""
    for host, here in by_host(ranks).items():
        threads = sum(rank["threads"] for rank in here)
        cores = len({core for rank in here for core in rank["cores"]})
        quota = here[0]["cpu_quota"]
        usable = math.ceil(min(cores, quota))
        if threads > usable:
            what = f"a quota of {quota:g} CPUs" if quota < cores else f"{cores} cores"
            yield (
                f"{len(here)} processes with {threads} threads share {what} of {host}: "
                f"set OMP_NUM_THREADS={max(1, usable // len(here))}, or start fewer"
            )
        if not here[0]["resolves"]:
            yield (
                f"{host} cannot resolve its own name, so launchers wait or fail: "
                f"add the line '127.0.0.1 {host}' to /etc/hosts, or its address in the network"
            )
        use, limit = here[0]["memory"]
        # What is in /dev/shm counts, too.
        use += sum(rank["bytes_of_batches"] for rank in here)
        if use > NEARLY_FULL * limit:
            yield (
                f"{host} needs {math.ceil(use / 2**20)} MiB even without a model, and its "
                f"memory limit is {int(limit) >> 20} MiB, at which the kernel kills a process: "
                "raise the limit, or use fewer --workers"
            )
    for name in ranks[0]["work"]:
        middle = statistics.median(rank["work"][name] for rank in ranks)
        for number, rank in enumerate(ranks):
            times = rank["work"][name] / middle
            if times > SLOW:
                yield (
                    f"rank {number} on {rank['host']} takes {times:.2f} times the median for "
                    f"{name}, and all others wait for it: look for other programs, or for "
                    "power or CPU limits"
                )


def faults_of_shared_memory(ranks):
    """The hosts whose /dev/shm is too small for the batches of their loader workers."""
    faults = []
    for host, here in by_host(ranks).items():
        need = sum(rank["bytes_of_batches"] for rank in here)
        free = here[0]["shared_memory"]
        if need > free:
            faults.append(
                f"/dev/shm of {host} has {free >> 20} MiB left, and the batches of loader workers "
                f"take up to {math.ceil(need / 2**20)} MiB: give a container more "
                "(docker run --shm-size=8g; in Kubernetes an emptyDir with medium: Memory), or use "
                "fewer --workers"
            )
    return faults


def shared_memory_left():
    """The free bytes of /dev/shm; where there is none, loader workers do not need it."""
    return shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else math.inf


def bytes_of_batches(loader):
    """The bytes of the batches that a loader's workers keep ready, estimated from one sample."""
    has_workers = isinstance(loader, DataLoader) and loader.num_workers > 0
    if not has_workers or isinstance(loader.dataset, IterableDataset):
        return 0
    sample = tree_leaves(loader.collate_fn([loader.dataset[0]]))
    bytes_of_sample = sum(leaf.nbytes for leaf in sample if isinstance(leaf, torch.Tensor))
    batches = loader.num_workers * loader.prefetch_factor
    return batches * loader.batch_sampler.batch_size * bytes_of_sample


def length_of(dataset):
    """The length of a data set; -1 for a stream."""
    return len(dataset) if hasattr(dataset, "__len__") else -1


def counts_of(group, data):
    """How often each sample is read, over all ranks."""
    indices = torch.tensor(list(data.sampler), dtype=torch.int64)
    counts = torch.bincount(indices, minlength=len(data.dataset)).int().to(group.device)
    group.all_reduce(counts)
    return counts


def faults_of_data(group, args, train, val):
    """Return (the faults of the data that the ranks would read, a description of it)."""
    lengths = [length_of(train.dataset), length_of(val.dataset)]
    found = first_with(list(map(tuple, group.gather(torch.tensor(lengths)).tolist())))
    if len(found) > 1:
        each = ", ".join(f"{a} and {b} samples on rank {rank}" for (a, b), rank in found.items())
        fault = f"the data set is not the same on all ranks ({each})"
        return [f"{fault}: copy the same files to all hosts"], None
    if -1 in lengths:
        return [], "a stream, which is not checked"
    sampler = train.sampler
    counts = counts_of(group, train)
    never = int((counts == 0).sum())
    twice = int((counts > 1).sum())
    not_once = int((counts_of(group, val) != 1).sum())
    faults = []
    if twice or never >= sampler.global_batch:
        faults.append(
            "the training shards are wrong, "
            f"an epoch reads {twice} samples more than once and {never} never"
        )
    if not_once:
        faults.append(
            f"the validation shards are wrong, {not_once} samples are not read exactly once"
        )
    left_out = f" ({never:,} fill no global batch)" if never else ""
    shares = (
        f"an epoch trains on {lengths[0] - never:,} of {lengths[0]:,} samples, each once"
        f"{left_out}, and validates on {lengths[1]:,}, each once; none is repeated as padding"
    )
    passes = passes_of_a_step(args)
    accumulated = f" x {passes} accumulated" if passes > 1 else ""
    batch = f"batch {sampler.batch_size // passes} per process{accumulated}"
    steps = f"{batch}, {sampler.global_batch} global | {sampler.steps_per_epoch} steps per epoch"
    return faults, f"{shares}\n{steps}"


def main():
    own, args, recipe = parse_args()

    def watch():
        faulthandler.dump_traceback_later(own.timeout, exit=True, file=sys.__stderr__)

    def say(line):
        watch()
        if group.rank == 0:
            print(line, flush=True)

    def stop_if(faults):
        if faults:
            say("doctor: " + "; ".join(faults))
            # Once one rank ends, the launcher ends the others.
            group.barrier()
            os._exit(1)

    def pick_device(local_rank, local_world_size):
        return devices.pick(own.device, local_rank, local_world_size)

    check_meetings()
    watch()
    group = join(pick_device)
    # As a recipe does.
    devices.tune(group.device)
    stop_if(faults_of_launch(group))
    for size in (SMALL, LARGE):
        # Each rank decides alone: no collective can be trusted now.
        if not sum_is_right(group, size):
            raise RunError(
                f"the all-reduce of {size} bytes over {group.backend} gives a wrong sum: try "
                "another backend or, on GPUs, NCCL_P2P_DISABLE=1 and then NCCL_IB_DISABLE=1"
            )
    ranks = group.gather_values(describe(group, own, args))
    say(", ".join(map(" ".join, machine.versions().items())))
    say("| rank | host | local rank | device | cores | threads |")
    say("| ---: | --- | ---: | --- | ---: | ---: |")
    for number, rank in enumerate(ranks):
        say(
            f"| {number} | {rank['host']} | {rank['local_rank']} | {rank['device']} | "
            f"{len(rank['cores'])} | {rank['threads']} |"
        )
    stop_if(faults_of(ranks))
    if group.world_size > 1:
        small, large = (
            statistics.median(seconds_of(group, size, repeats=3)) for size in (SMALL, LARGE)
        )
        bandwidth = bus_bandwidth(LARGE, large, group.world_size)
        say(
            f"all-reduce over {group.backend}: the sums are right | "
            f"{SMALL} bytes take {small * 1e6:.0f} us | "
            f"bus bandwidth {bandwidth / 1e9:.2f} GB/s for {LARGE >> 20} MiB"
        )
    loader = None
    if recipe:
        # A download can take longer than a step.
        faulthandler.cancel_dump_traceback_later()
        # Your own script may return more data sets.
        train, val, *_ = data_of(own, args, recipe, group)
        watch()
        loader = train.loader
        faults, what_is_read = faults_of_data(group, args, train, val)
        stop_if(faults)
    for rank, count in zip(ranks, group.gather_values(bytes_of_batches(loader)), strict=True):
        rank["bytes_of_batches"] = count
    stop_if(faults_of_shared_memory(ranks))
    if recipe:
        say(f"{name_of_data(own, args)}: {what_is_read}")
        if {"lr", "scale_lr", "global_batch_size"} <= vars(args).keys():
            peak_lr = schedule.peak_lr(args, group.world_size)
            say(f"highest learning rate {peak_lr:g} (--lr {args.lr:g})")
    work = seconds_of_work(group, loader)
    # Now that the data set and torch's libraries are loaded.
    found = {"work": work, "memory": machine.memory_of_cgroup()}
    for rank, others in zip(ranks, group.gather_values(found), strict=True):
        rank.update(others)
    warnings = list(warnings_of(ranks))
    for warning in warnings:
        say(f"warning: {warning}")
    but = " apart from the warnings" if warnings else ""
    hosts = len({rank["host"] for rank in ranks})
    where = f"{hosts} host{'s' if hosts > 1 else ''}, device {devices.describe(group.device)}"
    say(f"doctor: all is well{but}: world size {group.world_size} on {where}")
    group.leave()


if __name__ == "__main__":
    with launch.plain_exits():
        main()
