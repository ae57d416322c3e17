"""Measure everything on the GPU of this machine: versions, tests, speed, memory, accuracy, traces.

    make gpu
    make gpu ARGS="--only ResNet-50 trace --out /tmp/gpu"
    make gpu ARGS="--minutes 12"
    make gpu ARGS="--device cpu"    # to try it out: small models and few images

Each measurement is a command with its own time limit. Its result is written to gpu.jsonl and gpu.md
in --out at once; a failure is a result, too. A second run measures only what the first did not. It
needs no network, but MNIST and CIFAR-10 in --data-dir, and Apex and Horovod in the environment. It
first says what is missing, and then measures the rest, the most important things first. It has been
run only with --device cpu.
"""

import gzip
import importlib.util
import json
import math
import re
import shutil
import tempfile
import time
from pathlib import Path

import runs
import torch

from common import flags
from mnist import digits
from scripts.commands import Command, logged, plain_exits

# docs/allreduce.md
PUBLISHED = {"mnist": "55.7 s on 32 GPUs", "cifar10": "73.5 s on 8 GPUs"}
# Dense TFLOP/s: fp32, TF32, bf16.
PEAK = {"H100": (67, 495, 989), "H200": (67, 495, 989), "A100": (19.5, 156, 312)}
FILES = {"mnist": digits.FILES, "cifar10": ["cifar-10-batches-py"]}
TORCHRUN = "torchrun --standalone --nproc-per-node=1"
STARTS = {
    "single.py": "python {}/single.py",
    "dp.py": "python {}/dp.py",
    "ddp_spawn.py": "python {}/ddp_spawn.py -g 1",
    "ddp_launch.py": TORCHRUN + " {}/ddp_launch.py",
    "fsdp.py": TORCHRUN + " {}/fsdp.py",
    "ddp_amp.py": TORCHRUN + " {}/ddp_amp.py",
    "apex_amp.py": TORCHRUN + " {}/apex_amp.py",
    "hvd.py": "horovodrun -np 1 python {}/hvd.py",
}
FLAGS = (
    "--channels-last",
    "--compile",
    "--cuda-graph",
    "--cuda-graph --compile",
    "--deterministic",
)


def parse_args():
    parser = flags.Parser(__doc__)
    add = parser.add_argument
    add("--device", choices=("auto", "cpu"), default="auto", help="cpu: try it out on few images")
    add("--only", nargs="+", default=[""], metavar="WORD", help="names with such a word")
    add(
        "--minutes",
        type=flags.positive_float,
        default=math.inf,
        metavar="N",
        help="begin no measurement after N minutes",
    )
    add("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="the data sets")
    add("--out", type=Path, default=runs.RESULTS / "gpu", metavar="DIR", help="results folder")
    args = parser.parse_args()
    # The commands run in another folder.
    args.data_dir, args.out = args.data_dir.resolve(), args.out.resolve()
    return args


def has_data(args, folder):
    return all((args.data_dir / name).exists() for name in FILES[folder])


def missing(args):
    """What is missing, and where to get it, or what is used instead."""
    for folder in FILES:
        if not has_data(args, folder):
            yield f"{folder}'s files in {args.data_dir} (generated images are used instead)"
    for package, where in (("apex", "docs/install.md"), ("horovod", "scripts/install_horovod.sh")):
        if not importlib.util.find_spec(package):
            yield f"{package} ({where})"


def measurements(args):
    """Yield (name, command, time limit in seconds), the most important ones first."""
    cpu = args.device == "cpu"
    # A CUDA graph needs a GPU.
    with_graph = ("",) if cpu else ("", " --cuda-graph")
    yield "versions", "python -m torch.utils.collect_env", 60
    # Not all of tests/: others need packages that have nothing to do with a GPU.
    yield "tests for one GPU", "python -m pytest -q -m gpu tests/recipes", 300
    for folder in FILES:
        data = f"--data-dir {args.data_dir}" if has_data(args, folder) else "--synthetic 640"
        epochs = 32
        if cpu:
            data = "--synthetic 640"
            epochs = 2
        for flag in with_graph:
            name = f"{folder}, ConvNet, {epochs} epochs{flag} (published: {PUBLISHED[folder]})"
            command = f"python {folder}/single.py {data} --epochs {epochs} --model convnet{flag}"
            yield name, command, 240
    yield from of_resnet50(cpu)
    small = "-b 8 --model convnet --synthetic 160" if cpu else "--synthetic 12800"
    for folder in ("cifar10", "imagenet"):
        for flag in with_graph:
            command = f"{STARTS['ddp_amp.py'].format(folder)} --profile --epochs 1{flag} {small}"
            yield f"trace: {folder}/ddp_amp.py{flag}", command, 120
    yield from of_each_recipe(cpu)
    yield from of_jpegs(args, cpu)


def of_resnet50(cpu):
    """ResNet-50 on generated images, in each precision and memory format."""
    work = "--synthetic 200 -b 8 --model convnet" if cpu else "--synthetic 20000 -b 256"
    single = f"{STARTS['single.py'].format('imagenet')} {work} --epochs 1"
    amp = f"{STARTS['ddp_amp.py'].format('imagenet')} {work} --epochs 1"
    yield "ResNet-50, fp32", f"NVIDIA_TF32_OVERRIDE=0 {single}", 180
    yield "ResNet-50, TF32", single, 180
    yield "ResNet-50, TF32, channels-last", f"{single} --channels-last", 180
    yield "ResNet-50, bf16", amp, 180
    yield "ResNet-50, bf16, channels-last", f"{amp} --channels-last", 180
    for flag in ("--compile",) if cpu else ("--compile", "--compile --cuda-graph"):
        yield f"ResNet-50, bf16, channels-last {flag}", f"{amp} --channels-last {flag}", 240


def of_each_recipe(cpu):
    """Every recipe and flag, on few images."""
    there = dict(STARTS)
    if cpu or not importlib.util.find_spec("apex"):
        del there["apex_amp.py"]
    if not importlib.util.find_spec("horovod"):
        del there["hvd.py"]
    for folder in ("mnist",) if cpu else ("mnist", "cifar10", "imagenet"):
        work = "-b 16 --synthetic 256" if cpu else "-b 128 --synthetic 12800"
        for recipe, start in there.items():
            yield f"{folder}/{recipe}", f"{start.format(folder)} {work} --epochs 2", 180
        for flag in FLAGS[:1] if cpu else FLAGS:
            command = f"{STARTS['single.py'].format(folder)} {work} --epochs 2 {flag}"
            yield f"{folder}/single.py {flag}", command, 240
        fp16 = f"{STARTS['ddp_amp.py'].format(folder)} {work} --epochs 2 --amp-dtype fp16"
        yield f"{folder}/ddp_amp.py, fp16", fp16, 180
    for level in ("O0", "O1", "O2", "O3") if "apex_amp.py" in there else ():
        command = f"{STARTS['apex_amp.py'].format('cifar10')} --synthetic 12800 --epochs 2"
        yield f"cifar10/apex_amp.py, {level}", f"{command} --opt-level {level}", 120


def of_jpegs(args, cpu):
    """ImageNet's recipe from files, with each loader."""
    tree = args.out / "tree"
    count = 100 if cpu else 8000
    work = "-b 8 --model convnet" if cpu else "-b 256"
    make = f"python benchmarks/jpeg_tree.py {tree} --images {count}"
    yield "write JPEG files", make, 240
    for loader in ("pillow", "nvimgcodec"):
        command = f"{STARTS['ddp_amp.py'].format('imagenet')} --data-dir {tree} --epochs 2"
        yield f"JPEG files, {loader}", f"{command} {work} --channels-last --loader {loader}", 180


def run(args, name, line, limit):
    """Run a command, and return its result as a dict; a trace goes to --out."""
    is_recipe = re.search(r"(mnist|cifar10|imagenet)/\w+\.py", line)
    with tempfile.TemporaryDirectory() as folder:
        log_dir = Path(folder, "log")
        if is_recipe:
            # Log often: only the lines within an epoch have the memory.
            line += f" --log-seconds 0.5 --log-dir {log_dir}"
            if args.device == "cpu":
                line += " --device cpu"
        with Command(line, cwd=runs.ROOT) as command:
            command.finish(limit)
        result = {"name": name, "command": line, "status": command.status}
        result |= {"seconds": command.seconds, "says": (command.lines() or [""])[-1]}
        if name == "versions":
            parts = ("PyTorch version", "CUDA runtime", "GPU", "Nvidia")
            result["says"] = "; ".join(x for x in command.lines() if x.startswith(parts))
        if epochs := logged(log_dir, "evaluation"):
            result["epochs"] = epochs
            result["gib"] = max(
                (step.get("perf/gpu_gib", 0) for step in logged(log_dir, "step")), default=0
            )
        for trace in log_dir.glob("trace*"):
            copied = args.out / f"{re.sub(r'[^a-z0-9]+', '-', name)}-{trace.name}"
            shutil.copy(trace, copied)
            result["trace"] = of_trace(copied)
    return result


def of_trace(path):
    """{what: how much of it per step}, from a trace of ten steps."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    kernels = [event["dur"] for event in events if event.get("cat") == "kernel"]
    waits = [event for event in events if re.match(r"cuda\w+Synchronize", event.get("name", ""))]
    return {
        "kernels": len(kernels) / 10,
        "ms of kernels": sum(kernels) / 1e4,
        "waits": len(waits) / 10,
    }


def cell(result, peaks, flops):
    """A result as the text of a table's cell."""
    if result["status"]:
        return f"status {result['status']}: {result['says'][:200]}".replace("|", "/")
    parts = []
    if epochs := result.get("epochs"):
        # The fastest epoch, as the first one warms up.
        rate = max(epoch["perf/samples_per_sec"] for epoch in epochs)
        parts += [
            f"{rate:,.0f} images/s",
            f"loss {epochs[-1]['train/loss']:.4f}",
            f"val acc {epochs[-1]['val/accuracy']:.2%}",
            f"{sum(epoch['perf/seconds'] for epoch in epochs):.1f} s of training",
        ]
        if result["gib"]:
            parts.append(f"{result['gib']:.1f} GiB")
        if peaks and result["name"].startswith("ResNet-50"):
            of_dtype = ("fp32" not in result["name"]) + ("bf16" in result["name"])
            parts.append(f"{flops * rate / 1e12 / peaks[of_dtype]:.0%} of the peak")
    parts += [f"{count:.1f} {what} per step" for what, count in result.get("trace", {}).items()]
    return ", ".join(parts) or result["says"][:200].replace("|", "/")


def flops_of_resnet50():
    """Floating-point operations of a training step, per image of 224x224: three times those of the
    forward pass.
    """
    from torch.utils.flop_counter import FlopCounterMode
    from torchvision.models import resnet50

    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        resnet50()(torch.empty(1, 3, 224, 224))
    return 3 * counter.get_total_flops()


def page(measured):
    (one,) = measured
    peaks = next((value for name, value in PEAK.items() if name in one["hardware"]), None)
    flops = flops_of_resnet50() if peaks else None
    rows = [
        [run["name"], f"{run['seconds']:.0f} s", cell(run, peaks, flops)] for run in one["runs"]
    ]
    explained = (
        "Each row is a command, listed in gpu.jsonl, with the time that it took. images/s: in the "
        "fastest epoch."
    )
    table = runs.table(["what", "", "result"], rows)
    return runs.document("One GPU", explained, runs.origin(one), table)


def main():
    args = parse_args()
    path = args.out / "gpu.jsonl"
    measured = runs.about(None) | {"runs": []}
    if path.exists():
        (earlier,) = runs.read(path)
        measured["runs"] = earlier["runs"]
    for what in missing(args):
        print(f"missing: {what}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    done = [each["name"] for each in measured["runs"]]
    began = time.perf_counter()
    for name, line, limit in measurements(args):
        if name in done or not any(word in name for word in args.only):
            continue
        seconds = time.perf_counter() - began
        if seconds > 60 * args.minutes:
            print("--minutes are over")
            break
        result = run(args, name, line, limit)
        measured["runs"].append(result)
        runs.write(args.out, "gpu", [measured], page([measured]))
        print(f"{seconds:5.0f} s | {name}: {cell(result, None, None)}", flush=True)
    print(f"results in {args.out / 'gpu.md'}")


if __name__ == "__main__":
    with plain_exits():
        main()
