"""Compare fsdp.py with ddp_launch.py on two processes: the time of a step, and the memory of a process.

    python benchmarks/sharding.py

The two take turns. The memory is the largest resident size that a process had, with Python and its libraries (about
0.5 GiB). Weights, gradients and momentum take 12 bytes per weight with DDP, and half of that with FSDP; activations and
what the libraries keep are the same. Generated images; the first epoch warms up and does not count.
"""

import json
import os
import statistics
import tempfile
from pathlib import Path

import runs
from tqdm import tqdm

# name: (folder, batch per process, steps per epoch, flags)
MODELS = {"resnet18": ("cifar10", 32, 4, ""), "vit_b_16": ("imagenet", 2, 3, "--image-size 224")}
STRATEGIES = {"ddp_launch": "DDP", "fsdp": "FSDP"}


def measure(arguments, model, strategy):
    """Seconds of a step, and GiB of the largest process."""
    dataset, batch, steps, flags = MODELS[model]
    line = (f"{runs.command(strategy, 2, runs.ROOT / dataset)} --model {model} -b {batch} --test-batch-size {batch} "
            f"--synthetic {2 * batch * steps} --epochs 2 --lr 0.001 --device {arguments.device} {flags}")
    with tempfile.TemporaryDirectory() as folder:
        process = runs.start(f"{line} --log-dir {folder}/log", arguments.threads)
        _, status, used = os.wait4(process.pid, 0)  # also of its processes
        process.returncode = os.waitstatus_to_exitcode(status)
        runs.finish(process)
        last = json.loads(Path(folder, "log", "results.json").read_text())["epochs"][-1]
    return 2 * batch / last["train"]["images_per_sec"], used.ru_maxrss / 2**20


def markdown(result):
    rows = []
    for model, turns in result["turns"].items():
        for number, name in enumerate(STRATEGIES.values()):
            own = [turn[number] for turn in turns]
            ratios = [statistics.median(turn[number][k] / turn[0][k] for turn in turns) for k in (0, 1)]
            rows.append([model, name, runs.marked([1e3 * seconds for seconds, _ in own]),
                         runs.marked([memory for _, memory in own], "{:.2f}"), *(f"{ratio:.2f}" for ratio in ratios)])
    return "\n".join(["# FSDP beside DDP, two processes", "", runs.heading(result), "", runs.table(
        ["model", "strategy", "ms per step", "GiB", "ratio of time", "of memory"], rows, left=2), "",
        "Batch per process: " + ", ".join(f"{model} {batch}" for model, (_, batch, *_) in MODELS.items())
        + f". Turns: {result['repeats']}. See `python benchmarks/sharding.py --help`. {runs.MARK}"])


def main():
    parser = runs.flags.Parser(__doc__)
    parser.add_argument("--device", default="auto", help="of the recipes (default: %(default)s)")
    parser.add_argument("--threads", type=runs.flags.COUNT, default=1, metavar="N", help="per process, on the CPU")
    parser.add_argument("--repeats", type=runs.flags.COUNT, default=5, metavar="N", help="turns (default: %(default)s)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(default: all)")
    parser.add_argument("--out", type=Path, default=runs.RESULTS, metavar="DIR", help="folder for the results")
    arguments = parser.parse_args()
    turns = {model: [] for model in arguments.models}
    for model, _ in tqdm([(model, k) for k in range(arguments.repeats) for model in arguments.models], unit="turn"):
        turns[model].append([measure(arguments, model, strategy) for strategy in STRATEGIES])
    result = runs.about(arguments) | {"repeats": arguments.repeats, "turns": turns}
    runs.save(arguments, "sharding", result, markdown(result))


if __name__ == "__main__":
    main()
