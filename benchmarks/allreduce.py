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
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from benchmarks import machine
from common import devices, flags, launch
from common.errors import InputError, RunError
from common.parent import die_with_parent


class Group:
    """The processes that this one belongs to, whatever started them: here one alone."""

    backend = "none"
    rank = local_rank = 0
    world_size = local_world_size = 1

    def __init__(self, pick_device):
        self.device = pick_device(0, 1)

    def all_reduce(self, tensor):
        """Sum a tensor over all ranks, in place."""

    def barrier(self):
        """Wait for all ranks."""

    def leave(self):
        """Close the connections."""

    def gather(self, own):
        """[ranks, ...]: the tensor `own` of each rank, on the CPU.

        Each rank fills its row; the sum has all rows.
        """
        rows = torch.zeros(self.world_size, *own.shape, device=self.device, dtype=own.dtype)
        rows[self.rank] = own
        self.all_reduce(rows)
        return rows.cpu()

    def gather_text(self, own):
        """The text `own` of each rank, cut off after 8192 bytes."""
        rows = self.gather(torch.tensor(list(own.encode()[:8192].ljust(8192)), dtype=torch.int32))
        return [bytes(row).decode(errors="replace").rstrip() for row in rows.tolist()]


class TorchGroup(Group):
    """torch.distributed, with the variables that torchrun sets."""

    def __init__(self, pick_device):
        self.local_rank, self.local_world_size = launch.torchrun_env()
        self.device = pick_device(self.local_rank, self.local_world_size)
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device.index)
        backend = "gloo" if self.device.type == "cpu" else None
        dist.init_process_group(backend, device_id=self.device.index)
        self.backend = dist.get_backend()
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def all_reduce(self, tensor):
        dist.all_reduce(tensor)

    def barrier(self):
        dist.barrier()

    def leave(self):
        dist.destroy_process_group()


class HorovodGroup(Group):
    """Horovod, under horovodrun, mpirun or srun --mpi=pmix."""

    def __init__(self, pick_device):
        import horovod.torch as hvd  # built by scripts/install_horovod.sh

        # As hvd.py does.
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
        hvd.init()
        self.hvd = hvd
        self.local_rank = hvd.local_rank()
        self.local_world_size = hvd.local_size()
        self.rank = hvd.rank()
        self.world_size = hvd.size()
        self.device = pick_device(self.local_rank, self.local_world_size)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.device.type == "cuda" and hvd.nccl_built():
            self.backend = "horovod-nccl"
        else:
            self.backend = "horovod-mpi" if hvd.mpi_enabled() else "horovod-gloo"

    def all_reduce(self, tensor):
        # Reuses names, as gradients do: Horovod caches them.
        name = f"{tensor.dtype} {tuple(tensor.shape)}"
        self.hvd.allreduce_(tensor, op=self.hvd.Sum, name=name)

    def barrier(self):
        self.hvd.barrier()

    def leave(self):
        self.hvd.shutdown()


def join(pick_device) -> Group:
    """Join the group that a launcher has started; without a launcher it is a group of one.

    `pick_device` gives the device of a process, from its local rank and the processes here.
    """
    if "RANK" in os.environ:
        return TorchGroup(pick_device)
    if any(name in os.environ for name in launch.RANKS):
        return HorovodGroup(pick_device)
    return Group(pick_device)


def sum_is_right(group, size):
    """Whether an all-reduce of `size` bytes gives this rank the exact sum (of whole numbers)."""
    values = (
        torch.arange(size // 4, dtype=torch.int32, device=group.device).remainder_(1000).float()
    )
    tensor = values + group.rank + 1
    group.all_reduce(tensor)
    return torch.equal(tensor, values * group.world_size + sum(range(group.world_size + 1)))


def seconds_of(group, size, repeats):
    """The seconds of an all-reduce of `size` bytes, in each repetition; the same on all ranks."""
    tensor = torch.zeros(size // 4, device=group.device)  # zeros: repeated sums do not grow
    calls = 20 if group.device.type != "cpu" else max(1, min(20, 2**22 // size))
    own = []
    for _ in range(1 + repeats):  # the first one warms up
        group.barrier()
        synchronize(group.device)
        start = time.perf_counter()
        for _ in range(calls):
            group.all_reduce(tensor)
        synchronize(group.device)
        own.append((time.perf_counter() - start) / calls)
    return group.gather(torch.tensor(own[1:], dtype=torch.float64)).amax(dim=0).tolist()


def synchronize(device):
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def bus_bandwidth(size, seconds, world_size):
    """Bytes per second, see above."""
    return size / seconds * 2 * (world_size - 1) / world_size


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
    die_with_parent()

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
