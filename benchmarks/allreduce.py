"""Time the all-reduce (the sum of float32) over message sizes: its latency and its bandwidth.

    torchrun --nproc-per-node=2 benchmarks/allreduce.py
    horovodrun --gloo -np 2 python benchmarks/allreduce.py
    mpirun -np 2 --bind-to none python benchmarks/allreduce.py

Under torchrun it measures torch.distributed with NCCL or gloo, under the other launchers (also srun
--mpi=pmix) Horovod with NCCL, MPI or gloo, and prints a table. Without a launcher it starts itself
under each one that this machine has, and writes allreduce.jsonl and allreduce.md to --out. NCCL
needs a GPU per process; with CUDA_VISIBLE_DEVICES= it always measures the CPUs.

A repetition is 20 all-reduces in a row (on a CPU fewer of the large ones), timed on the slowest
rank; the table has the median. The bus bandwidth is bytes / time * 2 (p-1)/p for p processes: what
a ring sends over each link, which does not depend on p (see
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). Horovod looks for new tensors
once per cycle (HOROVOD_CYCLE_TIME, by default 1 ms), and a small message spends most of its time
waiting for that.
"""

import json
import os
import socket
import statistics
import tempfile
from pathlib import Path

import runs
import torch

from common import devices, flags
from common.errors import InputError, RunError
from common.process import launch
from scripts import machine
from scripts.group import bus_bandwidth, join, seconds_of, sum_is_right


def message_size(text: str) -> int:
    return flags.whole_number(text, 4)


def parse_args():
    counts = runs.process_counts()[1:]
    parser = flags.Parser(__doc__)
    add = parser.add_argument
    add("--max-bytes", type=message_size, default=4**13, metavar="N", help="the largest message")
    add("--repeats", type=flags.positive_int, default=9, metavar="N", help="repetitions per size")
    add("--processes", type=flags.positive_int, nargs="+", default=counts, metavar="N")
    add("--json", metavar="FILE", help="under a launcher: also write the figures to FILE")
    runs.add_out(parser)
    args = parser.parse_args()
    if args.json and not os.path.isdir(os.path.dirname(args.json) or "."):
        raise InputError(f"--json {args.json}: the folder does not exist")
    return args


def pick_device(local_rank: int, local_world_size: int) -> torch.device:
    enough = torch.cuda.device_count() >= local_world_size
    return torch.device("cuda", local_rank) if enough else torch.device("cpu")


def measure(group, args) -> dict:
    """The figures of a group, printed as they come."""

    def say(line):
        if group.rank == 0:
            print(line, flush=True)

    hosts = sorted(set(group.gather_values(socket.gethostname())))
    processes = f"{group.world_size} processes on {', '.join(hosts)}"
    say(f"{group.backend}: {processes}, device {devices.describe(group.device)}\n")
    say("| bytes | time (us) | spread | algorithm bandwidth (GB/s) | bus bandwidth (GB/s) |")
    say("| ---: | ---: | ---: | ---: | ---: |")
    sizes = []
    size = 4
    while size <= args.max_bytes:
        if not sum_is_right(group, size):
            raise RunError(f"the all-reduce of {size} bytes gives a wrong sum")
        repetitions = seconds_of(group, size, args.repeats)
        seconds = statistics.median(repetitions)
        spread = (max(repetitions) - min(repetitions)) / seconds
        sizes.append({"bytes": size, "seconds": seconds, "spread": spread})
        say(
            f"| {size:,} | {seconds * 1e6:.1f} | {spread:.0%} | {size / seconds / 1e9:.3f} | "
            f"{bus_bandwidth(size, seconds, group.world_size) / 1e9:.3f} |"
        )
        size *= 4
    return {
        "backend": group.backend,
        "processes": group.world_size,
        "hosts": len(hosts),
        "sizes": sizes,
    }


def measure_each(args) -> None:
    """Start this script under each launcher, and write the results."""
    names = runs.launchers()
    measured = machine.about("LAUNCHER benchmarks/allreduce.py") | {"runs": []}
    script = f"{__file__} --max-bytes {args.max_bytes} --repeats {args.repeats}"
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder, "figures.json")
        for name in names:
            for processes in args.processes:
                runs.run(f"{runs.LAUNCHERS[name].format(processes)} {script} --json {figures}")
                measured["runs"].append(json.loads(figures.read_text()))
    runs.write(args.out, "allreduce", [measured], page([measured]))
    print(page([measured]))


def page(measured: list[dict]) -> str:
    (one,) = measured
    names = ["bytes"]
    for run in one["runs"]:
        names += [f"{run['backend']}, {run['processes']} processes: us", "GB/s"]
    rows = []
    # One row for every second size.
    for points in list(zip(*(run["sizes"] for run in one["runs"]), strict=True))[::2]:
        row = [f"{points[0]['bytes']:,}"]
        for run, point in zip(one["runs"], points, strict=True):
            bus = bus_bandwidth(point["bytes"], point["seconds"], run["processes"])
            wide = point["spread"] > runs.WIDE
            mark = f" (!{point['spread']:.0%})" if wide else ""
            row += [f"{point['seconds'] * 1e6:,.0f}{mark}", f"{bus / 1e9:.3f}"]
        rows.append(row)
    explained = (
        "us: the median time of an all-reduce, on the slowest rank. GB/s: the bus bandwidth. "
        f"`benchmarks/allreduce.py --help` defines both. {runs.MARK}"
    )
    return runs.document("All-reduce", explained, runs.table(names, rows), runs.origin(one))


def main():
    args = parse_args()
    if launch.launched_rank() is None:
        measure_each(args)
        return
    group = join(pick_device)
    if group.world_size == 1:
        raise InputError("one process has nothing to reduce: start two or more")
    # As a recipe does.
    devices.tune(group.device)
    found = measure(group, args)
    if args.json and group.rank == 0:
        Path(args.json).write_text(json.dumps(found) + "\n")
    group.leave()


if __name__ == "__main__":
    with launch.plain_exits():
        main()
