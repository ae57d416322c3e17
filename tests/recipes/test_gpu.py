"""Every recipe on a fake GPU (fake_gpu.py): the results of a CPU, and no waits."""

import json
import re
from collections import Counter
from pathlib import Path
from statistics import median

import pytest
import torch
from forked import ForkedJob, compute, refused
from launch import Job, checkpoint, evaluations, largest_difference, need_horovod, run
from recipes import RECIPES, ROOT, STEP, changed_copy, name_of, small

START = {
    "single.py": "python",
    "dp.py": "python",
    "hvd.py": "horovodrun --gloo -np 2 python",
    "language_model.py": "torchrun --nproc-per-node=1",
}
TWO = "torchrun --nproc-per-node=2"
# 12 steps on 2 processes with 16 images each, or on 1 with 32.
# LeNet has neither BatchNorm nor dropout.
TRAINING = "--synthetic 192 --epochs 2 --model lenet --warmup-epochs 0 --log-interval 5"


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory):
    """A function that gives the log folder of the same training, on one process and on the CPU."""
    done = {}

    def of(dataset):
        if dataset not in done:
            done[dataset] = tmp_path_factory.mktemp("cpu")
            command = f"python {ROOT}/{dataset}/single.py {TRAINING} {small(dataset)}"
            compute(f"{command} -b 32 --lr 0.04 --log-dir log --device cpu", cwd=done[dataset])
        return done[dataset] / "log"

    return of


def losses(log):
    """The training loss of each epoch of a run."""
    return [line["train/loss"] for line in evaluations(log)]


def command_of(recipe, flags):
    """The command that starts a recipe, on two processes if its strategy has processes."""
    if recipe.name == "hvd.py":
        need_horovod("gloo")
    if recipe.name == "ddp_spawn.py":
        return f"python {recipe} -g 2 {flags}"
    return f"{START.get(recipe.name, TWO)} {recipe} {flags}"


def on_fake_gpus(recipe, flags, cwd, gpus=2, status=0, **environment):
    """What a recipe prints on fake GPUs, and its steps, each (launches, [lines that wait])."""
    steps = cwd / "steps"
    steps.unlink(missing_ok=True)
    environment |= {"FAKE_GPUS": str(gpus), "FAKE_STEPS": str(steps)}
    printed = compute(command_of(recipe, flags), cwd, status, **environment)
    lines = steps.read_text().splitlines() if steps.exists() else []
    return printed, [json.loads(line) for line in lines]


def kill_after(steps, recipe, flags, cwd, **environment):
    """Let each rank kill itself after so many steps."""
    environment |= {"FAKE_GPUS": "2", "KILLED_AFTER": str(steps)}
    job = ForkedJob(command_of(recipe, flags), cwd, agent=False, **environment)
    assert job.finish() != 0


# fully_shard needs a real GPU: it moves weights between tensors by their storage, which a fake
# GPU does not have. test_siblings.py shows that the recipes of the other data sets are the same.
@pytest.mark.parametrize(
    "recipe",
    [recipe for recipe in RECIPES if recipe.name != "fsdp.py" and recipe.parent.name == "imagenet"],
    ids=name_of,
)
def test_killed_and_resumed(recipe, on_the_cpu, tmp_path, request):
    """Training, evaluation, checkpoint, kill, resume give the weights of a CPU in one go."""
    one = recipe.name in ("single.py", "dp.py")
    environment = {}
    flags = f"{TRAINING} {small(recipe.parent.name)} --checkpoint-every 4"
    flags += " --log-dir log --resume auto"
    flags += " -b 32 --lr 0.04" if one else " -b 16 --lr 0.02"
    if recipe.name == "apex_amp.py":
        environment["PYTHONPATH"] = request.getfixturevalue("apex")
        flags += " --opt-level O0"
    kill_after(6, recipe, flags, tmp_path, **environment)
    printed, steps = on_fake_gpus(recipe, flags, tmp_path, **environment)
    assert "resumed from" in printed
    assert "cuda (fake GPU)" in printed
    assert ("2 GPU(s) with 16 images each" in printed) == (recipe.name == "dp.py")
    assert len(steps) == 12 - 4
    ours, expected = tmp_path / "log", on_the_cpu(recipe.parent.name)
    # bf16 has 8 bits.
    assert losses(ours) == pytest.approx(losses(expected), rel=0.01)
    if recipe.name != "ddp_amp.py":
        difference = largest_difference(checkpoint(ours)["model"], checkpoint(expected)["model"])
        # On the CPU, too, two processes differ from one by 1.5e-4, as they add up in another order.
        assert difference < 1e-3


# 26 steps in which the rate changes, ten in each epoch. A kill after 13 of them comes within the
# second epoch, and after the capture; the resumed run captures again.
CUDA_GRAPH = "--synthetic 320 --max-steps 26 --warmup-epochs 0.5 --checkpoint-every 6 --log-dir log"
WITH_CUDA_GRAPH = {
    "mnist/single.py": "-b 32",
    "mnist/ddp_spawn.py": "-b 16 --model lenet",
    "mnist/ddp_amp.py": "-b 16 --model lenet --amp-dtype fp16",
    # With dropout, AdamW and clipping.
    "examples/language_model.py": "-b 32 --synthetic 1500 --context 32 --layers 1 --width 32",
}


@pytest.mark.parametrize("name", WITH_CUDA_GRAPH)
def test_cuda_graph(name, tmp_path):
    """Killed and resumed, it gives the weights and the losses of a run without it, bit by bit."""
    flags = f"{CUDA_GRAPH} {WITH_CUDA_GRAPH[name]}"
    with_graph = f"{flags} --cuda-graph --resume auto"
    plain, graph = tmp_path / "plain", tmp_path / "graph"
    plain.mkdir()
    graph.mkdir()
    on_fake_gpus(ROOT / name, flags, plain)
    kill_after(13, ROOT / name, with_graph, graph)
    _, steps = on_fake_gpus(ROOT / name, with_graph, graph)
    weights, expected = (checkpoint(folder / "log")["model"] for folder in (graph, plain))
    assert largest_difference(weights, expected) == 0
    assert losses(graph / "log") == losses(plain / "log")
    # The 11 steps before the capture are as they are without it. After it there are few launches:
    # the graph, the copy of the batch, and the rate.
    assert min(launches for launches, _ in steps[:11]) > 30
    assert median(launches for launches, _ in steps[11:]) < 12


OTHER_SHAPES = """
import torch

from common import graph
from common.ranks import World

device = torch.device("cuda", 0)
total = torch.zeros(3, device=device)
captured = graph.Captured(lambda batch: total.add_(batch.sum()), World(device))
for size in [4] * 20 + [3, 2, 4]:
    captured(torch.ones(size, device=device))
print(total.tolist())
"""


def test_batches_of_other_shapes(tmp_path):
    """They run without the graph, which is said once, and count."""
    (tmp_path / "shapes.py").write_text(OTHER_SHAPES)
    output = compute("python shapes.py", tmp_path, FAKE_GPUS="1", PYTHONPATH=str(ROOT))
    line, total = output.splitlines()
    assert "without the CUDA graph" in line
    assert total == str([20.0 * 4 + 3 + 2 + 4] * 3)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("python {}/mnist/single.py --device cpu", "needs a CUDA device"),
        ("FAKE_GPUS=1 python {}/imagenet/single.py --accumulate 2", "not work with --accum"),
    ],
)  # fmt: skip
def test_flags_that_do_not_go_with_a_cuda_graph(command, says, tmp_path):
    assert says in refused(f"{command.format(ROOT)} --synthetic 64 --cuda-graph", tmp_path)


def test_each_process_sees_one_gpu(tmp_path):
    """As SLURM's --gpu-bind=single gives it: each uses its device 0."""
    flags = "--synthetic 320 --model lenet --dry-run"
    recipe = ROOT / "mnist" / "ddp_launch.py"
    printed, _ = on_fake_gpus(recipe, flags, tmp_path, gpus=1, CUDA_VISIBLE_DEVICES="3")
    assert "world size 2 | cuda (fake GPU)" in printed


# Launches in a step between two log intervals, on one process (single.py) or two, with torch 2.14.
# Those of Horovod itself are not counted. (CIFAR-10's images are cropped on the GPU.)
LAUNCHES = {
    "mnist/single.py": 40,
    "mnist/ddp_launch.py": 51,
    "mnist/hvd.py": 40,
    "mnist/ddp_amp.py": 64,
    "cifar10/single.py": 175,
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_costs_of_a_step(name, tmp_path):
    """No step of the default model waits between two log intervals; it starts few kernels."""
    copy = changed_copy(tmp_path, name, STEP, STEP)
    run_of_copy = tmp_path / "common" / "run.py"
    # A fake GPU is slow.
    text = run_of_copy.read_text().replace("LOOK_AFTER = 5\n", "LOOK_AFTER = float('inf')\n")
    run_of_copy.write_text(text)
    # An epoch of 6 steps.
    gpus = 1 if name.endswith("single.py") else 2
    flags = f"--log-interval 3 --epochs 1 --lr 0.001 --synthetic {12 * gpus} -b 2"
    _, steps = on_fake_gpus(copy / Path(name).name, flags, tmp_path, gpus)
    # At each log interval two lines wait, for the sums and for the stop flag.
    at_intervals = ("metrics.py", "signals.py")
    for file in at_intervals:
        there = [line for _, lines in steps for line in lines if line.startswith(file)]
        assert len(there) <= len(steps) // 3
    waits = [line for _, lines in steps[2:] for line in lines if not line.startswith(at_intervals)]
    assert not waits
    [(launches, _)] = Counter(launches for launches, _ in steps).most_common(1)
    assert launches <= 1.05 * LAUNCHES[name]


@pytest.mark.parametrize(
    ("dataset", "level"), [("cifar10", "O1"), ("imagenet", "O2"), ("mnist", "O3")]
)
def test_apex(dataset, level, apex, on_the_cpu, tmp_path):
    """Killed and resumed within an epoch, on two ranks."""
    recipe = ROOT / dataset / "apex_amp.py"
    flags = f"{TRAINING} {small(dataset)} -b 16 --lr 0.02 --opt-level {level} --log-dir log"
    kill_after(5, recipe, f"{flags} --checkpoint-every 4", tmp_path, PYTHONPATH=apex)
    printed, _ = on_fake_gpus(recipe, f"{flags} --resume auto", tmp_path, PYTHONPATH=apex)
    assert f"Apex {level}" in printed
    # The scale of O3, which is 1, would spoil another level's.
    assert ("amp" in checkpoint(tmp_path / "log")) == (level != "O3")
    first, last = losses(tmp_path / "log")
    if dataset == "imagenet":
        # With 1000 classes the first steps overflow, and are skipped.
        assert last < first
    else:
        assert [first, last] == pytest.approx(losses(on_the_cpu(dataset)), rel=0.01)


def test_apex_accumulates(apex, tmp_path):
    """The first step of a run, here of a resumed one, has all gradients.

    O2's fp32 weights are there before them.
    """
    states = []
    # An epoch is a step. The first few overflow, until the scale is low enough.
    for epochs in (8, 9):
        on_fake_gpus(
            ROOT / "imagenet" / "apex_amp.py",
            f"--synthetic 18 --epochs {epochs} --arch resnet18 --image-size "
            "32 -b 4 --lr 1e-3 --opt-level O2 --accumulate 2 --log-dir log --resume auto",
            tmp_path,
            PYTHONPATH=apex,
        )
        states.append(checkpoint(tmp_path / "log")["optimizer"]["state"])
    before, after = states
    assert not [
        key
        for key in before
        if torch.equal(before[key]["momentum_buffer"], after[key]["momentum_buffer"])
    ]


@pytest.mark.parametrize("name", ["ddp_amp.py", "hvd.py"])
def test_fp16_skips_the_first_step(name, tmp_path):
    """Its gradient overflows when the scaler multiplies it by 65536.

    Fused SGD then leaves its momentum unset.
    """
    flags = (
        "--model convnet --synthetic 96 -b 2 --epochs 1 --lr 1e-4 --log-dir log --amp-dtype fp16"
    )
    on_fake_gpus(ROOT / "mnist" / name, flags, tmp_path)
    assert checkpoint(tmp_path / "log")["scaler"]["scale"] < 65536
    assert losses(tmp_path / "log")[0] < 3


SYNC_BN = (
    "--synthetic 192 --epochs 1 --model convnet --warmup-epochs 0 --image-size 32 --accumulate 2 "
    "--log-dir log"
)


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory):
    """The weights after the same training on one process and on the CPU."""
    folder = tmp_path_factory.mktemp("one")
    command = f"python {ROOT}/imagenet/single.py {SYNC_BN} -b 16 --lr 0.04 --device cpu"
    compute(command, folder)
    return checkpoint(folder / "log")["model"]


@pytest.mark.parametrize("recipe", ["ddp_launch.py", "apex_amp.py", "hvd.py"])
def test_sync_bn(recipe, of_one_process, tmp_path, request):
    """Two processes, with the flags together: BatchNorm over both gives the weights of one."""
    environment = {}
    flags = f"{SYNC_BN} --sync-bn --profile -b 8 --lr 0.02"
    if recipe == "apex_amp.py":
        environment["PYTHONPATH"] = request.getfixturevalue("apex")
        flags += " --opt-level O0"
    else:
        flags += " --channels-last"
    printed, _ = on_fake_gpus(ROOT / "imagenet" / recipe, flags, tmp_path, **environment)
    assert "trace-0.json.gz" in printed
    of_two = checkpoint(tmp_path / "log")["model"]
    assert largest_difference(of_two, of_one_process) < 1e-3


def test_horovod_without_nccl(tmp_path):
    need_horovod("gloo")
    printed, _ = on_fake_gpus(
        ROOT / "mnist" / "hvd.py", "--synthetic", tmp_path, status=2, FAKE_NCCL="0"
    )
    assert "Horovod was built without NCCL: run scripts/install_horovod.sh" in printed


def test_data_parallel_on_one_device(tmp_path):
    """It takes the one that is named; in test_killed_and_resumed, all."""
    flags = "--synthetic 320 --model lenet --dry-run --device cuda:1"
    printed, _ = on_fake_gpus(ROOT / "mnist" / "dp.py", flags, tmp_path)
    assert "DataParallel, 1 GPU(s) with 64 images each |" in printed


@pytest.mark.parametrize("dataset", ["mnist", "cifar10", "imagenet"])
def test_data_parallel_draws_other_dropout_on_each_device(dataset, tmp_path):
    """In each step, and the same ones in each run."""
    line = (
        "            print('seeds', *(g.initial_seed() for g in torch.cuda.default_generators))\n"
    )
    copy = changed_copy(tmp_path, f"{dataset}/dp.py", STEP, STEP + line)
    flags = f"--synthetic 32 -b 8 --max-steps 3 --model lenet {small(dataset)} --log-dir"
    printed, again = (on_fake_gpus(copy / "dp.py", f"{flags} {run}", tmp_path)[0] for run in "ab")
    seeds = re.findall("^seeds .*", printed, re.MULTILINE)
    assert len({seed for line in seeds for seed in line.split()[1:]}) == 3 * 2
    assert re.findall("^seeds .*", again, re.MULTILINE) == seeds


def test_seeds_are_for_the_device_of_the_run(tmp_path):
    """torch.cuda.manual_seed() seeds the current device, which is 0 unless one says otherwise."""
    step = "            print('current', torch.cuda.current_device())\n"
    copy = changed_copy(tmp_path, "mnist/single.py", STEP, STEP + step)
    flags = "--synthetic 320 --model lenet --dry-run --device cuda:1"
    printed, _ = on_fake_gpus(copy / "single.py", flags, tmp_path)
    assert "current 1\n" in printed


def test_data_parallel_does_not_compile(tmp_path):
    """DataParallel's copy of a compiled model would compute with the weights of the first GPU."""
    printed, _ = on_fake_gpus(ROOT / "mnist" / "dp.py", "--synthetic --compile", tmp_path, status=2)
    assert "--compile does not work on several GPUs" in printed


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["single.py", "dp.py", "ddp_spawn.py", "ddp_launch.py", "fsdp.py", "hvd.py"]
)
def test_a_real_gpu(name, on_the_cpu, tmp_path):
    """One process on the GPU of this machine: make gpu starts these tests."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    start = START.get(name, "python" if name == "ddp_spawn.py" else TWO)
    if name == "hvd.py":
        need_horovod("gloo")
    start = start.replace("-np 2", "-np 1").replace("node=2", "node=1")
    flags = f"{TRAINING} -b 32 --lr 0.04 --log-dir log" + " -g 1" * (name == "ddp_spawn.py")
    run(
        f"{start} {ROOT}/mnist/{name} {flags}",
        tmp_path,
        CUDA_VISIBLE_DEVICES="0",
        NVIDIA_TF32_OVERRIDE="0",
    )
    of_gpu, of_cpu = checkpoint(tmp_path / "log"), checkpoint(on_the_cpu("mnist"))
    assert largest_difference(of_gpu["model"], of_cpu["model"]) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mnist/single.py", "mnist/ddp_launch.py", "cifar10/ddp_amp.py"])
def test_cuda_graph_on_a_real_gpu(name, tmp_path):
    """With --deterministic: the same bits with and without it, and after a kill."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    die = (
        "            import os\n"
        "            if run.position.steps == 12 and args.resume:\n"
        "                os.kill(os.getpid(), 9)\n"
    )
    copy = changed_copy(tmp_path, name, STEP, STEP + die)
    one = "python" if name.endswith("single.py") else "torchrun --standalone --nproc-per-node=1"
    flags = f"{CUDA_GRAPH} --model convnet -b 32 --deterministic"
    start = f"{one} {copy}/{Path(name).name} {flags}"
    run(start.replace("--log-dir log", "--log-dir whole"), tmp_path)
    Job(f"{start} --cuda-graph --resume auto", tmp_path).finish()
    assert checkpoint(tmp_path / "log")["position"]["steps"] == 12
    run(f"{one} {ROOT}/{name} {flags} --cuda-graph --resume auto", tmp_path)
    ours, whole = checkpoint(tmp_path / "log")["model"], checkpoint(tmp_path / "whole")["model"]
    assert largest_difference(ours, whole) == 0


@pytest.mark.gpu
def test_two_ranks_on_one_real_gpu(on_the_cpu, tmp_path):
    """Over Gloo, as NCCL refuses two processes on one GPU."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    nccl = 'backend = "gloo" if device.type == "cpu" else None'
    copy = changed_copy(tmp_path, "mnist/ddp_launch.py", nccl, 'backend = "gloo"')
    command = f"{TWO} {copy}/ddp_launch.py {TRAINING} -b 16 --lr 0.02 --log-dir log"
    run(command, tmp_path, CUDA_VISIBLE_DEVICES="0", NVIDIA_TF32_OVERRIDE="0")
    of_gpu, of_cpu = checkpoint(tmp_path / "log"), checkpoint(on_the_cpu("mnist"))
    assert largest_difference(of_gpu["model"], of_cpu["model"]) < 1e-3
