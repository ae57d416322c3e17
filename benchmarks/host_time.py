"""Measure the time per step that a recipe adds to its model: data, metrics, schedule, position and the stop flag.

    python benchmarks/host_time.py

On a GPU this is time in which Python starts no kernel. mnist/single.py's train_one_epoch with LeNet and a batch of 8 is
compared with a bare loop over one batch, in turns, on one thread of the CPU.
"""

import importlib.util
import statistics
import sys
import time
from unittest import mock

import runs
import torch
import torch.nn.functional as F

from common import flags, models
from common.data import DataObject, EpochSampler
from common.datasets import mnist
from common.run import Run

BATCH = 8


def bare_loop(model, optimizer, images, labels, steps):
    """Take `steps` steps on one batch; return the seconds per step."""
    began = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return (time.perf_counter() - began) / steps


def main():
    parser = runs.flags.Parser(__doc__)
    parser.add_argument("--repeats", type=flags.COUNT, default=100, metavar="N", help="turns (default: %(default)s)")
    parser.add_argument("--epoch", type=flags.COUNT, default=200, metavar="STEPS", help="(default: %(default)s)")
    mine = parser.parse_args()
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("single", runs.ROOT / "mnist" / "single.py")
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    with mock.patch.object(sys, "argv", ["", "--synthetic", str(BATCH * mine.epoch), "--model", "lenet", "--dry-run",
                                         "--device", "cpu", "--epochs", "1000"]):
        args = recipe.parse_args()
    device = flags.pick_device(args)
    train = DataObject(mnist(args)[0], EpochSampler(BATCH * mine.epoch, BATCH, 0), BATCH, device)
    model = flags.to_device(models.LeNet(1, 28), args, device).train()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, 0.9, fused=True)
    args.batch_size = BATCH
    run = Run(args, "one device", device, {"model": model, "optimizer": optimizer}, 1e-3)
    args.dry_run = False  # it would stop after a step
    images, labels = next(iter(train))
    differences, times = [], []
    for epoch in range(mine.repeats):
        train.sampler.set_epoch(epoch)
        bare = bare_loop(model, optimizer, images, labels, mine.epoch)
        began = time.perf_counter()
        recipe.train_one_epoch(model, train, optimizer, 1e-3, run)
        times.append((time.perf_counter() - began) / mine.epoch)
        differences.append(times[-1] - bare)
    low, median, high = (quartile * 1e6 for quartile in statistics.quantiles(differences, n=4))
    print(f"a step of the recipe takes {statistics.median(times) * 1e6:.0f} us, {median:.0f} us more than a bare loop "
          f"(half of {mine.repeats} turns of {mine.epoch} steps: {low:.0f} to {high:.0f})")


if __name__ == "__main__":
    main()
