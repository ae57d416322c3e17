"""Train on real data, and record the accuracy that each recipe reaches.

    python benchmarks/accuracy.py --data-dir data
    python benchmarks/accuracy.py --data-dir data --only mnist-convnet

The runs of one training differ in the recipe, the number of processes and the seed. With p
processes the global batch and the rate are p times as large. Each run has a folder in --runs, with
its curves for TensorBoard: a finished run is not repeated, and an interrupted one continues (its
time then lacks a part of an epoch). Trainings that --only leaves out keep their figures. All
trainings take hours on two cores.
"""

import os
import statistics
from pathlib import Path

import runs
from tqdm import tqdm

from common import flags
from scripts.commands import logged, plain_exits

SPEED_UPS = [("single.py", 1), ("ddp_launch.py", 2), ("ddp_launch.py", 4)]
EACH = [*SPEED_UPS, ("hvd.py", 2), ("ddp_amp.py, bf16", 2)]
# name: (folder, model, epochs, number of seeds, [(recipe, processes)], threads per process; 0: the
# cores divided by the processes)
TRAININGS = {
    "mnist-convnet": ("mnist", "convnet", 5, 3, EACH, 0),
    "cifar10-convnet": ("cifar10", "convnet", 10, 1, EACH, 0),
    # As in the published table (docs/allreduce.md), with a thread per process instead of a GPU.
    "mnist-32-epochs": ("mnist", "convnet", 32, 1, SPEED_UPS, 1),
    "cifar10-32-epochs": ("cifar10", "convnet", 32, 1, SPEED_UPS, 1),
}


def start_of(recipe: str, processes: int, folder: Path) -> str:
    """The start of a recipe's command line; `recipe` is its name in the table."""
    script = recipe.partition(",")[0]
    if script == "single.py":
        launcher = "python"
    else:
        strategy = "hvd_nccl" if script == "hvd.py" else "ddp_launch"
        launcher = runs.LAUNCHERS[strategy].format(processes)
    return f"{launcher} {folder}/{script}"


def epochs_of(log_dir: Path) -> list[dict]:
    return logged(log_dir, "evaluation")


def train(args, name: str) -> list[dict]:
    """Train all runs of `name` that are not finished; return what each has reached."""
    folder, model, epochs, seeds, starts, threads = TRAININGS[name]
    found = []
    each = [(seed, *start) for seed in range(seeds) for start in starts]
    for seed, recipe, processes in tqdm(each, unit="run", desc=name):
        log_dir = args.runs / f"{name}-{''.join(filter(str.isalnum, recipe))}-{processes}-{seed}"
        if len(epochs_of(log_dir)) < epochs:
            start = start_of(recipe, processes, runs.ROOT / folder)
            runs.run(
                f"{start} --model {model} --epochs {epochs} --seed {seed} "
                f"--data-dir {args.data_dir} --device {args.device} "
                f"--checkpoint-every 100 --resume auto --log-dir {log_dir}",
                threads or max(1, os.cpu_count() // processes),
            )
        done = epochs_of(log_dir)
        accuracy = done[-1]["val/accuracy"]
        seconds = sum(epoch["perf/seconds"] for epoch in done)
        run = {"recipe": recipe, "processes": processes, "seed": seed}
        found.append(run | {"accuracy": accuracy, "seconds": seconds})
    return found


def cell(measured: dict, start: tuple[str, int], alone: float | None) -> str:
    """What a recipe reached in a training; `alone` is the seconds of one process, if they count."""
    same = [run for run in measured["runs"] if (run["recipe"], run["processes"]) == start]
    if not same:
        return ""
    reached = [run["accuracy"] for run in same]
    text = f"{statistics.mean(reached):.2%}"
    if len(same) > 1:
        text += f" ({min(reached):.2%} to {max(reached):.2%})"
    if alone:
        seconds = same[0]["seconds"]
        text += f", {seconds / 60:.1f} min, speed-up {alone / seconds:.2f}"
    return text


def page(measured: list[dict]) -> str:
    rows = []
    origins = []
    for one in measured:
        folder, model, epochs, _, starts, _ = TRAININGS[one["training"]]
        alone = one["runs"][0]["seconds"] if starts == SPEED_UPS else None
        cells = [cell(one, start, alone) for start in EACH]
        rows.append([f"{folder}, {model}, {epochs} epochs", *cells])
        origins.append(f"- {one['training']}: {runs.origin(one)}")
    columns = [f"{recipe} x {processes}" for recipe, processes in EACH]
    explained = (
        "The validation accuracy after the last epoch, for each recipe and number of processes: "
        "the mean of three seeds, with the lowest and the highest, or a single seed. The minutes "
        "count only training, without validation and start-up."
    )
    table = runs.table(["training", *columns], rows)
    return runs.document("Accuracy on real data", explained, table, "\n".join(origins))


def parse_args():
    parser = flags.Parser(__doc__)
    runs.add_device(parser)
    runs.add_out(parser)
    add = parser.add_argument
    add("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="the data sets")
    add("--runs", type=Path, default=Path("runs/accuracy"), metavar="DIR", help="folder for runs")
    add("--only", nargs="+", choices=TRAININGS, default=list(TRAININGS), help="trainings to run")
    return parser.parse_args()


def main():
    args = parse_args()
    path = args.out / "accuracy.jsonl"
    known = {one["training"]: one for one in (runs.read(path) if path.exists() else [])}
    for name in args.only:
        about = runs.about(TRAININGS[name][5] or f"{os.cpu_count()}/processes")
        found = train(args, name)
        # If no run is new, keep the commit that the figures are from.
        if known.get(name, {}).get("runs") != found:
            known[name] = {"training": name} | about | {"runs": found}
        # In the order of TRAININGS.
        measured = [known[each] for each in TRAININGS if each in known]
        runs.write(args.out, "accuracy", measured, page(measured))
    print(page(measured))


if __name__ == "__main__":
    with plain_exits():
        main()
