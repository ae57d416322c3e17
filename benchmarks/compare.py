"""Compare the strategies at equal global batch: DataParallel, DDP and Horovod, with and without fp16 compression.

    python benchmarks/compare.py
    python benchmarks/compare.py --dataset mnist --processes 2 --repeats 1 --out /tmp/compare

The first row is single.py with the whole batch in one process. DataParallel is one process for all GPUs; without GPUs
it has one device to work on. Generated images; the first epoch warms up and does not count.
"""

import statistics

import runs
from scaling import WORK, ratio
from tqdm import tqdm

from common import failures, flags

FP16 = "--fp16-allreduce"


def settings(arguments):
    """The runs of one repetition, each with the same global batch."""
    work = WORK[arguments.dataset] | {"dataset": arguments.dataset}
    whole = arguments.global_batch or work["batch"] * arguments.processes
    if whole % arguments.processes:
        failures.fail(f"--global-batch {whole} does not divide over {arguments.processes} processes")
    found = []
    for name in runs.available():
        if name == "independent":
            continue
        processes = 1 if name in ("single", "dp") else arguments.processes
        for options in ["", FP16] if name.startswith("hvd") else [""]:
            found.append(work | {"strategy": name, "processes": processes, "batch": whole // processes,
                                 "flags": options, "images_per_sec": []})
    return found


def title(run):
    return runs.TITLES[run["strategy"]] + (", fp16" if run["flags"] == FP16 else "")


def markdown(result):
    found = result["runs"]
    missing = [runs.TITLES[name] for name in runs.TITLES if name not in runs.available()]
    lines = ["# Strategies at equal global batch", "", runs.heading(result), "",
             f"{found[0]['dataset']}, {found[0]['model']}, {found[0]['global_batch']} images in the global batch. "
             + runs.MARK, "",
             runs.table(["strategy", "processes", "batch per process", "images/s", "times one process", "ms per step"],
                        [[title(run), run["processes"], run["batch"], runs.marked(run["images_per_sec"]),
                          f"{ratio(run, found[0]):.2f}",
                          f"{1e3 * run['global_batch'] / statistics.median(run['images_per_sec']):,.1f}"]
                         for run in found])]
    if missing:
        lines += ["", f"Missing, as this machine cannot run it: {', '.join(missing)}."]
    return "\n".join([*lines, "", "![images/s of each strategy](compare.svg)"])


def draw(arguments, result):
    fig, ((ax,),) = runs.figure(1, width=8)
    found = result["runs"]
    medians = [statistics.median(run["images_per_sec"]) for run in found]
    low, high = ([abs(edge(run["images_per_sec"]) - median) for run, median in zip(found, medians, strict=True)]
                 for edge in (min, max))
    bars = ax.barh([title(run) for run in found], medians, xerr=[low, high], capsize=3,
                   color=[runs.COLORS[run["strategy"]] for run in found],
                   hatch=["//" if run["flags"] else "" for run in found], edgecolor="white")
    ax.bar_label(bars, [f"{median:,.0f}" for median in medians], padding=8)
    ax.set(title=f"{found[0]['dataset']}, {found[0]['model']}, global batch {found[0]['global_batch']}, "
                 f"{arguments.processes} processes", xlabel="images/s", xlim=(0, 1.15 * max(medians)))
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    runs.save_figure(fig, arguments, "compare")


def parse_args():
    parser = runs.parser(__doc__, repeats=2)
    parser.add_argument("--dataset", choices=WORK, default="cifar10", help="which recipes")
    parser.add_argument("--processes", type=flags.number(int, 2), default=2, metavar="N")
    parser.add_argument("--global-batch", type=flags.number(int, 1), metavar="N",
                        help="images per step over all processes; without it those of scaling.py per process")
    return parser.parse_args()


def main():
    arguments = parse_args()
    result = runs.about(arguments) | {"runs": settings(arguments)}
    todo = [run for _ in range(arguments.repeats) for run in result["runs"]]
    for run in tqdm(todo, unit="run", desc="compare"):
        figures = runs.measure(run, arguments.threads, f"--device {arguments.device}")
        run["images_per_sec"].append(figures["images_per_sec"])
        run["global_batch"] = figures["global_batch"]
    runs.same_global_batch(result["runs"])
    runs.save(arguments, "compare", result, markdown(result))
    draw(arguments, result)


if __name__ == "__main__":
    main()
