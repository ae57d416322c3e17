"""Measure how the recipes scale over the processes of one machine: images/s and efficiency.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --datasets mnist --processes 1 2 --repeats 1 --out /tmp/scaling

Weak scaling: a fixed batch per process, so the global batch grows. Strong scaling: a fixed global
batch. `independent` is the same number of single.py side by side, without communication: the upper
bound that cores, memory and power of this machine allow. With more processes than cores only DDP is
measured, for model.py. Generated images; the first epoch warms up and does not count.
"""

import os
import statistics
from pathlib import Path

import runs
import torch
from tqdm import tqdm

from common import flags
from common.errors import InputError

# steps per epoch with the batch of one process, which is also the weak-scaling one
WORK = {
    "mnist": {"model": "convnet", "batch": 64, "steps": 120, "epochs": 3},
    "cifar10": {"model": "resnet18", "batch": 32, "steps": 8, "epochs": 2},
}
# A few steps are too short to time.
ON_GPU = {"mnist": {"steps": 1500}, "cifar10": {"batch": 128, "steps": 300}}


def settings(arguments):
    """All runs of one repetition; a run that both weak and strong scaling need is made once."""
    found = []
    for dataset in arguments.datasets:
        work = (
            WORK[dataset]
            | (ON_GPU[dataset] if arguments.device == "auto" else {})
            | {"dataset": dataset}
        )
        batch, whole = work["batch"], 2 * work["batch"]  # the global batch of strong scaling
        for processes in arguments.processes:
            if whole % processes:
                raise InputError(
                    f"a global batch of {whole} does not divide over {processes} "
                    "processes: runs of different global "
                    "batch cannot be compared"
                )
            full = processes > os.cpu_count()
            names = (
                ["single"]
                if processes == 1
                else [
                    name
                    for name in ("independent", *arguments.strategies)
                    if not full or name == "ddp_launch"
                ]
            )
            for name in names:
                setting = work | {"strategy": name, "processes": processes}
                weak = setting | {"batch": batch, "modes": ["weak"]}
                strong = setting | {"batch": whole // processes, "modes": ["strong"]}
                if name == "independent":
                    found.append(weak)
                elif weak["batch"] == strong["batch"]:
                    found.append(weak | {"modes": ["weak", "strong"]})
                else:
                    found += [weak, strong]
    return found


def run_all(arguments):
    """The runs of all repetitions, alternated."""
    measured = settings(arguments)
    for setting in measured:
        setting["images_per_sec"] = []
    options = f"--device {arguments.device}"
    todo = [setting for _ in range(arguments.repeats) for setting in measured]
    for setting in tqdm(todo, unit="run", desc="scaling"):
        figures = runs.measure(setting, arguments.threads, options)
        setting["images_per_sec"].append(figures["images_per_sec"])
        setting["global_batch"] = figures["global_batch"]
    return measured


def ratio(run, other, times=1):
    """The images/s of `run` divided by those of `other`, which alternated with it: the median over
    repetitions.
    """
    return statistics.median(
        a / (b * times)
        for a, b in zip(run["images_per_sec"], other["images_per_sec"], strict=False)
    )


def rows(results):
    """Each run once for each mode that it belongs to, with its efficiencies."""
    found = [run | {"mode": mode} for run in results for mode in run["modes"]]
    for run in found:
        same = [
            other
            for other in found
            if (other["dataset"], other["mode"]) == (run["dataset"], run["mode"])
        ]
        single = next((other for other in same if other["strategy"] == "single"), None)
        limit = next(
            (
                other
                for other in same
                if other["strategy"] == "independent" and other["processes"] == run["processes"]
            ),
            None,
        )
        run["efficiency"] = single and ratio(run, single, run["processes"])
        run["of_limit"] = limit and ratio(run, limit)
        step = run["global_batch"] * (run["processes"] if run["strategy"] == "independent" else 1)
        run["step"] = step / statistics.median(run["images_per_sec"])
    return sorted(
        found,
        key=lambda run: (
            run["dataset"],
            run["mode"] != "weak",
            run["processes"],
            list(runs.TITLES).index(run["strategy"]),
        ),
    )


def markdown(result, found):
    lines = [
        "# Scaling",
        "",
        runs.heading(result),
        "",
        "efficiency: images/s of p processes divided by p times those of one. of the limit: "
        "divided by those of p",
        "independent processes side by side. weak scaling: the batch per process stays the "
        "same. pinned: each",
        "process on its own core (scripts/pin.sh). Ratios are medians of those of each repetition.",
        runs.MARK,
        "",
    ]
    for dataset in result["datasets"]:
        for mode in ("weak", "strong"):
            chosen = [run for run in found if run["dataset"] == dataset and run["mode"] == mode]
            if not chosen:
                continue
            fixed = (
                f"{chosen[0]['batch']} images per process"
                if mode == "weak"
                else f"{chosen[0]['global_batch']} images in the global batch"
            )
            lines += [
                (f"## {dataset}, {chosen[0]['model']}, {mode} scaling: {fixed}"),
                "",
                runs.table(
                    [
                        "strategy",
                        "processes",
                        ("batch per process"),
                        "global batch",
                        "images/s",
                        "efficiency",
                        "of the limit",
                        "ms per step",
                    ],
                    [
                        [
                            runs.TITLES[run["strategy"]],
                            run["processes"],
                            run["batch"],
                            "-" if run["strategy"] == "independent" else run["global_batch"],
                            runs.marked(run["images_per_sec"]),
                            *(
                                f"{run[name]:.2f}" if run[name] else "-"
                                for name in ("efficiency", "of_limit")
                            ),
                            f"{run['step'] * 1e3:,.1f}",
                        ]
                        for run in chosen
                    ],
                ),
                "",
            ]
    return "\n".join(lines).rstrip()


def parse_args():
    there = [name for name in runs.available() if name.startswith(("ddp", "hvd"))]
    parser = flags.Parser(__doc__)
    parser.add_argument(
        "--repeats",
        type=flags.positive_int,
        default=3,
        metavar="N",
        help="repetitions of each run; they alternate",
    )
    runs.add_threads(parser)
    runs.add_device(parser)
    parser.add_argument(
        "--out", type=Path, default=runs.RESULTS, metavar="DIR", help="folder for the results"
    )
    parser.add_argument(
        "--datasets", nargs="+", choices=WORK, default=list(WORK), help="which recipes"
    )
    parser.add_argument(
        "--strategies",
        nargs="+",
        choices=there,
        help="how they average gradients",
        default=[name for name in there if name != "ddp_spawn"],
    )
    gpus = torch.cuda.device_count()
    parser.add_argument(
        "--processes",
        nargs="+",
        type=flags.positive_int,
        metavar="N",
        default=[n for n in (1, 2, 4, 8) if n <= (gpus if gpus > 1 else 4)],
    )
    return parser.parse_args()


def main():
    arguments = parse_args()
    result = runs.about(arguments) | {"datasets": arguments.datasets, "runs": run_all(arguments)}
    runs.save(arguments, "scaling", result, markdown(result, rows(result["runs"])))


if __name__ == "__main__":
    with runs.plain_exits():
        main()
