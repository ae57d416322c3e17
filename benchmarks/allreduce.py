"""Time the all-reduce (the sum of float32) over message sizes: its latency and its bandwidth.

    torchrun --nproc-per-node=2 benchmarks/allreduce.py
    horovodrun --gloo -np 2 python benchmarks/allreduce.py
    mpirun -np 2 --bind-to none python benchmarks/allreduce.py

Under torchrun it measures torch.distributed with NCCL or gloo, under the other launchers (also
srun --mpi=pmix) Horovod with NCCL, MPI or gloo. NCCL needs a GPU per process;
CUDA_VISIBLE_DEVICES= measures the CPUs in any case.

A repetition is 20 all-reduces in a row (on a CPU fewer of the large ones), timed on the slowest
rank; the table has the median. The bus bandwidth is bytes / time * 2 (p-1)/p for p processes: what
a ring sends over each link, which does not depend on p (see
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). Horovod looks for new tensors
once per cycle (HOROVOD_CYCLE_TIME, by default 1 ms), and a small message spends most of its time
waiting for that.
"""

import datetime
import json
import os
import socket
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from common import devices, flags
from common.errors import InputError, RunError
from common.process import launch
from scripts import machine
from scripts.group import bus_bandwidth, join, seconds_of, sum_is_right


def message_size(text: str) -> int:
    return flags.whole_number(text, 4)


def parse_args():
    parser = flags.Parser(__doc__)
    add = parser.add_argument
    add("--max-bytes", type=message_size, default=4**13, metavar="N", help="the largest message")
    add("--repeats", type=flags.positive_int, default=9, metavar="N", help="of each size")
    add("--json", metavar="FILE", help="also write the results to FILE")
    args = parser.parse_args()
    if args.json and not os.path.isdir(os.path.dirname(args.json) or "."):
        raise InputError(f"--json {args.json}: the folder does not exist")
    return args


def main():
    args = parse_args()

    def pick_device(local_rank, local_world_size):
        enough = torch.cuda.device_count() >= local_world_size
        return torch.device("cuda", local_rank) if enough else torch.device("cpu")

    group = join(pick_device)
    if group.world_size == 1:
        raise InputError(
            "one process has nothing to reduce: start it with a launcher, "
            f"torchrun --nproc-per-node=2 {sys.argv[0]}"
        )
    # As a recipe does.
    devices.tune(group.device)
    hosts = sorted(set(group.gather_text(socket.gethostname())))
    device = f"{group.device.type} ({machine.hardware(group.device)})"
    result = {
        "backend": group.backend,
        "processes": group.world_size,
        "hosts": len(hosts),
        "sizes": [],
        "versions": machine.versions(),
        "date": str(datetime.date.today()),
        "commit": machine.commit(),
        "command": sys.argv,
        "hardware": {
            "hosts": hosts,
            "cpu": machine.cpu(),
            "cores": os.cpu_count(),
            "device": device,
        },
    }

    def say(line):
        if group.rank == 0:
            print(line, flush=True)

    versions = ", ".join(map(" ".join, result["versions"].items()))
    say(
        f"{group.backend}: {group.world_size} processes on {', '.join(hosts)}, device {device}, "
        f"{machine.cpu()}; {versions}; commit {result['commit']}, {result['date']}\n\n"
        "| bytes | time (us) | spread | algorithm bandwidth (GB/s) | bus bandwidth (GB/s) |\n"
        "| ---: | ---: | ---: | ---: | ---: |"
    )
    size = 4
    while size <= args.max_bytes:
        if not sum_is_right(group, size):
            raise RunError(f"the all-reduce of {size} bytes gives a wrong sum")
        repetitions = seconds_of(group, size, args.repeats)
        seconds = statistics.median(repetitions)
        spread = (max(repetitions) - min(repetitions)) / seconds
        result["sizes"].append({"bytes": size, "seconds": seconds, "spread": spread})
        say(
            f"| {size:,} | {seconds * 1e6:.1f} | {spread:.0%} | {size / seconds / 1e9:.3f} | "
            f"{bus_bandwidth(size, seconds, group.world_size) / 1e9:.3f} |"
        )
        size *= 4
    if args.json and group.rank == 0:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")
    group.leave()


if __name__ == "__main__":
    with launch.plain_exits():
        main()
