"""Measure everything on the GPU of this machine: versions, speed, memory, accuracy, Apex and
Horovod, traces.

    make gpu
    make gpu ARGS="--steps 1-6 --out /tmp/gpu"
    make gpu ARGS="--minutes 12"
    make gpu ARGS="--device cpu"    # to try it out: small models and few images

Each measurement is a command with a time limit of its own. After each one its result is in gpu.json
and gpu.md in --out; a failure is a result, too. A second start measures what is not there yet. It
needs no network, but MNIST and CIFAR-10 in --data-dir, and Apex and Horovod in the environment: it
says first what is missing, and does the rest, the most important things first. It has been run with
--device cpu only.
"""

import importlib.util
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import runs
import torch

from mnist import digits

PUBLISHED = {"mnist": "55.7 s on 32 GPUs", "cifar10": "73.5 s on 8 GPUs"}  # docs/allreduce.md
# Dense TFLOP/s: fp32, TF32, bf16.
PEAK = {"H100": (67, 495, 989), "H200": (67, 495, 989), "A100": (19.5, 156, 312)}
PROBE = "benchmarks/probe.py"
STEPS = (
    "versions",
    ("every recipe and flag"),
    "refusals",
    "the same loss on GPU and CPU",
    "waits per step",
    "32 epochs",
    "ResNet-50",
    "JPEG files",
    ("strategies on one GPU"),
    "Apex",
    "Horovod",
    "tests",
    "traces",
)
# The most important ones come first: --minutes may leave out the last.
ORDER = (1, 12, 6, 7, 13, 2, 3, 4, 5, 8, 9, 10, 11)
# Those that are only to end well: several run at once. The others are timed.
UNTIMED = (2, 3, 4)
AT_ONCE = 7


def parse_args():
    p = runs.flags.Parser(__doc__)
    p.add_argument(
        "--device", choices=("auto", "cpu"), default="auto", help=("cpu: try it out on few images")
    )
    p.add_argument("--steps", default=f"1-{len(STEPS)}", metavar="A-B", help="which steps")
    p.add_argument(
        "--minutes",
        type=runs.flags.positive_float,
        default=math.inf,
        metavar="N",
        help="begin no measurement after N minutes",
    )
    p.add_argument(
        "--data-dir", type=Path, default=Path("data"), metavar="DIR", help="with MNIST and CIFAR-10"
    )
    p.add_argument(
        "--out",
        type=Path,
        default=runs.RESULTS / "gpu",
        metavar="DIR",
        help="folder for the results",
    )
    args = p.parse_args()
    # The recipes start in another folder.
    args.data_dir, args.out = args.data_dir.resolve(), args.out.resolve()
    if not (match := re.fullmatch(r"(\d+)(?:-(\d+))?", args.steps)):
        p.error(f"--steps {args.steps}: give a number or a range, such as 1-6")
    args.steps = range(int(match[1]), int(match[2] or match[1]) + 1)
    return args


def has(args, files):
    """Whether the files of a data set are in --data-dir."""
    return all((args.data_dir / name).exists() for name in files)


def missing(args):
    """What is not there, and what it is needed for."""
    for folder, files in (("MNIST", digits.FILES), ("CIFAR-10", ["cifar-10-batches-py"])):
        if not has(args, files):
            yield f"{folder} in {args.data_dir} (generated images are used instead)"
    yield from (
        f"{package} ({where})"
        for package, where in (
            ("apex", "docs/install.md"),
            ("horovod", "scripts/install_horovod.sh"),
        )
        if not importlib.util.find_spec(package)
    )


def measurements(args):
    """Yield (step, name, command, time limit in seconds).

    A log folder of its own is added to each recipe's flags.
    """
    cpu, there = args.device == "cpu", importlib.util.find_spec
    with_graph = ("",) if cpu else ("", " --cuda-graph")
    few, folders = (
        ("--synthetic 256 -b 16 --epochs 1"),
        ("mnist",) if cpu else ("mnist", "cifar10", "imagenet"),
    )
    one = {
        "single.py": "python",
        "dp.py": "python",
        "ddp_spawn.py": "python",
        "hvd.py": "horovodrun -np 1 python",
    }
    torchrun = "torchrun --standalone --nproc-per-node=1"
    recipes = ["single.py", "dp.py", "ddp_spawn.py", "ddp_launch.py", "fsdp.py", "ddp_amp.py"]
    recipes += ["apex_amp.py"] * bool(there("apex") and not cpu) + ["hvd.py"] * bool(
        there("horovod")
    )

    def data(folder, files):
        real = has(args, files) and not cpu
        return (f"{folder}/single.py ") + (
            f"--data-dir {args.data_dir}" if real else "--synthetic 640"
        )

    yield 1, "versions", "python -m torch.utils.collect_env", 60
    for folder in folders:
        small = " --image-size 32 -a convnet" if folder == "imagenet" else ""
        for recipe in recipes:
            more = " -g 1" if recipe == "ddp_spawn.py" else ""
            yield (
                2,
                f"{folder}/{recipe}",
                (f"{one.get(recipe, torchrun)} {folder}/{recipe} {few}{small}{more}"),
                60,
            )
        flags = ["--channels-last", "--compile", "--channels-last --compile"]
        if not cpu:
            flags += ["--cuda-graph", "--cuda-graph --compile", "--deterministic"]
        for flag in flags:
            yield 2, f"{folder} {flag}", f"python {folder}/single.py {few}{small} {flag}", 180
        yield (
            2,
            f"{folder} fp16",
            (f"{torchrun} {folder}/ddp_amp.py {few}{small} --amp-dtype fp16"),
            60,
        )
    yield (
        3,
        "more processes than GPUs",
        (
            f"python mnist/ddp_spawn.py -g {max(2, torch.cuda.device_count() + 1)} --synthetic "
            "--device cuda"
        ),
        120,
    )
    yield (
        3,
        "no GPU visible",
        ("CUDA_VISIBLE_DEVICES= python mnist/single.py --synthetic --device cuda"),
        60,
    )
    if not cpu:
        yield 3, "out of memory", "python imagenet/single.py --synthetic 40000 -b 40000", 120
    for device in ("cpu",) if cpu else ("cpu", "cuda"):
        yield (
            4,
            f"LeNet on {device}",
            (
                "NVIDIA_TF32_OVERRIDE=0 python mnist/single.py "
                "--synthetic 1280 -b 64 "
                f"--epochs 1 --model lenet --device {device}"
            ),
            60,
        )
    for recipe in ("single.py", "ddp_launch.py", "ddp_amp.py"):
        for folder in folders:
            flags = f"{folder}/{recipe} --synthetic 4000 -b 100 --epochs 1"
            yield 5, f"{folder}/{recipe}", f"{one.get(recipe, torchrun)} {PROBE} {flags}", 90
            yield (
                5,
                f"{folder}/{recipe}, pretended GPU",
                (
                    f"{one.get(recipe, torchrun)} tests/helpers/pretended_gpu.py "
                    f"{flags.replace('4000 -b 100', '80 -b 2')}"
                ),
                120,
            )
    epochs = 1 if cpu else 32
    for folder, files in (("mnist", digits.FILES), ("cifar10", ["cifar-10-batches-py"])):
        for flag in with_graph:
            yield (
                6,
                f"{folder}, ConvNet, {epochs} epochs{flag} (published: {PUBLISHED[folder]})",
                (f"python {data(folder, files)} --epochs {epochs} --model convnet{flag}"),
                240,
            )
    resnet18 = f"{torchrun} {data('cifar10', ['cifar-10-batches-py'])} --epochs 3 --channels-last"
    # Too much for a CPU.
    of_resnet18 = () if cpu else (*with_graph, " --cuda-graph --compile")
    for flag in of_resnet18:
        command = resnet18.replace("single.py", "ddp_amp.py") + flag
        yield 6, f"cifar10, ResNet-18, bf16, channels-last{flag}", command, 120
    flags = (
        "imagenet/single.py --epochs 1 "
        f"{'--synthetic 200 -b 8 -a convnet' if cpu else '--synthetic 20000 -b 256'}"
    )
    amp = f"{torchrun} {PROBE} {flags.replace('single', 'ddp_amp')}"
    for name, command in {
        "fp32": (f"NVIDIA_TF32_OVERRIDE=0 python {PROBE} {flags}"),
        "TF32": f"python {PROBE} {flags}",
        "TF32, without cudnn.benchmark": f"SEARCH=0 python {PROBE} {flags}",
        "TF32, channels-last": f"python {PROBE} {flags} --channels-last",
        "bf16": amp,
        "bf16, channels-last": f"{amp} --channels-last",
        "bf16, channels-last, compile": f"{amp} --channels-last --compile",
        "bf16, channels-last, compile, CUDA graph": f"{amp} --channels-last --compile --cuda-graph",
    }.items():
        if cpu and "CUDA graph" in name:
            continue
        yield 7, name, command, 180
    tree, count = args.out / "tree", 100 if cpu else 8000
    yield 8, "write JPEG files", f"python benchmarks/jpeg_tree.py {tree} --images {count}", 120
    for loader in ("pillow", "nvimgcodec"):
        yield (
            8,
            loader,
            (
                f"{torchrun} {PROBE} imagenet/ddp_amp.py --data-dir {tree} --loader "
                f"{loader} --epochs 2 "
                f"--channels-last {'-b 8 -a convnet' if cpu else '-b 256'}"
            ),
            180,
        )
    for folder in folders:
        batch = "-b 8 --synthetic 240" if cpu else "-b 128 --synthetic 12800"
        # Mp.spawn has no probe.
        for recipe in ("single.py", "dp.py", "ddp_launch.py", "ddp_amp.py"):
            command = f"{one.get(recipe, torchrun)} {PROBE} {folder}/{recipe} {batch} --epochs 1"
            yield 9, f"{folder}/{recipe}", command, 120
    for level in ("O0", "O1", "O2", "O3") if "apex_amp.py" in recipes else ():
        yield (
            10,
            level,
            (
                f"{torchrun} {PROBE} cifar10/apex_amp.py --synthetic 12800 --epochs 1 "
                f"--opt-level {level}"
            ),
            120,
        )
    for more in ("", " --fp16-allreduce") if "hvd.py" in recipes else ():
        yield (
            11,
            f"cifar10/hvd.py{more}",
            (
                f"horovodrun -np 1 python {PROBE} cifar10/hvd.py --epochs 1{more} "
                f"{'--synthetic 200 -b 8 -a convnet' if cpu else '--synthetic 12800'}"
            ),
            120,
        )
    # Not all of tests/, as others need packages that no GPU needs.
    yield 12, "tests for one GPU", "python -m pytest -q -m gpu tests/recipes", 180
    for folder in folders[-2:]:
        for flag in with_graph:
            yield (
                13,
                f"{folder}/ddp_amp.py{flag}",
                (
                    f"{torchrun} {folder}/ddp_amp.py --profile --epochs 1{flag} "
                    f"{'-b 8 -a convnet --synthetic 160' if cpu else '--synthetic 12800'}"
                ),
                120,
            )


def run(args, name, command, limit, folder):
    """Run a command, and return its result as a dict; a trace goes to --out."""
    log_dir = Path(folder, "log")
    environment, words = {**os.environ}, shlex.split(command)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    while re.fullmatch(r"\w+=.*", words[0]):
        variable, _, environment[variable] = words.pop(0).partition("=")
    if re.search(r"(mnist|cifar10|imagenet)/\w+\.py", command):
        words += ["--log-dir", str(log_dir)]
        words += ["--device", "cpu"] * (
            args.device == "cpu" and "--device" not in words and "pretended" not in command
        )
    began = time.perf_counter()
    try:  # in this process group: Ctrl-C reaches the command, too
        ended = subprocess.run(
            words,
            cwd=runs.ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit,
        )
        printed, status = ended.stdout, ended.returncode
    except subprocess.TimeoutExpired as error:
        printed, status = (
            (f"{(error.stdout or b'').decode()}\nended after {limit} s"),
            -signal.SIGKILL,
        )
    lines = [line for line in printed.splitlines() if line.strip()] or [""]
    result = {
        "command": command,
        "status": status,
        "seconds": time.perf_counter() - began,
        "says": lines[-1],
    }
    if probe := [line[line.index("{") :] for line in lines if '"steps_per_sec"' in line]:
        result |= json.loads(probe[-1])
    if "pretended_gpu" in command and "waits in " in printed:
        result["says"] = " ".join(printed[printed.rindex("waits in ") :].split())
    elif epochs := runs.epochs_of(log_dir):
        result["epochs"] = epochs
    for trace in log_dir.glob("trace*"):
        shutil.copy(trace, args.out / f"{name.replace('/', '-')}-{trace.name}")
    if name == "versions":
        result["printed"] = printed
        result["says"] = "; ".join(
            line for line in lines if re.match("PyTorch version|CUDA runtime|GPU|Nvidia", line)
        )
    return result


def cell(result, flops, peak):
    """What a table says of a result."""
    parts = []
    if epochs := result.get("epochs"):
        last = epochs[-1]
        parts += [
            f"loss {last['train']['loss']:.6f}",
            f"val acc {last['val']['accuracy']:.2%}",
            f"{last['train']['samples_per_sec']:,.0f} images/s",
            f"{sum(epoch['train']['seconds'] for epoch in epochs):.1f} s of training",
        ]
    if "steps_per_sec" in result:
        # Without the first 20 steps, as in probe.py.
        waits = sum(result["waits"].values()) / max(1, result["steps"] - 20)
        parts.append(f"{result['steps_per_sec']:.1f} steps/s")
        if result["peak_memory"]:  # on a GPU
            parts += [f"{waits:.2f} waits per step", f"{result['peak_memory']:.1f} GiB"]
        if flops and peak:
            parts.append(f"{flops * 256 * result['steps_per_sec'] / 1e12 / peak:.0%} of the peak")
    return ", ".join(parts) or result["says"][:300].replace("|", "/")


def resnet50_flops():
    """Floating-point operations of a training step, per image of 224x224: three times those of the
    forward pass.
    """
    from torch.utils.flop_counter import FlopCounterMode
    from torchvision.models import resnet50

    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        resnet50()(torch.empty(1, 3, 224, 224))
    return 3 * counter.get_total_flops()


def markdown(result):
    """The page gpu.md."""
    peaks = next((value for name, value in PEAK.items() if name in result["hardware"]), None)
    flops = resnet50_flops() if peaks else None
    lines = ["# One GPU", "", runs.heading(result), ""]
    for number, title in enumerate(STEPS, 1):
        rows = []
        for name, one in result["measured"].get(str(number), {}).items():
            peak = peaks[("fp32" not in name) + ("bf16" in name)] if peaks and number == 7 else None
            rows.append(
                [
                    name,
                    "ok" if one["status"] == 0 else f"status {one['status']}",
                    f"{one['seconds']:.0f} s",
                    cell(one, flops, peak),
                ]
            )
        if rows:
            lines += [
                (f"## {number}. {title[0].upper()}{title[1:]}"),
                "",
                runs.table(["", "", "", "result"], rows),
                "",
            ]
    return "\n".join(lines)


def results_of(measured, todo, at_once):
    """Yield measured(*each) for each of `todo`, in their order; so many run at once."""
    if at_once == 1:
        yield from itertools.starmap(measured, todo)
        return
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(measured, *each) for each in todo]
        try:
            for future in futures:
                yield future.result()
        finally:
            # After Ctrl-C, or when the time is over, none begins.
            pool.shutdown(cancel_futures=True)


def main():
    args = parse_args()
    path = args.out / "gpu.json"
    args.threads = os.environ.get("OMP_NUM_THREADS", "all")
    result = runs.about(args) | {"measured": {}}
    if path.exists():
        result["measured"] = json.loads(path.read_text())["measured"]
    for what in missing(args):
        print(f"missing: {what}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()

    def measured(step, name, command, limit):
        with tempfile.TemporaryDirectory() as folder:
            return step, name, run(args, name, command, limit, folder)

    wanted = [each for each in measurements(args) if each[0] in args.steps]
    new = [each for each in wanted if each[1] not in result["measured"].get(str(each[0]), {})]
    new.sort(key=lambda each: ORDER.index(each[0]))
    for step, these in itertools.groupby(new, key=lambda each: each[0]):
        several = step in UNTIMED and args.device != "cpu"
        for step, name, one in results_of(measured, these, AT_ONCE if several else 1):
            result["measured"].setdefault(str(step), {})[name] = one
            path.write_text(json.dumps(result, indent=1) + "\n")
            (args.out / "gpu.md").write_text(markdown(result) + "\n")
            seconds = time.perf_counter() - began
            print(f"{seconds:5.0f} s | {step} {name}: {cell(one, None, None)}", flush=True)
            if seconds > 60 * args.minutes:
                print(f"results in {args.out / 'gpu.md'}: --minutes are over")
                return
    print(f"results in {args.out / 'gpu.md'}")


if __name__ == "__main__":
    with runs.plain_exits():
        main()
