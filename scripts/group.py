"""Join the processes that a launcher has started, and check and time their all-reduce.

The doctor and benchmarks/allreduce.py use this, under any launcher.
"""

import json
import os
import time

import torch
import torch.distributed as dist

from common.process import launch


class Group:
    """The processes that this one belongs to; this base class is one process alone."""

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

    def gather_values(self, own):
        """The value `own` of each rank, sent as JSON."""
        text = json.dumps(own).encode()
        longest = int(self.gather(torch.tensor(len(text))).max())
        rows = self.gather(torch.tensor(list(text.ljust(longest)), dtype=torch.int32))
        return [json.loads(bytes(row)) for row in rows.tolist()]


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

    `pick_device` gives the device of a process, from its local rank and local world size.
    """
    if "RANK" in os.environ:
        return TorchGroup(pick_device)
    return HorovodGroup(pick_device) if launch.launched_rank() is not None else Group(pick_device)


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
    tensor = torch.zeros(size // 4, device=group.device)  # repeated sums of zeros do not grow
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
    """The bus bandwidth in bytes per second, as benchmarks/allreduce.py defines it."""
    return size / seconds * 2 * (world_size - 1) / world_size
