"""The device of each process, and the memory format of a model."""

import math
import os

import pytest
import torch

from common import devices
from common.errors import InputError

pytestmark = pytest.mark.check


def test_channels_last_hands_on_all_inputs():
    class Masked(torch.nn.Module):
        def forward(self, images, mask=None, *, scale=1):
            assert images.is_contiguous(memory_format=torch.channels_last)
            return images * mask * scale

    model = Masked()
    devices.use_channels_last(model)
    images = torch.ones(2, 3, 4, 4)
    assert model(images, torch.full((4, 4), 2.0), scale=3).unique().tolist() == [6]


@pytest.mark.parametrize(
    ("value", "threads"), [("", 2), ("abc", 2), ("0", 2), ("3", 4), ("4,2", 4)]
)
def test_a_number_of_threads_that_is_none(value, threads, monkeypatch):
    """BigDL 2842: each process would use all cores."""
    chosen = [4]
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    devices.share_cores(2)
    assert chosen[-1] == threads


def test_one_device_by_name(monkeypatch):
    """cuda:1 is the second of two, and each process has its own."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert devices.pick("cuda:1") == torch.device("cuda", 1)
    assert devices.pick("auto", local_rank=1, local_world_size=2) == torch.device("cuda", 1)
    with pytest.raises(InputError, match="torch sees 2 cuda devices, and 3 are needed"):
        devices.pick("cuda:2")
    with pytest.raises(InputError, match="torch sees 0 xpu devices"):
        devices.pick("xpu")
    with pytest.raises(InputError, match="each process has a device of its own"):
        devices.pick("cuda:1", local_rank=0, local_world_size=2)


def test_a_process_that_sees_only_its_own_device(monkeypatch):
    """SLURM's --gpu-bind=single: mace 435, ignite 3259, DeepSpeed 3165."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(InputError, match="torch sees 1 cuda devices, and 2 are needed"):
        devices.pick("auto", local_rank=1, local_world_size=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert devices.pick("auto", local_rank=1, local_world_size=2) == torch.device("cuda", 0)


# (cores of the process, cores of the one that started it, variables, number): on 64 cores.
PLACES = {
    "no launcher": (64, 64, {}, 64),
    "srun binds each of 4 tasks to 8 cores": (8, 64, {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 8),
    "srun, and a shell in between": (8, 8, {"SLURM_STEP_TASKS_PER_NODE": "4"}, 8),
    "srun binds nothing": (64, 64, {"SLURM_STEP_TASKS_PER_NODE": "4,3"}, 16),
    "torchrun": (64, 64, {"LOCAL_WORLD_SIZE": "4"}, 16),
    "torchrun in a container of 8 cores": (8, 8, {"LOCAL_WORLD_SIZE": "4"}, 2),
    "torchrun, and taskset for each process": (16, 64, {"LOCAL_WORLD_SIZE": "4"}, 16),
    "torchrun in a task of srun": (
        32,
        32,
        {
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
            "LOCAL_WORLD_SIZE": "4",
            "TORCHELASTIC_RUN_ID": "1",
        },
        8,
    ),
    "srun, with the variables of torchrun": (
        8,
        8,
        {"SLURM_STEP_TASKS_PER_NODE": "4", "LOCAL_WORLD_SIZE": "4"},
        8,
    ),
    "horovodrun": (64, 64, {"HOROVOD_LOCAL_SIZE": "2"}, 32),
    "mpirun --bind-to none": (32, 32, {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 8),
    "mpirun binds to a core": (1, 64, {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 1),
    "mpirun binds two to each socket": (32, 64, {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 16),
    "more processes than cores": (2, 2, {"LOCAL_WORLD_SIZE": "4"}, 1),
}


@pytest.mark.parametrize("place", PLACES)
def test_cores_of_a_process(place, monkeypatch):
    own, of_parent, variables, number = PLACES[place]
    for name in ("TORCHELASTIC_RUN_ID", *devices.LOCAL_SIZES):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    cores = {0: list(range(own)), os.getppid(): list(range(of_parent))}
    monkeypatch.setattr(devices, "own_cores", lambda process=0: cores[process])
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert devices.cores_per_process() == number


def test_cores_of_a_process_of_mp_spawn(monkeypatch):
    """Its parent asks: it has the cores of its task, and no process is bound."""
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "1(x2)")
    monkeypatch.setattr(devices, "own_cores", lambda process=0: list(range(32)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert devices.cores_per_process(4) == 8


@pytest.mark.parametrize("home", ["/dev/null", "a home"])
def test_kernels_of_a_home_that_does_not_work(home, tmp_path, monkeypatch):
    """It cannot be written, or has a space: then they are in a folder of this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / home))
    removed = []
    monkeypatch.setattr(devices.atexit, "register", lambda _, folder, **__: removed.append(folder))
    folder = devices.folder_for_kernels()
    assert removed == [str(folder)]
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()


def test_kernels_of_each_kind_of_cpu(tmp_path, monkeypatch):
    """Nodes that share a home can have others, and would run instructions that they lack."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = devices.folder_for_kernels()
    assert own == devices.folder_for_kernels()
    monkeypatch.setattr(devices.Path, "read_text", lambda path: "flags : avx2\nflags : avx2\n")
    other = devices.folder_for_kernels()
    assert other != own
    assert other.parent == own.parent == tmp_path / "torchinductor"


@pytest.mark.parametrize(("quota", "cores"), [(math.inf, 8), (9, 8), (2.5, 2), (0.5, 1)])
def test_cores_of_a_container(quota, cores, monkeypatch):
    """vllm 34462: docker run --cpus=2 shows all cores, and lets them wait most of the time.

    tests/scripts/test_machine.py reads the quota from the files of cgroups.
    """
    monkeypatch.setattr(devices.cgroups, "cpu_quota", lambda: quota)
    monkeypatch.setattr(devices, "own_cores", lambda process=0: list(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for name in devices.LOCAL_SIZES:
        monkeypatch.delenv(name, raising=False)
    assert devices.cores_per_process() == cores
    assert devices.cores_per_process(2) == max(1, cores // 2)
    chosen = [8]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    devices.share_cores(1)
    assert chosen[-1] == cores
