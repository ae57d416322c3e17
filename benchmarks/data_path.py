"""Time the recipes' input pipeline against the usual one, which handles one image at a time.

    OMP_NUM_THREADS=1 python benchmarks/data_path.py --data-dir data

For each data set the pipelines alternate: a pass over the training images without a model, then an
epoch by the recipe's own fit(), with the same model (ConvNet), batch size and threads. Prints the
seconds of each run and the median of the ratios. Needs the real images; both pipelines run on the
CPU, in one process, without workers.
"""

import contextlib
import functools
import io
import runpy
import statistics
import sys
import tempfile
import time
from types import SimpleNamespace

import runs
import torch
import torchvision
from torch.utils.data import DataLoader
from torchvision import transforms

sys.path[1:1] = [str(runs.ROOT / "mnist"), str(runs.ROOT / "cifar10")]
import cifar
import digits
from common import flags


class AnyCIFAR10(torchvision.datasets.CIFAR10):
    """torchvision's, without checking the original's digests: JPEG-decoded images have others."""

    def _check_integrity(self):
        return True

    def _load_meta(self):
        pass


def usual(args, normalise):
    """The pipeline of a tutorial: torchvision's dataset and transforms, a DataLoader."""
    convert = [
        transforms.ToTensor(),
        transforms.Normalize(normalise.mean, normalise.std),
    ]
    if args.dataset == "mnist":
        pipeline = transforms.Compose(convert)
        images = torchvision.datasets.MNIST(args.data_dir, transform=pipeline)
    else:
        crop = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
        images = AnyCIFAR10(args.data_dir, transform=transforms.Compose([*crop, *convert]))
    return DataLoader(images, args.batch_size, shuffle=True, drop_last=True)


def seconds_of_a_pass(args, recipe, data, loader):
    """Read the loader once."""
    start = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - start


def seconds_of_an_epoch(args, recipe, data, loader):
    """Train for an epoch with the recipe's fit()."""
    train, val = data
    train.loader = runs.Timed(loader)
    device = torch.device("cpu")
    model = recipe.module.build("convnet")
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, fused=True)
    with (
        tempfile.TemporaryDirectory() as args.log_dir,
        contextlib.redirect_stdout(io.StringIO()),
    ):
        recipe.fit(args, device, train, val, model, optimizer, 0.01, [])
    return train.loader.seconds


def main():
    parser = flags.Parser(__doc__)
    parser.add_argument("--data-dir", default="data", metavar="DIR", help="with the real images")
    parser.add_argument("--repeats", type=flags.positive_int, default=3, help="runs of each")
    given = parser.parse_args()
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, torchvision {torchvision.__version__}, {threads} threads")
    for name, module in (("mnist", digits), ("cifar10", cifar)):
        script = runpy.run_path(str(runs.ROOT / name / "single.py"))
        recipe = SimpleNamespace(**script, module=module)
        flags_of_recipe = f"--model convnet --device cpu --epochs 1 --data-dir {given.data_dir}"
        sys.argv[1:] = flags_of_recipe.split()
        args = recipe.parse_args()
        data = recipe.load_data(args, torch.device("cpu"))
        ours = data[0].loader
        # Its images are normalised by the recipe's step; here in the loader, as usual.
        normalise = module.normalise
        theirs = usual(args, normalise)
        for what, measure in (
            ("pass over the data", seconds_of_a_pass),
            ("epoch of training", seconds_of_an_epoch),
        ):
            pairs = []
            for epoch in range(given.repeats):
                data[0].sampler.set_epoch(epoch)
                module.normalise = functools.partial(normalise_bytes, normalise)
                usual_seconds = measure(args, recipe, data, theirs)
                module.normalise = normalise
                pairs.append((usual_seconds, measure(args, recipe, data, ours)))
            each = ", ".join(f"{usual:.2f}/{mine:.3f}" for usual, mine in pairs)
            ratio = statistics.median(usual / mine for usual, mine in pairs)
            print(
                f"{name}, batch {args.batch_size}, {what}: {ratio:.2f} times as fast "
                f"(usual/this, s: {each})",
                flush=True,
            )


def normalise_bytes(normalise, images):
    """normalise(), unless the usual pipeline has done it."""
    return images if images.is_floating_point() else normalise(images)


if __name__ == "__main__":
    with runs.plain_exits():
        main()
