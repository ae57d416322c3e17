"""FSDP: who holds what, and its checkpoints, which are whole.

(That it computes what one process does: test_parity.py.)
"""

import pytest
import torch
import torch.distributed as dist
from forked import compute
from launch import TOLERANCE, checkpoint, largest_difference, strategies
from recipes import ROOT, in_float64
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchvision import models

from common import fsdp


def test_blocks():
    """ResNet's blocks, ViT's encoder layers, the layers of a small model."""
    with torch.device("meta"):
        kinds = {
            name: [type(block).__name__ for block in fsdp.blocks(models.get_model(name))]
            for name in ("resnet50", "vit_b_16", "vgg11")
        }
    assert kinds["resnet50"] == ["Bottleneck"] * 16
    assert kinds["vit_b_16"] == ["EncoderBlock"] * 12 + ["Linear"]
    assert kinds["vgg11"] == ["Conv2d"] * 8 + ["Linear"] * 3


def assert_close(a, b):
    """Weights and momentum of two checkpoints in float64, on other numbers of processes."""
    assert largest_difference(a["model"], b["model"]) < TOLERANCE
    momenta = (
        {number: state["momentum_buffer"] for number, state in saved["optimizer"]["state"].items()}
        for saved in (a, b)
    )
    assert largest_difference(*momenta) < 1e3 * TOLERANCE  # it changes faster than the weights


def test_a_whole_checkpoint_is_that_of_ddp(tmp_path):
    """It has the same keys and shapes, and the same numbers, also of BatchNorm, which is no block.

    (One process computes something else: the statistics of BatchNorm are those of a process.)
    """
    in_float64(tmp_path, "imagenet")
    flags = "--model convnet --image-size 32 --synthetic 40 --epochs 1 --device cpu -b 4 -j 0"
    for name in ("fsdp", "ddp_launch"):
        compute(f"{strategies(2, 'imagenet')[name]} {flags} --log-dir {name}", cwd=tmp_path)
    fsdp, ddp = (checkpoint(tmp_path / name) for name in ("fsdp", "ddp_launch"))
    assert fsdp.keys() == ddp.keys()
    assert fsdp["optimizer"]["param_groups"] == ddp["optimizer"]["param_groups"]
    assert list(fsdp["model"]) == list(ddp["model"])
    assert_close(fsdp, ddp)


def test_evaluation_of_unequal_shares(tmp_path):
    """With --dry-run, where 11 images are two batches on rank 0 and one on rank 1.

    And two images on three ranks.
    """
    flags = "--model lenet --device cpu --epochs 1"
    for processes, more in (
        (2, "--synthetic 55 -b 8 --test-batch-size 5 --dry-run"),
        (3, "--synthetic 10 -b 1"),
    ):
        command = f"{strategies(processes, ROOT / 'mnist')['fsdp']} {flags} {more} --log-dir log"
        assert " | val loss " in compute(command, cwd=tmp_path)


class Rotary(nn.Module):
    """It computes a buffer that its state_dict does not have, and needs it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("angles", torch.arange(2.0), persistent=False)


@pytest.mark.check
def test_all_of_a_model_is_shared_out():
    """Weights, statistics, and a buffer that is in no state_dict."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    whole = Rotary()
    with torch.device("meta"):
        model = Rotary()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    fsdp.share_out(whole, model, torch.device("cpu"))
    expected = dict(whole.named_parameters()) | dict(whole.named_buffers())
    shared = dict(model.named_parameters()) | dict(model.named_buffers())
    assert shared.keys() == expected.keys()
    for name, value in shared.items():
        value = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(value, expected[name]), name
    dist.destroy_process_group()
