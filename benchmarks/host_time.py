"""Measure the time of each statement of a step: what a recipe adds to its model.

    python benchmarks/host_time.py

It adds data, metrics, schedule, position and log. On a GPU this is time in which Python starts no
kernel. The fit() of mnist/single.py runs with LeNet and a batch of 8, on one thread of the CPU,
and notes the time after each statement of its loop. A figure is the median over turns of the mean
over the steps of a turn; the first turn warms up.
"""

import ast
import contextlib
import inspect
import io
import statistics
import sys
import tempfile
import time
from unittest import mock

import runs
import torch

from common import flags

sys.path.insert(1, str(runs.ROOT / "mnist"))
import single as recipe

# What any loop has: these lines are the model's.
MODEL = ("optimizer.zero_grad(", "logits = ", "loss = ", "loss.backward(", "optimizer.step(")


class Clock:
    """The seconds that each statement of a loop took, by its place in the loop."""

    def __init__(self):
        self.seconds = {}

    def begin(self, batches):
        """Begin to count, at the start of the loop over `batches`."""
        self.last = time.perf_counter()
        return batches

    def __call__(self, place: int) -> None:
        now = time.perf_counter()
        self.seconds[place] = self.seconds.get(place, 0) + now - self.last
        self.last = time.perf_counter()


def timed(function, clock):
    """`function`, whose loop over the batches calls `clock` after each statement; and their texts.

    The first place is what happens between two passes of the loop: the next batch.
    """
    tree = ast.parse(inspect.getsource(function))
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For)]
    (loop,) = (node for node in loops if ast.unparse(node.iter) == "batches")
    texts = ["for batch in batches"]
    body = [ast.parse("clock(0)").body[0]]
    for place, statement in enumerate(loop.body, 1):
        texts.append(ast.unparse(statement).splitlines()[0])
        body += [statement, ast.parse(f"clock({place})").body[0]]
    loop.body = body
    loop.iter = ast.parse("clock.begin(batches)", mode="eval").body
    names = vars(recipe) | {"clock": clock}
    exec(compile(tree, recipe.__file__, "exec"), names)
    return names[function.__name__], texts


def measure(mine, folder):
    """Return the text of each statement, and its microseconds per step in each turn."""
    command = (
        f"single.py --synthetic {mine.batch_size * mine.epoch} -b {mine.batch_size} "
        "--model lenet --epochs 1"
    )
    with mock.patch.object(sys, "argv", command.split()):
        args = recipe.parse_args()
    device = torch.device("cpu")
    train, val = recipe.load_data(args, device)
    model = recipe.digits.build("lenet").train()
    turns = []
    for turn in range(mine.repeats + 1):
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, 0.9, fused=True)
        # All of them stay until the end, as this process holds them.
        args.log_dir = f"{folder}/{turn}"
        clock = Clock()
        fit, texts = timed(recipe.fit, clock)
        with contextlib.redirect_stdout(io.StringIO()):
            fit(args, device, train, val, model, optimizer, 1e-3, [])
        turns.append([clock.seconds[place] / mine.epoch * 1e6 for place in range(len(texts))])
    return texts, turns[1:]


def main():
    parser = flags.Parser(__doc__)
    parser.add_argument("--repeats", type=flags.positive_int, default=20, help="turns")
    parser.add_argument("--epoch", type=flags.positive_int, default=200, metavar="STEPS")
    parser.add_argument("-b", "--batch-size", type=flags.positive_int, default=8, help="images")
    mine = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        texts, turns = measure(mine, folder)
    rows = []
    of_model = 0
    of_recipe = 0
    for text, times in zip(texts, zip(*turns, strict=True), strict=True):
        median = statistics.median(times)
        if text.startswith(MODEL):
            of_model += median
        else:
            of_recipe += median
        rows.append([f"`{text}`", f"{median:.1f}"])
    print(runs.table(["statement", "us"], rows))
    print(f"\na step takes {of_model + of_recipe:.0f} us, {of_recipe:.0f} us beside the model")


if __name__ == "__main__":
    with runs.plain_exits():
        main()
