"""Compare fsdp.py with ddp_launch.py on two processes: the time of a step, and the memory of a
process.

    python benchmarks/sharding.py

The two take turns. The time is the median of ten steps of a trace (--profile). The memory is the
largest resident size of rank 1, which does not save, with Python and its libraries (about 0.5 GiB).
Weights, gradients and momentum take 12 bytes per weight with DDP, and half of that with FSDP. But
on a CPU glibc keeps what FSDP frees: docs/strategies.md.
"""

import re
import statistics
import tempfile
import time
from pathlib import Path

import psutil
import runs
from tqdm import tqdm

# name: (folder, batch per process, flags)
MODELS = {"resnet18": ("cifar10", 32, ""), "vit_b_16": ("imagenet", 2, "--image-size 224")}
STEPS = 17  # the trace is of steps 7 to 16, and the last one saves
STRATEGIES = {"ddp_launch": "DDP", "fsdp": "FSDP"}


def measure(arguments, model, strategy):
    """Seconds of a step, and the largest GiB of rank 1."""
    dataset, batch, flags = MODELS[model]
    line = (
        f"{runs.command(strategy, 2, runs.ROOT / dataset)} --model {model} -b {batch} "
        f"--test-batch-size {batch} "
        f"--synthetic {2 * batch * STEPS} --epochs 1 --lr 0.001 --device {arguments.device} "
        f"--profile {flags}"
    )
    with tempfile.TemporaryDirectory() as folder:
        process, largest = runs.start(f"{line} --log-dir {folder}/log", arguments.threads), 0
        while process.poll() is None:
            largest = max(largest, *map(largest_size, psutil.Process(process.pid).children()), 0)
            time.sleep(0.5)
        runs.finish(process)
        events = runs.events_of(next(Path(folder, "log").glob("trace*")))
    steps = [event["dur"] for event in events if event["name"].startswith("ProfilerStep#")]
    return statistics.median(steps[:10]) / 1e6, largest / 2**20


def largest_size(process):
    """The largest resident size in KiB that a process has had so far if it is rank 1, else 0."""
    try:
        if process.environ().get("RANK") == "1":
            return int(
                re.search(r"VmHWM:\s*(\d+)", Path(f"/proc/{process.pid}/status").read_text())[1]
            )
    except (psutil.Error, OSError, TypeError):  # it has just ended
        pass
    return 0


def markdown(result):
    rows, batches = (
        [],
        ", ".join(f"{model} {batch} {more}".strip() for model, (_, batch, more) in MODELS.items()),
    )
    for model, turns in result["turns"].items():
        for number, name in enumerate(STRATEGIES.values()):
            own = [turn[number] for turn in turns]
            ratios = [
                statistics.median(turn[number][k] / turn[0][k] for turn in turns) for k in (0, 1)
            ]
            rows.append(
                [
                    model,
                    name,
                    runs.marked([1e3 * seconds for seconds, _ in own]),
                    runs.marked([memory for _, memory in own], "{:.2f}"),
                    *(f"{ratio:.2f}" for ratio in ratios),
                ]
            )
    return "\n".join(
        [
            "# FSDP beside DDP, two processes",
            "",
            runs.heading(result),
            "",
            runs.table(
                [
                    "model",
                    "strategy",
                    "ms per step",
                    ("GiB of rank 1"),
                    "ratio of time",
                    "of memory",
                ],
                rows,
                left=2,
            ),
            "",
            "The ratios are medians of the ratios of each turn. "
            f"Batch per process: {batches}. GiB: the largest resident size. Turns: "
            f"{result['repeats']}. "
            f"See `python benchmarks/sharding.py --help`. {runs.MARK}",
        ]
    )


def main():
    parser = runs.parser(__doc__, repeats=5)
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), help="(default: all)"
    )
    arguments = parser.parse_args()
    turns = {model: [] for model in arguments.models}
    for model, _ in tqdm(
        [(model, k) for k in range(arguments.repeats) for model in arguments.models], unit="turn"
    ):
        turns[model].append([measure(arguments, model, strategy) for strategy in STRATEGIES])
    result = runs.about(arguments) | {"repeats": arguments.repeats, "turns": turns}
    runs.save(arguments, "sharding", result, markdown(result))


if __name__ == "__main__":
    with runs.plain_exits():
        main()
