"""Time the recipes' input pipeline against the usual one, which opens, converts and normalises an image at a time.

    python benchmarks/data_path.py --data-dir data

For each data set, in turn and repeated: a pass over the training images without a model, and an epoch of training by
the recipe's own train_one_epoch, with the same model (ConvNet), batch size and threads. Prints the seconds of each run
and the median of the ratios. Needs the real images; both pipelines run on the CPU, in one process, without workers.
"""

import argparse
import functools
import importlib.util
import statistics
import sys
import time
from pathlib import Path

import torch
import torchvision
from torch.utils.data import DataLoader
from torchvision import transforms

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(1, str(ROOT))
from common import data, models, schedule
from common.run import Run


class AnyCIFAR10(torchvision.datasets.CIFAR10):
    """torchvision's, without the digests of the original archive: images that went through JPEG have others."""

    def _check_integrity(self):
        return True

    def _load_meta(self):
        pass


class Usual(DataLoader):
    """With what Run.batches asks of a DataObject in training."""

    epoch = 0

    def from_batch(self, number):
        return iter(self)


def usual(dataset, args):
    """The pipeline of a tutorial: torchvision's dataset, its transforms image by image, a DataLoader."""
    if dataset == "mnist":
        convert = [transforms.ToTensor(), transforms.Normalize(*data.MNIST_MEAN_STD)]
        images = torchvision.datasets.MNIST(args.data_dir, transform=transforms.Compose(convert))
    else:
        convert = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(),
                   transforms.ToTensor(), transforms.Normalize(*data.CIFAR10_MEAN_STD)]
        images = AnyCIFAR10(args.data_dir, transform=transforms.Compose(convert))
    return Usual(images, args.batch_size, shuffle=True, drop_last=True)


def seconds_of_a_pass(batches):
    start = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - start


def seconds_of_an_epoch(recipe, args, batches):
    model = models.build(args, *((1, 28) if args.dataset == "mnist" else (3, 32)))
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum)
    scheduler = schedule.warmup_cosine(optimizer, args, len(batches))
    run = Run(args, "benchmark", "python", torch.device("cpu"))
    return recipe.train_one_epoch(model, batches, optimizer, scheduler, run)["seconds"]


def recipe_of(dataset, data_dir):
    """The module of a data set's single.py, and its default arguments with the model that a CPU finishes."""
    spec = importlib.util.spec_from_file_location(dataset, ROOT / dataset / "single.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.argv = [sys.argv[0], "--model", "convnet", "--lr", "0.02", "--data-dir", data_dir]
    return module, module.parse_args()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default="data", help="where the real images are")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each pipeline (default: 3)")
    given = parser.parse_args()
    print(f"torch {torch.__version__}, torchvision {torchvision.__version__}, {torch.get_num_threads()} threads")
    for dataset in ("mnist", "cifar10"):
        recipe, args = recipe_of(dataset, given.data_dir)
        ours, _ = getattr(data, dataset)(args, torch.device("cpu"))
        theirs = usual(dataset, args)
        for what, measure in (("pass over the data", seconds_of_a_pass),
                              ("epoch of training", functools.partial(seconds_of_an_epoch, recipe, args))):
            pairs = [(measure(theirs), measure(ours)) for _ in range(given.repeats)]
            runs = ", ".join(f"{usual_seconds:.2f}/{our_seconds:.3f}" for usual_seconds, our_seconds in pairs)
            ratio = statistics.median(usual_seconds / our_seconds for usual_seconds, our_seconds in pairs)
            print(f"{dataset}, batch {args.batch_size}, {what}: {ratio:.2f} times as fast (usual/this, s: {runs})",
                  flush=True)


if __name__ == "__main__":
    main()
