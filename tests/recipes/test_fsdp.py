"""FSDP: who holds what, and checkpoints, whole or in shards.

(That it computes what one process does: test_parity.py.)
"""

import io
import os
import pathlib
import pickle
import random
import shutil
import time
import zlib

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked import ForkedJob, compute, refused
from launch import (
    TOLERANCE,
    assert_same,
    checkpoint,
    everything,
    largest_difference,
    random_seed,
    strategies,
    wait_until,
)
from recipes import ROOT, STEP, in_float64, small, waiting_copy
from torch.distributed.checkpoint import metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchvision import models

import shards
from common import fsdp
from common.checkpoint import CorruptCheckpoint


@pytest.mark.check
@pytest.mark.parametrize(
    ("name", "world_size", "largest"),
    [
        ("resnet50", 8, 1.013),
        # Of tensors with fewer rows than ranks, the first ranks have all.
        ("vit_b_16", 24, 1.05),
    ],
)
def test_shares(name, world_size, largest):
    """Each rank has 1/world_size of the weights and of the momentum."""
    shares = []
    for rank in range(world_size):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        mesh = init_device_mesh("cpu", (world_size,))
        with torch.device("meta"):
            model = models.get_model(name)
        whole = sum(weights.numel() for weights in model.parameters())
        for module in (*fsdp.blocks(model), model):
            fully_shard(module, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, foreach=True)
        for weights in model.parameters():
            weights.grad = torch.zeros_like(weights)
        optimizer.step()
        shares.append(sum(weights.to_local().numel() for weights in model.parameters()))
        assert shares[-1] == sum(
            state["momentum_buffer"].to_local().numel() for state in optimizer.state.values()
        )
        dist.destroy_process_group()
    assert sum(shares) == whole
    assert max(shares) <= largest * whole / world_size


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


SHARDED = (
    f"{strategies(2, ROOT / 'imagenet')['fsdp']} --model lenet {small('imagenet')} --device cpu "
    "--sharded-checkpoint"
)
STOPS = (
    "        import os, signal\n"
    "        if position.samples == int(os.environ.get('STOP_AT', -1)):\n"
    "            signal.raise_signal(signal.SIGTERM)\n"
)


def whole(folder):
    """The checkpoint that scripts/unshard.py makes of last.pt in a folder."""
    file = folder / f"whole-{time.monotonic_ns()}.pt"
    assert compute(f"python {ROOT}/scripts/unshard.py {folder}/last.pt {file}", cwd=folder) == ""
    return torch.load(file, weights_only=True)


def assert_close(a, b):
    """Weights and momentum of two checkpoints in float64, on other numbers of processes."""
    assert largest_difference(a["model"], b["model"]) < TOLERANCE
    momenta = (
        {number: state["momentum_buffer"] for number, state in saved["optimizer"]["state"].items()}
        for saved in (a, b)
    )
    assert largest_difference(*momenta) < 1e3 * TOLERANCE  # it changes faster than the weights


def test_sharded_checkpoint_on_any_number_of_processes(tmp_path):
    """Saved on 2, resumed on 1 and on 3, within an epoch; then, as one file, by single.py."""
    in_float64(tmp_path, "imagenet", "fsdp.py", STEP, STOPS + STEP)
    flags = (
        f"--synthetic 240 --epochs 1 --model lenet {small('imagenet')} --device cpu -G 24 "
        "--log-interval 1"
    )
    compute(f"python imagenet/single.py {flags} --log-dir single", cwd=tmp_path)
    for processes, stop_at in ((2, 72), (1, 144), (3, -1)):
        command = f"torchrun --standalone --nproc-per-node={processes} imagenet/fsdp.py {flags}"
        compute(
            f"{command} --log-dir part --sharded-checkpoint --resume auto",
            cwd=tmp_path,
            STOP_AT=str(stop_at),
        )
    assert_close(whole(tmp_path / "part"), checkpoint(tmp_path / "single"))
    assert len(list((tmp_path / "part").glob("shards-*"))) <= 4
    line = refused(f"python imagenet/single.py {flags} --log-dir part --resume auto", tmp_path)
    assert "its tensors are in shards: use imagenet/fsdp.py or scripts/unshard.py" in line


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


def test_killed_in_a_sharded_save(tmp_path):
    """SIGKILL at two random moments of a run that always saves: it goes on each time."""
    # 4 steps of 32 images in each epoch. The run that is killed never comes to its last one.
    copy = waiting_copy(tmp_path, "imagenet/fsdp.py", steps=5 * 4)
    command = f"{SHARDED} --synthetic 128 --epochs 6 -G 32"
    killed = f"{command} --checkpoint-every 1 --resume auto --log-dir part"
    killed = killed.replace(f"{ROOT}/imagenet", str(copy))
    compute(f"{command} --log-dir undisturbed", cwd=tmp_path)
    draw, folder = random.Random(random_seed()), tmp_path / "part"
    # In its first save, or once that is done.
    for saves in (1, 2):
        there = set(folder.glob("shards-*"))
        job = ForkedJob(killed, cwd=tmp_path, agent=False)
        wait_until(lambda: len(set(folder.glob("shards-*")) - there) >= saves, job)  # noqa: B023
        time.sleep(draw.uniform(0, 0.1))  # a save takes about that long
        job.kill()
        assert job.finish() != 0
        assert "Traceback" not in job.output()
    output = compute(f"{command} --resume auto --log-dir part", cwd=tmp_path)
    assert "resumed from part/" in output
    assert "skipped" not in output
    assert_same(whole(folder)["model"], whole(tmp_path / "undisturbed")["model"])


@pytest.fixture(scope="module")
def part(tmp_path_factory):
    """A folder with the sharded checkpoints of two epochs."""
    folder = tmp_path_factory.mktemp("sharded")
    compute(f"{SHARDED} --synthetic 128 -b 64 --epochs 2 --log-dir part", cwd=folder)
    return folder / "part"


def copied(part, tmp_path):
    """A copy of `part`, and the shards that last.pt names."""
    shutil.copytree(part, tmp_path / "part")
    return tmp_path / "part" / checkpoint(part)["shards"]["folder"]


def rewritten(tmp_path, saved):
    """The copy's last.pt, with another content."""
    torch.save(saved, tmp_path / "part" / "last.pt")
    return tmp_path / "part" / "last.pt"


def resume(tmp_path, flags, status=0):
    command = f"{SHARDED} --synthetic 128 -b 64 --epochs 3 --log-dir part --resume {flags}"
    return compute(command, cwd=tmp_path, status=status)


def test_damaged_shard(part, tmp_path):
    """It is noticed, and the checkpoint before is taken; without one the run ends."""
    shard = copied(part, tmp_path) / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    says = f"part/last.pt: {shard.relative_to(tmp_path)} is damaged"
    before = everything(tmp_path)
    assert says in resume(tmp_path, "part/last.pt", status=2)
    assert everything(tmp_path) == before
    output = resume(tmp_path, "auto")
    assert f"skipped {says}" in output
    assert "resumed from part/previous.pt at epoch 2, sample 128" in output


def test_missing_shard(part, tmp_path):
    (copied(part, tmp_path) / "__1_0.distcp").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"__1_0\.distcp is missing"):
        shards.read(tmp_path / "part" / "last.pt")


def test_shards_of_another_model(part, tmp_path):
    """Refused by their tensors, where the flags say nothing."""
    copied(part, tmp_path)
    saved = checkpoint(part)
    saved["config"]["model"] = "convnet"
    rewritten(tmp_path, saved)
    output = resume(tmp_path, "part/last.pt --model convnet", status=2)
    assert "--resume part/last.pt does not fit this run: model: " in output


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


class Call:
    """What somebody else's pickle may do."""

    def __reduce__(self):
        return os.system, ("touch called",)


@pytest.mark.parametrize("where", ["elsewhere", "beside"])
def test_shards_of_a_stranger(where, part, tmp_path):
    """No file outside of the checkpoint's folder is read."""
    folder = copied(part, tmp_path)
    shutil.move(folder, tmp_path / "other")
    saved = checkpoint(part)
    saved["shards"]["folder"] = str(tmp_path / "other") if where == "elsewhere" else "../other"
    with pytest.raises(CorruptCheckpoint, match="it names shards in another folder"):
        shards.read(rewritten(tmp_path, saved))


def test_shards_that_call_something(part, tmp_path):
    folder = copied(part, tmp_path)
    call = pickle.dumps(Call())
    (folder / ".metadata").write_bytes(call)
    saved = checkpoint(part)
    saved["shards"]["files"][".metadata"] = zlib.crc32(call)
    rewritten(tmp_path, saved)
    says = "it calls posix.system, which no checkpoint needs"
    unshard = f"python {ROOT}/scripts/unshard.py part/last.pt whole.pt"
    assert says in compute(unshard, tmp_path, status=2)
    assert says in resume(tmp_path, "part/last.pt", status=2)
    assert not (tmp_path / "called").exists()


@pytest.mark.check
@pytest.mark.parametrize(
    "value",
    [Call(), metadata.BytesStorageMetadata(), pathlib.Path.home, torch.nn.Linear(1, 1)],
    ids=["a call", "bytes to unpickle", "a method", "a module"],
)
def test_metadata_of_a_stranger(value, tmp_path):
    with pytest.raises(pickle.UnpicklingError, match="which no checkpoint needs"):
        shards.PlainUnpickler(io.BytesIO(pickle.dumps(value))).load()


@pytest.mark.check
def test_metadata_that_names_a_file_elsewhere(tmp_path):
    dcp.save({"weight": torch.zeros(2)}, checkpoint_id=tmp_path, no_dist=True)
    path = tmp_path / ".metadata"
    about = pickle.loads(path.read_bytes())
    assert shards.Reader(tmp_path).read_metadata().storage_data == about.storage_data
    for stored in about.storage_data.values():
        stored.relative_path = "../elsewhere"
    path.write_bytes(pickle.dumps(about))
    with pytest.raises(pickle.UnpicklingError, match=r"it names the file '\.\./elsewhere'"):
        shards.Reader(tmp_path).read_metadata()
