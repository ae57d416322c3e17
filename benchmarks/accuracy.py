"""Train on real data, and write down the accuracy that each recipe reaches.

    python benchmarks/accuracy.py --data-dir data
    python benchmarks/accuracy.py --data-dir data --only mnist-convnet

The runs of one model differ in the recipe, the number of processes and the seed. With p processes
the global batch and the rate are p times as large. Each run has a folder in --runs: one that is
done is not repeated, and one that was interrupted continues (its time then lacks a part of an
epoch). What --only leaves out stays in the page as it is. Together they take hours on two cores.
"""

import json
import os
import shutil
import statistics
from pathlib import Path

import model
import runs
from PIL import Image
from tqdm import tqdm

from cifar10 import cifar
from common import hooks

TORCHRUN = "torchrun --standalone --nproc-per-node={processes} {folder}"
STARTS = {
    "single.py": "python {folder}/single.py",
    "ddp_launch.py": f"{TORCHRUN}/ddp_launch.py",
    "hvd.py": "horovodrun -np {processes} python {folder}/hvd.py",
    **{
        (f"ddp_launch.py, {hook}"): f"{TORCHRUN}/ddp_launch.py --comm-hook {hook}"
        for hook in hooks.HOOKS[1:]
    },
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
COMPRESSED = [("ddp_launch.py", 2), *((f"ddp_launch.py, {hook}", 2) for hook in hooks.HOOKS[1:])]
PUBLISHED = [("single.py", 1), ("ddp_launch.py", 2), ("ddp_launch.py", 4)]
# name: (folder, model, epochs, number of seeds, [(recipe, processes)], threads per process or 0:
# the cores, shared out)
TRAININGS = {
    "mnist-lenet": ("mnist", "lenet", 5, 3, EACH, 0),
    "mnist-convnet": ("mnist", "convnet", 5, 3, EACH, 0),
    "cifar10-convnet": ("cifar10", "convnet", 10, 3, EACH, 0),
    "mnist-comm-hook": ("mnist", "convnet", 5, 1, COMPRESSED, 0),
    "cifar10-comm-hook": ("cifar10", "convnet", 5, 1, COMPRESSED, 0),
    # the default is 30 epochs; one takes 4 min and a half on two cores with AVX512-BF16
    "cifar10-resnet18": ("cifar10", "resnet18", 18, 1, [("ddp_amp.py, bf16, channels-last", 2)], 0),
    "imagenet-convnet": ("imagenet", "convnet", 5, 1, [("single.py", 1), ("ddp_launch.py", 2)], 0),
    # as in the published table of model.py: a process has one GPU there, and one thread here
    "mnist-32-epochs": ("mnist", "convnet", 32, 1, PUBLISHED, 1),
    "cifar10-32-epochs": ("cifar10", "convnet", 32, 1, PUBLISHED, 1),
}


def command(arguments, name, start, processes, seed):
    """The command of a run."""
    folder, net, epochs, *_ = TRAININGS[name]
    data = arguments.data_dir
    if folder == "imagenet":
        data = (
            f"{cifar10_as_jpegs(data, arguments.runs / 'cifar10-as-jpegs')} --image-size 32 -b 128"
        )
    line = STARTS[start].format(processes=processes, folder=runs.ROOT / folder)
    line += f" --model {net} --epochs {epochs} --seed {seed} --data-dir {data}"
    return f"{line} --device {arguments.device} --checkpoint-every 100 --resume auto"


def cifar10_as_jpegs(data_dir, folder):
    """Write CIFAR-10 as ImageNet lies on a disk, SPLIT/CLASS/NAME.JPEG, unless it is there.

    Return the folder.
    """
    if all((folder / split).exists() for split in ("train", "val")):
        return folder
    sets = cifar.load(data_dir, None, 0)
    for split, images in zip(("train", "val"), sets, strict=True):
        partial = folder / f"{split}.partial"
        for number, (image, label) in enumerate(tqdm(images, desc=f"{folder / split}")):
            path = partial / str(int(label)) / f"{number}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(path, quality=95)
        shutil.rmtree(folder / split, ignore_errors=True)
        partial.rename(folder / split)
    return folder


def log_dir(arguments, name, start, processes, seed):
    return arguments.runs / f"{name}-{''.join(filter(str.isalnum, start))}-{processes}-{seed}"


def epochs_of(arguments, run):
    """The epochs of a run: none if it has not begun."""
    return runs.epochs_of(log_dir(arguments, *run))


def train(arguments, name):
    """Train all runs of `name`; return [{recipe, processes, seed, epochs}]."""
    _, _, epochs, seeds, starts, threads = TRAININGS[name]
    every = [(name, *start, seed) for seed in range(seeds) for start in starts]
    for run in tqdm(
        [run for run in every if len(epochs_of(arguments, run)) < epochs], unit="run", desc=name
    ):
        runs.finish(
            runs.start(
                f"{command(arguments, *run)} --log-dir {log_dir(arguments, *run)}",
                threads or max(1, os.cpu_count() // run[2]),
            )
        )
    return [
        {"recipe": run[1], "processes": run[2], "seed": run[3], "epochs": epochs_of(arguments, run)}
        for run in every
    ]


def reached(result, recipe, processes):
    """The accuracy after the last epoch, for each seed."""
    return [
        run["epochs"][-1]["val"]["accuracy"]
        for run in result["runs"]
        if (run["recipe"], run["processes"]) == (recipe, processes)
    ]


def minutes(result, recipe, processes):
    """The median time of training over the seeds."""
    return (
        statistics.median(
            sum(epoch["train"]["seconds"] for epoch in run["epochs"])
            for run in result["runs"]
            if (run["recipe"], run["processes"]) == (recipe, processes)
        )
        / 60
    )


def predict(arguments, name, result):
    """The minutes that model.py predicts for each number of processes, from those of one.

    {} without allreduce.py's.
    """
    folder, net, epochs, _, starts, _ = TRAININGS[name]
    measured = [
        json.loads(path.read_text()) for path in arguments.out.glob("allreduce-gloo-*.json")
    ]
    fits = {(one["backend"], one["processes"]): model.fit(one) for one in measured}
    if starts != PUBLISHED or ("gloo", 2) not in fits:
        return {}
    steps = epochs * model.IMAGES[folder] / model.BATCH[folder]
    work = {
        "step": 60 * minutes(result, *starts[0]) / steps,
        "bytes": model.gradient_bytes(folder, net),
    }
    return {
        str(p): steps / p * model.predict(work, p, fits, os.cpu_count()) / 60 for _, p in starts
    }


def markdown(results):
    """The page accuracy.md: for each model a table with a row for each recipe and number of
    processes.
    """
    lines = ["# Accuracy on real data", "", "The validation accuracy after the last epoch.", ""]
    for name, result in results.items():
        folder, net, epochs, _, starts, threads = TRAININGS[name]
        columns, rows, below = ["recipe", "processes", "mean", "least to most", "seeds"], [], []
        for start in starts:
            found = reached(result, *start)
            rows.append(
                [
                    *start,
                    f"{statistics.mean(found):.2%}",
                    (f"{min(found):.2%} to {max(found):.2%}"),
                    len(found),
                ]
            )
        if predicted := result["predicted"]:
            columns += ["minutes", "speed-up", "predicted minutes"]
            taken = [minutes(result, *start) for start in starts]
            rows = [
                [*row, f"{own:.1f}", f"{taken[0] / own:.2f}", f"{predicted[str(row[1])]:.1f}"]
                for row, own in zip(rows, taken, strict=True)
            ]
            below = [
                (
                    "The time is that of training, without validation and start-up. [The cost "
                    "model](model.md)"
                ),
                "predicts it from that of one process. The models and GPUs of the published "
                "table are unknown:",
                "compare the speed-up only.",
                "",
            ]
            published = model.PUBLISHED[folder]
            rows += [
                [
                    ("published, GPUs"),
                    p,
                    *"---",
                    f"{seconds / 60:.1f}",
                    f"{published[1] / seconds:.2f}",
                    "-",
                ]
                for p, seconds in published.items()
            ]
        share = f"{threads} thread per process" if threads else "all cores"
        share += ", gradients compressed" * (starts == COMPRESSED)
        title = f"{folder}, {net}, {epochs} epochs, {share}"
        if folder == "imagenet":
            title = f"CIFAR-10's images as JPEG files, with the recipes of {title}"
        lines += [
            f"## {title}",
            "",
            runs.table(columns, rows),
            "",
            *below,
            f"{runs.heading(result)} {result.get('note', '')}".rstrip(),
            "",
        ]
    return "\n".join([*lines, "![Validation accuracy over epochs](accuracy.svg)"])


def draw(arguments, results):
    """The validation accuracy after each epoch, for each model and recipe; seed 0."""
    fig, (axes,) = runs.figure(len(results), width=5)
    for ax, (name, result) in zip(axes, results.items(), strict=True):
        for run in result["runs"]:
            if run["seed"] == 0:
                ax.plot(
                    [epoch["epoch"] for epoch in run["epochs"]],
                    [100 * epoch["val"]["accuracy"] for epoch in run["epochs"]],
                    ".-",
                    label=f"{run['recipe']} x{run['processes']}",
                )
        ax.set(title=name, xlabel="epoch", ylabel="validation accuracy, %")
        ax.legend()
    runs.save_figure(fig, arguments, "accuracy")


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
        for other, result in results.items():
            result["predicted"] = predict(arguments, other, result)
        runs.save(arguments, "accuracy", results, markdown(results))
        draw(arguments, results)


if __name__ == "__main__":
    with runs.plain_exits():
        main()
