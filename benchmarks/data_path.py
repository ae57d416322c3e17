"""Time the recipes' input pipeline against the usual one, which opens, converts and normalises one image at a time.

    OMP_NUM_THREADS=1 python benchmarks/data_path.py --data-dir data

For each data set the pipelines alternate: a pass over the training images without a model, then an epoch by the
recipe's own train_one_epoch, with the same model (ConvNet), batch size and threads. Prints the seconds of each run and
the median of the ratios. Needs the real images; both pipelines run on the CPU, in one process, without workers.
"""

import runpy
import statistics
import sys
import time
from pathlib import Path

import torch
import torchvision
from torch.utils.data import DataLoader
from torchvision import transforms

ROOT = Path(__file__).resolve().parents[1]
sys.path[1:1] = [str(ROOT), str(ROOT / "cifar10")]  # also for what CIFAR-10's recipe imports
import cifar
from common import datasets, flags
from common.data import DataObject, EpochSampler
from common.run import Run


class AnyCIFAR10(torchvision.datasets.CIFAR10):
    """torchvision's, without checking the original's digests: images that went through JPEG have others."""

    def _check_integrity(self):
        return True

    def _load_meta(self):
        pass


class TutorialLoader(DataLoader):
    """A DataLoader with the `waited` of a DataObject."""

    waited = 0.0


def usual(args):
    """The pipeline of a tutorial: torchvision's dataset, its transforms image by image, a DataLoader."""
    if args.dataset == "mnist":
        convert = [transforms.ToTensor(), transforms.Normalize(*datasets.MNIST_MEAN_STD)]
        images = torchvision.datasets.MNIST(args.data_dir, transform=transforms.Compose(convert))
    else:
        convert = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(),
                   transforms.ToTensor(), transforms.Normalize(*cifar.MEAN_STD)]
        images = AnyCIFAR10(args.data_dir, transform=transforms.Compose(convert))
    return TutorialLoader(images, args.batch_size, shuffle=True, drop_last=True)


def seconds_of_a_pass(args, recipe, batches):
    start = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - start


def seconds_of_an_epoch(args, recipe, batches):
    model = cifar.MODELS[args.model](*((1, 28) if args.dataset == "mnist" else (3, 32)))
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum)
    run = Run(args, "benchmark", torch.device("cpu"), {"model": model, "optimizer": optimizer}, args.lr)
    run.output.writes = False  # no checkpoints
    return recipe["train_one_epoch"](model, batches, optimizer, args.lr, run)["seconds"]


def main():
    parser = flags.Parser(__doc__)
    parser.add_argument("--data-dir", default="data", metavar="DIR", help="where the real images are")
    parser.add_argument("--repeats", type=flags.COUNT, default=3, metavar="N", help="runs of each pipeline")
    given = parser.parse_args()
    print(f"torch {torch.__version__}, torchvision {torchvision.__version__}, {torch.get_num_threads()} threads")
    for name, load in (("mnist", datasets.mnist), ("cifar10", cifar.load)):
        recipe = runpy.run_path(str(ROOT / name / "single.py"))
        sys.argv[1:] = ["--model", "convnet", "--data-dir", given.data_dir, "--device", "cpu"]
        args = recipe["parse_args"]()
        train_set, _ = load(args)
        sampler = EpochSampler(len(train_set), args.batch_size, args.seed)
        ours, theirs = DataObject(train_set, sampler, args.batch_size, torch.device("cpu")), usual(args)
        for what, measure in (("pass over the data", seconds_of_a_pass), ("epoch of training", seconds_of_an_epoch)):
            pairs = []
            for epoch in range(given.repeats):
                sampler.set_epoch(epoch)
                pairs.append((measure(args, recipe, theirs), measure(args, recipe, ours)))
            runs = ", ".join(f"{usual_seconds:.2f}/{our_seconds:.3f}" for usual_seconds, our_seconds in pairs)
            ratio = statistics.median(usual_seconds / our_seconds for usual_seconds, our_seconds in pairs)
            print(f"{name}, batch {args.batch_size}, {what}: {ratio:.2f} times as fast (usual/this, s: {runs})",
                  flush=True)


if __name__ == "__main__":
    main()
