"""Measure how the recipes scale over the processes of one machine: images/s, efficiency, and what a
step consists of.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --datasets mnist --processes 1 2 --repeats 1 --out /tmp/scaling

Weak scaling: a fixed batch per process, so the global batch grows. Strong scaling: a fixed global
batch. `independent` is the same number of single.py side by side, without communication: the upper
bound that cores, memory and power of this machine allow. With more processes than cores only DDP is
measured, for model.py. Generated images; the first epoch warms up and does not count.
"""

import os
import statistics

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
PROFILED = {"steps": 12, "epochs": 1}  # of which --profile records six
PARTS = ("data", "forward", "backward", "communication", "optimizer", "other")
PART_COLORS = ("#bbbbbb", "#56b4e9", "#0072b2", "#d55e00", "#009e73", "#eeeeee")


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
    """The runs of all repetitions, alternated, and one more of each for the parts of a step."""
    measured = settings(arguments)
    for setting in measured:
        setting["images_per_sec"] = []
    options = f"--device {arguments.device}"
    todo = [(setting, False) for _ in range(arguments.repeats) for setting in measured]
    todo += [
        (setting, True)
        for setting in measured
        if "weak" in setting["modes"] and setting["strategy"] != "independent"
    ]
    for setting, profile in tqdm(todo, unit="run", desc="scaling"):
        figures = runs.measure(
            setting | (PROFILED if profile else {}), arguments.threads, options, profile
        )
        if profile:
            setting["split"] = figures["split"]
        else:
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


def name_of(run):
    return f"{run['dataset']}: {runs.TITLES[run['strategy']]} x{run['processes']}"


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
    split = [run for run in found if "split" in run and run["mode"] == "weak"]
    lines += [
        "## What a step consists of, in ms",
        "",
        "From a trace (`--profile`) of a separate run, the same batch per process; "
        "communication is the part",
        "not hidden behind backward. See `parts` in benchmarks/runs.py.",
        "",
        runs.table(
            ["run", *PARTS],
            [
                [name_of(run), *(f"{run['split'][part] * 1e3:,.1f}" for part in PARTS)]
                for run in split
            ],
        ),
        "",
        "![images/s over processes, and what a step consists of](scaling.svg)",
    ]
    return "\n".join(lines)


def draw(arguments, result, found):
    """Weak scaling of each data set (images/s over processes), beside the parts of a step."""
    fig, ((*axes, parts),) = runs.figure(len(result["datasets"]) + 1, width=5)
    for ax, dataset in zip(axes, result["datasets"], strict=True):
        chosen = [run for run in found if run["dataset"] == dataset and run["mode"] == "weak"]
        single = next((run for run in chosen if run["strategy"] == "single"), None)
        for name in dict.fromkeys(run["strategy"] for run in chosen if run["strategy"] != "single"):
            line = [run for run in (single, *chosen) if run and run["strategy"] in ("single", name)]
            ax.plot(
                [run["processes"] for run in line],
                [statistics.median(run["images_per_sec"]) for run in line],
                "o--" if name == "independent" else "o-",
                label=runs.TITLES[name],
                color=runs.COLORS[name],
            )
        most = max(run["processes"] for run in chosen)
        if single:
            ax.plot(
                [1, most],
                [statistics.median(single["images_per_sec"]) * p for p in (1, most)],
                color="#cccccc",
                linestyle=":",
                label="p times one process",
                zorder=0,
            )
        ax.set(
            title=(f"{dataset}, {chosen[0]['model']}, {chosen[0]['batch']} images per process"),
            xlabel="processes",
            ylabel="images/s",
            ylim=(0, None),
            xticks=sorted({run["processes"] for run in chosen}),
        )
        ax.legend()
    split = [run for run in found if "split" in run and run["mode"] == "weak"]
    labels = [name_of(run) for run in split]
    left = [0.0] * len(split)
    for part, color in zip(PARTS, PART_COLORS, strict=True):
        shares = [100 * run["split"][part] / sum(run["split"].values()) for run in split]
        parts.barh(labels, shares, left=left, color=color, label=part)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    parts.set(title="parts of a step", xlabel="% of the step")
    parts.invert_yaxis()
    parts.grid(axis="y", visible=False)
    parts.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.4, -0.12))
    runs.save_figure(fig, arguments, "scaling")


def parse_args():
    there = [name for name in runs.available() if name.startswith(("ddp", "hvd"))]
    parser = runs.parser(__doc__, repeats=3)
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
    found = rows(result["runs"])
    runs.save(arguments, "scaling", result, markdown(result, found))
    draw(arguments, result, found)


if __name__ == "__main__":
    with runs.plain_exits():
        main()
