"""Measure the time per step that a recipe adds to its model.

    python benchmarks/host_time.py

It goes into data, metrics, schedule, position and log. On a GPU this is time in which Python starts
no kernel. The fit() of mnist/single.py with LeNet and a batch of 8 is compared with a bare loop
over one batch, in turns, on one thread of the CPU: with a larger batch the noise of the model's own
time is larger than what is measured.
"""

import contextlib
import importlib.util
import io
import statistics
import sys
import tempfile
import time
from unittest import mock

import runs
import torch
import torch.nn.functional as F

from common import flags

sys.path.insert(1, str(runs.ROOT / "mnist"))


def bare_loop(model, optimizer, images, labels, steps):
    """Take `steps` steps on one batch; return the seconds per step."""
    began = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return (time.perf_counter() - began) / steps


def main():
    parser = flags.Parser(__doc__)
    parser.add_argument("--repeats", type=flags.positive_int, default=100, help="turns")
    parser.add_argument("--epoch", type=flags.positive_int, default=200, metavar="STEPS")
    parser.add_argument("-b", "--batch-size", type=flags.positive_int, default=8, help="images")
    mine = parser.parse_args()
    batch = mine.batch_size
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("single", runs.ROOT / "mnist" / "single.py")
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    command = f"single.py --synthetic {batch * mine.epoch} -b {batch} --model lenet --epochs 1"
    with mock.patch.object(sys, "argv", command.split()):
        args = recipe.parse_args()
    device = torch.device("cpu")
    train, val = recipe.load_data(args, device)
    train.loader = runs.Timed(train.loader)
    model = recipe.digits.build("lenet").train()
    images, labels = next(iter(train.loader.loader))
    images = recipe.digits.normalise(images)
    differences = []
    times = []
    for _ in range(mine.repeats):
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, 0.9, fused=True)
        bare = bare_loop(model, optimizer, images, labels, mine.epoch)
        with (
            tempfile.TemporaryDirectory() as args.log_dir,
            contextlib.redirect_stdout(io.StringIO()),
        ):
            recipe.fit(args, device, train, val, model, optimizer, 1e-3, [])
        times.append(train.loader.seconds / mine.epoch)
        differences.append(times[-1] - bare)
    low, median, high = (quartile * 1e6 for quartile in statistics.quantiles(differences, n=4))
    print(
        f"a step of the recipe takes {statistics.median(times) * 1e6:.0f} us, {median:.0f} us more "
        f"than a bare loop (half of {mine.repeats} turns of {mine.epoch} steps: "
        f"{low:.0f} to {high:.0f})"
    )


if __name__ == "__main__":
    with runs.plain_exits():
        main()
