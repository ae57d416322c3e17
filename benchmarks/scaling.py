"""Train on several processes of this machine, and compare the images/s with those of one.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --datasets cifar10 --processes 1 2 4 8

The batch per process stays the same (weak scaling). Without a GPU each process has --threads
threads. Processes that do not communicate show what the machine itself costs: its cores share
caches, memory and power. With more processes than cores only DDP is measured, for model.py. The
images are generated; the first epoch warms up and does not count.
"""

import os
import statistics
import tempfile
from pathlib import Path

import runs
from tqdm import tqdm

from common import flags
from scripts.commands import Command, logged, plain_exits

# "steps" are those of an epoch.
WORK = {
    "mnist": {"model": "convnet", "batch": 64, "steps": 120, "epochs": 3},
    "cifar10": {"model": "resnet18", "batch": 32, "steps": 8, "epochs": 2},
}
# A GPU takes a few steps too quickly to time them.
ON_GPU = {"mnist": {"steps": 1500}, "cifar10": {"batch": 128, "steps": 300}}


def settings(args) -> list[dict]:
    """All runs of one repetition."""
    found = []
    for dataset in args.datasets:
        work = {"dataset": dataset} | WORK[dataset]
        if args.device == "auto":
            work |= ON_GPU[dataset]
        for processes in args.processes:
            if processes == 1:
                strategies = ["single"]
            elif processes > os.cpu_count():
                strategies = ["ddp_launch"]
            else:
                strategies = ["independent", *args.strategies]
            for name in strategies:
                found.append(work | {"strategy": name, "processes": processes})
    return found


def images_per_sec(run: dict, threads: int, device: str) -> float:
    """Start a run once, and return its images/s: the median over all epochs but the first."""
    processes = run["processes"]
    alone = run["strategy"] == "independent"
    images = run["batch"] * run["steps"] * (1 if alone else processes)
    line = (
        f"{runs.start_of(run['strategy'], processes, runs.ROOT / run['dataset'])} "
        f"--model {run['model']} -b {run['batch']} --synthetic {images} "
        f"--epochs {run['epochs']} --lr 0.001 --device {device}"
    )
    with tempfile.TemporaryDirectory() as folder:
        log_dirs = [Path(folder, str(number)) for number in range(processes if alone else 1)]
        # Side by side.
        commands = [Command(f"{line} --log-dir {log_dir}", threads) for log_dir in log_dirs]
        try:
            for command in commands:
                runs.finish(command)
        finally:
            for command in commands:
                command.end()
        total = 0.0
        for log_dir in log_dirs:
            epochs = [event["perf/samples_per_sec"] for event in logged(log_dir, "evaluation")]
            total += statistics.median(epochs[1:] or epochs)
    return total


def ratio(run: dict, other: dict, times: int = 1) -> float:
    """The images/s of `run` divided by `times` those of `other`: the median over repetitions."""
    pairs = zip(run["images_per_sec"], other["images_per_sec"], strict=True)
    return statistics.median(own / (others * times) for own, others in pairs)


def seconds_of_step(run: dict) -> float:
    """The seconds of a step of each process."""
    return run["batch"] * run["processes"] / statistics.median(run["images_per_sec"])


def page(measured: list[dict]) -> str:
    (one,) = measured
    by_name = {(run["dataset"], run["strategy"], run["processes"]): run for run in one["runs"]}
    names = ["strategy", "processes", "images/s", "efficiency", "of the limit", "ms per step"]
    parts = []
    for dataset in dict.fromkeys(run["dataset"] for run in one["runs"]):
        rows = []
        for run in (run for run in one["runs"] if run["dataset"] == dataset):
            single = by_name.get((dataset, "single", 1))
            limit = by_name.get((dataset, "independent", run["processes"]))
            efficiency = f"{ratio(run, single, run['processes']):.2f}" if single else "-"
            of_limit = f"{ratio(run, limit):.2f}" if limit else "-"
            rows.append(
                [
                    runs.TITLES[run["strategy"]],
                    run["processes"],
                    runs.marked(run["images_per_sec"]),
                    efficiency,
                    of_limit,
                    f"{seconds_of_step(run) * 1e3:,.1f}",
                ]
            )
        title = f"## {dataset}, {run['model']}, {run['batch']} images per process"
        parts += [title, runs.table(names, rows)]
    explained = (
        "efficiency: images/s of p processes divided by p times those of one. of the limit: "
        "divided by those of p processes that do not communicate. "
        f"Ratios are medians over the repetitions. {runs.MARK}"
    )
    return runs.document("Scaling", explained, *parts, runs.origin(one))


def parse_args():
    there = runs.launchers()
    counts = runs.process_counts()
    parser = flags.Parser(__doc__)
    runs.add_repeats(parser, 3)
    runs.add_device(parser)
    runs.add_out(parser)
    add = parser.add_argument
    add("--datasets", nargs="+", choices=WORK, default=list(WORK), help="which recipes")
    add("--strategies", nargs="+", choices=there, default=there, help="how gradients are averaged")
    add("--processes", nargs="+", type=flags.positive_int, default=counts, metavar="N")
    return parser.parse_args()


def main():
    args = parse_args()
    measured = runs.about(args.threads) | {"runs": settings(args)}
    for run in measured["runs"]:
        run["images_per_sec"] = []
    todo = [run for _ in range(args.repeats) for run in measured["runs"]]
    for run in tqdm(todo, unit="run", desc="scaling"):
        run["images_per_sec"].append(images_per_sec(run, args.threads, args.device))
    runs.write(args.out, "scaling", [measured], page([measured]))
    print(page([measured]))


if __name__ == "__main__":
    with plain_exits():
        main()
