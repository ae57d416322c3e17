"""Check what a job needs, before the job: that its processes find each other, add up, and share the data.

    python scripts/doctor.py
    torchrun --nproc-per-node=2 scripts/doctor.py
    horovodrun -np 2 python scripts/doctor.py
    mpirun -np 2 --bind-to none python scripts/doctor.py --dataset mnist --batch-size 32
    sbatch slurm/ddp_2nodes.sh scripts/doctor.py --data-dir data
    sbatch slurm/hvd_2nodes.sh scripts/doctor.py --data-dir data

It takes the place of a recipe, and the flags of the data set's single.py. The last line is the verdict: "all is well"
and status 0, or what is wrong and what to do, and status 1 (2 for a wrong input). It trains nothing and writes no
results: --log-dir, --resume and the like change nothing.

With --data-dir it reads the data set there as a recipe does, which downloads one that is missing. Without, it generates
as many images as the data set has for training, and a fifth as many for validation.
"""

import argparse
import functools
import json
import math
import os
import runpy
import socket
import statistics
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(1, str(ROOT))
from benchmarks import allreduce
from common import data, failures, files, flags, machine, processes, schedule

IMAGES = {"mnist": 60_000, "cifar10": 50_000, "imagenet": 1_281_167}  # for training
SMALL, LARGE = 4, 2**24  # bytes to reduce
STARTED = {  # the variable that says how many a launcher started, the launcher, what to do where they are alone
    "OMPI_COMM_WORLD_SIZE": ("mpirun", "scripts/install_horovod.sh builds Horovod with the MPI that is there"),
    "SLURM_STEP_NUM_TASKS": ("srun", "Horovod takes srun --mpi=pmix, and DDP a torchrun on each node: see slurm/"),
}


def parse_args():
    """What the data set's single.py makes of the flags, but for the few that are others here."""
    parser = flags.Parser(description=__doc__, formatter_class=flags.HelpFormatter, allow_abbrev=False,
                          epilog="The flags of DATASET/single.py are taken as well: see its --help.")
    parser.add_argument("--dataset", choices=IMAGES, default="cifar10", help="whose recipe is to run")
    parser.add_argument("--data-dir", metavar="DIR", help="where the data set is, or is downloaded to")
    parser.add_argument("--timeout", type=flags.number(int, 1), default=60, metavar="SECONDS",
                        help="end when nothing goes on for so long")
    parser.add_argument("--local-rank", help=argparse.SUPPRESS)  # torch.distributed.launch passes it
    own, others = parser.parse_known_args()
    images = ["--data-dir", own.data_dir] if own.data_dir else [f"--synthetic={IMAGES[own.dataset]}"]
    sys.argv[1:] = [*images, f"--timeout={own.timeout}", *others]
    return runpy.run_path(str(ROOT / own.dataset / "single.py"))["parse_args"]()


def faults_of_launch(group):
    """What is wrong where a launcher has started this several times, and they do not know of each other."""
    torchruns = os.environ.get("GROUP_WORLD_SIZE")  # how many have joined, each with its processes
    for name, (launcher, cure) in STARTED.items():
        started = int(os.environ.get(name, 1))
        if started > int(torchruns or group.world_size):
            if torchruns:
                cure = f"torchrun takes --nnodes={started} and a common --rdzv-endpoint, as in slurm/ddp_2nodes.sh"
            return [f"{launcher} started {started} of these, and this one is rank {group.rank} of {group.world_size}, "
                    f"as they do not know of each other: {cure}"]
    return []


def describe(group, given):
    """What the others are to know of this process."""
    gpu = torch.cuda.get_device_properties(group.device) if group.device.type == "cuda" else None
    return {"host": socket.gethostname(), "local_rank": group.local_rank, "threads": torch.get_num_threads(),
            "cores": sum(1 << core for core in os.sched_getaffinity(0)),
            "device": f"{group.device} ({gpu.name})" if gpu else "cpu",
            "place": f"GPU {gpu.uuid}" if gpu else f"local rank {group.local_rank}",
            "same": {**{f"--{name.replace('_', '-')}": value for name, value in given.items()}, **allreduce.versions()}}


def gather(group, own):
    """What `describe` returned on each rank, in their order."""
    row = torch.tensor(list(json.dumps(own).encode().ljust(8192)), dtype=torch.uint8)
    return [json.loads(bytes(row.tolist())) for row in group.gather(row)]


def first_with(values):
    """{value: the first rank that has it}, of the values of all ranks in their order."""
    found = {}
    for rank, value in enumerate(values):
        found.setdefault(value, rank)
    return found


def faults_of(ranks):
    """What is wrong with the descriptions of all ranks, and what to do."""
    faults = []
    for name in dict.fromkeys(name for rank in ranks for name in rank["same"]):
        found = first_with(rank["same"].get(name) for rank in ranks)
        if len(found) > 1:
            faults.append(f"{name} is {', '.join(f'{value} on rank {rank}' for value, rank in found.items())}: "
                          "start all ranks with the same flags, from the same environment")
    places = [f"{rank['place']} of {rank['host']}" for rank in ranks]
    same = [f"ranks {places.index(place)} and {number} both have {place}, and so the same device: start one launcher "
            "on each host, and give each host a name of its own"
            for number, place in enumerate(places) if places.index(place) != number]
    return faults + same[:1]


def warnings_of(ranks):
    """What makes a host slow."""
    for host in first_with(rank["host"] for rank in ranks):
        here = [rank for rank in ranks if rank["host"] == host]
        threads = sum(rank["threads"] for rank in here)
        cores = functools.reduce(lambda a, b: a | b, (rank["cores"] for rank in here)).bit_count()
        if threads > cores:
            yield (f"{len(here)} processes with {threads} threads share {cores} cores of {host}: "
                   f"set OMP_NUM_THREADS={max(1, cores // len(here))}, or start fewer")


def times_read(group, part):
    """How often each image of a DataObject is read in an epoch, over all ranks: int32 [images]."""
    places = torch.tensor([place for batch in part.loader.batch_sampler for place in batch])
    counts = torch.bincount(places % len(part.dataset), minlength=len(part.dataset)).to(group.device, torch.int32)
    group.all_reduce(counts)
    return counts


def read(args, group, train, val):
    """What is wrong with what the ranks read, and a text that says what they read."""
    sizes = group.gather(torch.tensor([len(train.dataset), len(val.dataset), len(train)]))
    found = first_with(map(tuple, sizes.tolist()))
    if len(found) > 1:
        each = ", ".join(f"{a} and {b} images, {n} batches on rank {rank}" for (a, b, n), rank in found.items())
        return [f"the data set is not the same on all ranks ({each}): bring the same files to all hosts"], None
    seen, seen_val = times_read(group, train), times_read(group, val)
    twice, never, not_once = (int(wrong.sum()) for wrong in (seen > 1, seen == 0, seen_val != 1))
    faults = []
    if twice or never >= args.batch_size * group.world_size:
        faults.append(f"the shards of training are wrong, an epoch reads {twice} images more than once and {never} "
                      "never: the sampler has to know rank and world size")
    if not_once:
        faults.append(f"the shards of validation are wrong, {not_once} images are not read exactly once: "
                      "each rank takes range(rank, len(dataset), world_size)")
    return faults, (f"an epoch trains on {len(seen) - never:,} of {len(seen):,} images, each once"
                    f"{f' ({never:,} fill no global batch)' * (never > 0)}, and validates on {len(seen_val):,}, "
                    "each once; none is repeated as padding")


def main():
    args = parse_args()
    given = dict(vars(args))
    watchdog = processes.Watchdog(args.timeout)
    watchdog.start()
    group = allreduce.join(functools.partial(flags.pick_device, args))

    def say(line):
        watchdog.alive()
        if group.rank == 0:
            print(line, flush=True)

    def stop_if(faults):
        if faults:
            say("doctor: " + "; ".join(faults))
            group.barrier()  # when one rank ends, the launcher ends the others
            failures.end(1)

    stop_if(faults_of_launch(group))
    for size in (SMALL, LARGE):
        if not allreduce.sum_is_right(group, size):  # how it is on the others no collective can tell now
            failures.fail(f"the all-reduce of {size} bytes over {group.backend} gives a wrong sum: try another backend "
                          "or, on GPUs, NCCL_P2P_DISABLE=1 and then NCCL_IB_DISABLE=1", status=1)
    ranks = gather(group, describe(group, given))
    say(", ".join(map(" ".join, allreduce.versions().items())))
    say("| rank | host | local rank | device | cores | threads |\n| ---: | --- | ---: | --- | ---: | ---: |")
    for number, rank in enumerate(ranks):
        say(f"| {number} | {rank['host']} | {rank['local_rank']} | {rank['device']} | {rank['cores'].bit_count()} | "
            f"{rank['threads']} |")
    stop_if(faults_of(ranks))
    if group.world_size > 1:
        small, large = (statistics.median(allreduce.seconds_of(group, size, repeats=3)) for size in (SMALL, LARGE))
        bandwidth = allreduce.bus_bandwidth(LARGE, large, group.world_size)
        say(f"all-reduce over {group.backend}: the sums are right | {SMALL} bytes take {small * 1e6:.0f} us | "
            f"bus bandwidth {bandwidth / 1e9:.2f} GB/s for {LARGE >> 20} MiB")
    if group.local_rank == 0:
        files.download(args)
    group.barrier()
    args.image_size = args.image_size or 32
    # generated images of ImageNet are few that come up in turn: a set of any size is made at once
    make = data.imagenet if args.synthetic else getattr(data, args.dataset)
    train, val = make(args, group.device, group.rank, group.world_size)
    faults, what_is_read = read(args, group, train, val)
    stop_if(faults)
    say(f"{args.dataset}{', generated' if args.synthetic else ''}: {what_is_read}")
    say(f"batch {args.batch_size} per process{f' x {args.accumulate} accumulated' if args.accumulate > 1 else ''}, "
        f"{args.batch_size * args.accumulate * group.world_size} global | learning rate "
        f"{args.lr * schedule.lr_factor(args, group.world_size):g} (--lr {args.lr:g} --scale-lr {args.scale_lr} "
        f"--warmup-epochs {args.warmup_epochs:g}) | {math.ceil(len(train) / args.accumulate)} steps per epoch")
    warnings = list(warnings_of(ranks))
    for warning in warnings:
        say(f"warning: {warning}")
    hosts = len({rank["host"] for rank in ranks})
    say(f"doctor: all is well{' but for the warnings' if warnings else ''}: world size {group.world_size} on {hosts} "
        f"host{'s' * (hosts > 1)}, device {group.device.type} ({machine.hardware(group.device)})")
    group.leave()
    failures.end(0)


if __name__ == "__main__":
    main()
