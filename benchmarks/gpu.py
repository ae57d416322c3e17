"""Measure the recipes on one GPU: 32 epochs of MNIST and CIFAR-10 with all fast options, and what --compile brings.

    python benchmarks/gpu.py --data-dir data

The times of 32 epochs stand beside the best published ones (benchmarks/model.py), which took 32 and 8 GPUs, and beside
the accuracy, as a time without it says nothing. The second table has the steps per second of the smallest model with
and without --compile.
"""

import json
import tempfile
from pathlib import Path

import runs
import torch
from model import EPOCHS, PUBLISHED
from tqdm import tqdm

from common import failures

AMP = "torchrun --standalone --nproc-per-node=1"
FULL = {"mnist": f"{AMP} {runs.ROOT}/mnist/ddp_amp.py -b 512 --lr 0.1",
        "cifar10": f"{AMP} {runs.ROOT}/cifar10/ddp_amp.py -b 512 --lr 0.4 --warmup-epochs 5"}
TINY = f"{AMP} {runs.ROOT}/imagenet/ddp_amp.py --arch convnet --image-size 32 --synthetic 65536 -b 256 --epochs 3"


def results_of(line):
    """Run a command line, and return its results.json."""
    with tempfile.TemporaryDirectory() as folder:
        runs.finish(runs.start(f"{line} --log-dir {folder}/0", threads=1))
        return json.loads(Path(folder, "0", "results.json").read_text())


def parse_args():
    parser = runs.parser(__doc__, repeats=3)
    parser.set_defaults(device="auto")
    parser.add_argument("--data-dir", default="data", metavar="DIR", help="where MNIST and CIFAR-10 are")
    parser.add_argument("--epochs", type=int, default=EPOCHS, metavar="N", help="fewer try the script out")
    parser.add_argument("--synthetic", action="store_true", help="generated images, to try the script out")
    return parser.parse_args()


def main():
    arguments = parse_args()
    if arguments.device == "auto" and not torch.cuda.is_available():
        failures.fail("torch sees no GPU: run it on a machine that has one (--device cpu --epochs 1 --synthetic "
                      "--repeats 1 tries the script out)")
    options = f" --device {arguments.device}"
    data = " --synthetic 2048 --model convnet" if arguments.synthetic else f" --data-dir {arguments.data_dir}"
    tiny = TINY.replace("65536", "2048") if arguments.synthetic else TINY
    full = {name: line + options + data + f" --epochs {arguments.epochs}" for name, line in FULL.items()}
    variants = {"without": tiny + options, "--compile": tiny + options + " --compile"}
    measured = {name: [] for name in [*full, *variants]}
    todo = [*full.items(), *([*variants.items()] * arguments.repeats)]
    for name, line in tqdm(todo, unit="run", desc="gpu"):
        measured[name].append(results_of(line))
    lines = ["# One GPU", "", runs.heading(runs.about(arguments)), "", runs.table(
        ["data set", "epochs", "s", "validation accuracy", "best published (s)", "on GPUs"],
        [[name, arguments.epochs, f"{sum(epoch['seconds'] for epoch in measured[name][0]['epochs']):.1f}",
          f"{measured[name][0]['epochs'][-1]['val']['accuracy']:.2%}",
          *reversed(list(PUBLISHED[name].items())[-1])] for name in full]), "", runs.table(
        ["the smallest model", "steps/s"],
        [[name, runs.marked([max(epoch["images_per_sec"] for epoch in result["epochs"]) / 256
                             for result in measured[name]])] for name in variants]), "", runs.MARK]
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "gpu.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
