"""The device of each process, and the memory format of a model."""

import platform
from pathlib import Path

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


def test_a_cpu_without_16_bit_units_says_so(monkeypatch):
    cpu = torch.device("cpu")
    flags = Path("/proc/cpuinfo").read_text().split()
    slow = platform.machine() == "x86_64" and not {"avx512_bf16", "amx_bf16"} & set(flags)
    assert len(devices.warn_if_slow(cpu, torch.bfloat16)) == slow
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_fp16": False, "avx2": True})
    assert "no fp16 units (amx_fp16)" in devices.warn_if_slow(cpu, torch.float16)[0]
    # Of bf16 it knows nothing.
    assert devices.warn_if_slow(cpu, torch.bfloat16) == []
    assert devices.warn_if_slow(torch.device("cuda"), torch.float16) == []


def test_one_device_by_name(monkeypatch):
    """cuda:1 is the second of two, and each process has its own."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert devices.pick("cuda:1") == torch.device("cuda", 1)
    assert devices.pick("auto", local_rank=1, local_world_size=2) == torch.device("cuda", 1)
    with pytest.raises(InputError, match="torch sees 2 cuda devices, and 3 are needed"):
        devices.pick("cuda:2")
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
