"""Train on real data, and write down the accuracy that each recipe reaches.

    python benchmarks/accuracy.py --data-dir data
    python benchmarks/accuracy.py --data-dir data --only mnist-convnet

The runs of one model differ in the recipe, the number of processes and the seed. With p processes
the global batch and the rate are p times as large. Each run has a folder in --runs: one that is
done is not repeated, and one that was interrupted continues (its time then lacks a part of an
epoch); its curves are there, for TensorBoard. What --only leaves out stays in the page as it is.
Together they take hours on two cores.
"""

import json
import os
import statistics
from pathlib import Path

import runs
from tqdm import tqdm

TORCHRUN = "torchrun --standalone --nproc-per-node={processes} {folder}"
STARTS = {
    "single.py": "python {folder}/single.py",
    "ddp_launch.py": f"{TORCHRUN}/ddp_launch.py",
    "hvd.py": "horovodrun -np {processes} python {folder}/hvd.py",
    "ddp_amp.py, bf16": f"{TORCHRUN}/ddp_amp.py",
    "ddp_amp.py, bf16, channels-last": f"{TORCHRUN}/ddp_amp.py --channels-last",
}
EACH = [
    ("single.py", 1),
    ("ddp_launch.py", 2),
    ("ddp_launch.py", 4),
    ("hvd.py", 2),
    ("ddp_amp.py, bf16", 2),
]
SPEED_UPS = [("single.py", 1), ("ddp_launch.py", 2), ("ddp_launch.py", 4)]
# name: (folder, model, epochs, number of seeds, [(recipe, processes)], threads per process or 0:
# the cores, shared out)
TRAININGS = {
    "mnist-lenet": ("mnist", "lenet", 5, 3, EACH, 0),
    "mnist-convnet": ("mnist", "convnet", 5, 3, EACH, 0),
    "cifar10-convnet": ("cifar10", "convnet", 10, 1, EACH, 0),
    # the default is 30 epochs; one takes 4 min and a half on two cores with AVX512-BF16
    "cifar10-resnet18": ("cifar10", "resnet18", 18, 1, [("ddp_amp.py, bf16, channels-last", 2)], 0),
    # as in the published table (docs/allreduce.md): a process has a GPU there, and a thread here
    "mnist-32-epochs": ("mnist", "convnet", 32, 1, SPEED_UPS, 1),
    "cifar10-32-epochs": ("cifar10", "convnet", 32, 1, SPEED_UPS, 1),
}


def command(arguments, name, start, processes, seed):
    """The command of a run."""
    folder, net, epochs, *_ = TRAININGS[name]
    line = STARTS[start].format(processes=processes, folder=runs.ROOT / folder)
    line += f" --model {net} --epochs {epochs} --seed {seed} --data-dir {arguments.data_dir}"
    return f"{line} --device {arguments.device} --checkpoint-every 100 --resume auto"


def log_dir(arguments, name, start, processes, seed):
    return arguments.runs / f"{name}-{''.join(filter(str.isalnum, start))}-{processes}-{seed}"


def epochs_of(arguments, run):
    """The epochs of a run: none if it has not begun."""
    return runs.epochs_of(log_dir(arguments, *run))


def train(arguments, name):
    """Train all runs of `name`; return what each has reached."""
    _, _, epochs, seeds, starts, threads = TRAININGS[name]
    every = [(name, *start, seed) for seed in range(seeds) for start in starts]
    missing = [run for run in every if len(epochs_of(arguments, run)) < epochs]
    for run in tqdm(missing, unit="run", desc=name):
        line = f"{command(arguments, *run)} --log-dir {log_dir(arguments, *run)}"
        runs.finish(runs.start(line, threads or max(1, os.cpu_count() // run[2])))
    return [{**of_run(run), **result_of(epochs_of(arguments, run))} for run in every]


def of_run(run):
    _, recipe, processes, seed = run
    return {"recipe": recipe, "processes": processes, "seed": seed}


def result_of(epochs):
    """The accuracy after the last epoch, and the seconds of training."""
    return {
        "accuracy": epochs[-1]["val"]["accuracy"],
        "seconds": sum(epoch["train"]["seconds"] for epoch in epochs),
    }


def each_seed(result, recipe, processes, figure):
    """The accuracy or the seconds of a recipe, for each seed."""
    return [
        run[figure]
        for run in result["runs"]
        if (run["recipe"], run["processes"]) == (recipe, processes)
    ]


def markdown(results):
    """The page accuracy.md: for each model a table with a row for each recipe and number of
    processes.
    """
    lines = ["# Accuracy on real data", "", "The validation accuracy after the last epoch.", ""]
    for name, result in results.items():
        folder, net, epochs, _, starts, threads = TRAININGS[name]
        columns, rows, below = ["recipe", "processes", "mean", "least to most", "seeds"], [], []
        for start in starts:
            found = each_seed(result, *start, "accuracy")
            rows.append(
                [
                    *start,
                    f"{statistics.mean(found):.2%}",
                    (f"{min(found):.2%} to {max(found):.2%}"),
                    len(found),
                ]
            )
        if starts == SPEED_UPS:
            columns += ["minutes", "speed-up"]
            taken = [
                statistics.median(each_seed(result, *start, "seconds")) / 60 for start in starts
            ]
            rows = [
                [*row, f"{own:.1f}", f"{taken[0] / own:.2f}"]
                for row, own in zip(rows, taken, strict=True)
            ]
            below = [
                "The time is that of training, without validation and start-up. "
                "[allreduce.md](../../docs/allreduce.md#a-published-table-1-to-32-gpus) has a "
                "published table beside it.",
                "",
            ]
        share = f"{threads} thread per process" if threads else "all cores"
        title = f"{folder}, {net}, {epochs} epochs, {share}"
        lines += [
            f"## {title}",
            "",
            runs.table(columns, rows),
            "",
            *below,
            f"{runs.heading(result)} {result.get('note', '')}".rstrip(),
            "",
        ]
    return "\n".join(lines).rstrip()


def parse_args():
    parser = runs.flags.Parser(__doc__)
    runs.add_device(parser)
    parser.add_argument(
        "--data-dir", type=Path, default=Path("data"), metavar="DIR", help="with MNIST and CIFAR-10"
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/accuracy"), metavar="DIR", help="for the runs"
    )
    parser.add_argument("--note", default="", help="about the data, for the page")
    parser.add_argument(
        "--only", nargs="+", choices=TRAININGS, default=list(TRAININGS), help="which models"
    )
    parser.add_argument(
        "--out", type=Path, default=runs.RESULTS, metavar="DIR", help="folder for the results"
    )
    return parser.parse_args()


def main():
    arguments = parse_args()
    path = arguments.out / "accuracy.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for name in arguments.only:
        arguments.threads = TRAININGS[name][5] or f"{os.cpu_count()}/processes"
        about, found = runs.about(arguments), train(arguments, name)
        # Else no run is new, and they are of the commit that it names.
        if results.get(name, {}).get("runs") != found:
            results[name] = about | {"runs": found}
        if arguments.note:
            results[name]["note"] = arguments.note
        results = {name: results[name] for name in TRAININGS if name in results}  # in their order
        runs.save(arguments, "accuracy", results, markdown(results))


if __name__ == "__main__":
    with runs.plain_exits():
        main()
