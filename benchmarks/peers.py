"""Compare recipes with the example scripts of PyTorch and of Horovod: time, images/s, memory,
accuracy.

    git clone https://github.com/pytorch/examples peers/examples
    git clone https://github.com/horovod/horovod peers/horovod
    python benchmarks/peers.py --peers peers --data-dir data

Each example starts as its own documentation says, and the recipe as README.md says. The recipe is a
copy with the model and the optimizer of the example, and the same batch, epochs, processes and
threads. It keeps its schedule (a cosine to 0), so the accuracies can differ. The two take turns. A
ratio is the recipe's figure divided by the example's, in each turn; a table has the median. Time
and memory are those of the whole command, with its start and its evaluations; the memory is that of
its largest process. images/s are those of training in the last epoch.
"""

import os
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import runs
from tqdm import tqdm

from common import flags
from common.errors import RunError

MODEL = "digits.build(args.model)"
OPTIMIZER = """torch.optim.SGD(
        model.parameters(), lr, args.momentum, weight_decay=args.weight_decay, fused=True
    )"""
ADADELTA = "torch.optim.Adadelta(model.parameters(), lr)"
MOMENTUM = """\
    for group in optimizer.param_groups:
        for weight in group["params"]:
            optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
"""
FLAGS = "--warmup-epochs 0 --log-dir log"
# name: (file of the example, its command, our recipe, its command, {line of the recipe: what the
# example has})
PEERS = {
    "pytorch/examples, MNIST, one process": (
        "examples/mnist/main.py",
        "python {example} --epochs {epochs}",
        "mnist/single.py",
        "python {recipe} --lr 1 -b 64 --epochs {epochs}",
        {MODEL: "Net()", OPTIMIZER: ADADELTA},
    ),
    "pytorch/examples, MNIST, one process; ours in bf16, channels-last": (
        "examples/mnist/main.py",
        "python {example} --epochs {epochs}",
        "mnist/ddp_amp.py",
        ("torchrun --nproc-per-node=1 {recipe} --lr 1 -b 64 --epochs {epochs} --channels-last"),
        {MODEL: "Net()", OPTIMIZER: ADADELTA, MOMENTUM: ""},
    ),
    "horovod/examples, MNIST, two processes": (
        "horovod/examples/pytorch/pytorch_mnist.py",
        "horovodrun -np 2 python {example} --data-dir ../data --epochs {epochs}",
        "mnist/hvd.py",
        ("horovodrun -np 2 python {recipe} --lr 0.01 --momentum 0.5 -b 64 --epochs {epochs}"),
        {MODEL: "Net()"},
    ),
    "horovod/examples, MNIST, two processes, with mpi_yield_when_idle, which our recipe sets": (
        "horovod/examples/pytorch/pytorch_mnist.py",
        "env OMPI_MCA_mpi_yield_when_idle=1 horovodrun -np 2 python {example} --data-dir ../data "
        "--epochs {epochs}",
        "mnist/hvd.py",
        ("horovodrun -np 2 python {recipe} --lr 0.01 --momentum 0.5 -b 64 --epochs {epochs}"),
        {MODEL: "Net()"},
    ),
    "pytorch/examples, ImageNet's script on generated JPEGs, ResNet-18, one process": (
        "examples/imagenet/main.py",
        ("python {example} -a resnet18 -b 32 -j 1 -p 1 --epochs {epochs} ../tree"),
        "imagenet/single.py",
        "python {recipe} -a resnet18 --lr 0.1 --label-smoothing 0 -b 32 -j 1 --epochs {epochs} "
        "--data-dir ../tree",
        {},
    ),
}


def own_copy(folder, recipe, changes, example):
    """A copy of the recipe, in `folder`, with the example's model and optimizer.

    Returns its path.
    """
    for shared in ("common", "images"):
        shutil.copytree(runs.ROOT / shared, folder / shared)
    copy = folder / recipe
    shutil.copytree(runs.ROOT / copy.parent.name, copy.parent)
    text = copy.read_text()
    if changes:
        changes = {
            **changes,
            "\ndef parse_args():": (f"from {example.stem} import Net\n\n\ndef parse_args():"),
        }
    for old, new in changes.items():
        if text.count(old) != 1:
            raise RunError(f"{recipe} does not contain '{old}'")
        text = text.replace(old, new)
    copy.write_text(text)
    return copy


def measure(command, cwd, threads, images, path):
    """Run a command.

    Return its seconds, GiB of memory, images/s in training, and validation accuracy.
    """
    began, lines = time.perf_counter(), []
    environment = runs.environment(threads) | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(path)}
    process = subprocess.Popen(
        command.split(),
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    for line in process.stdout:
        lines.append((time.perf_counter() - began, line.rstrip()))
    _, status, used = os.wait4(process.pid, 0)
    seconds, process.returncode = time.perf_counter() - began, os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RunError(
            f"{command} ended with {process.returncode}: {lines[-1][1] if lines else ''}"
        )
    text = "\n".join(line for _, line in lines)
    found = re.findall(
        r"val loss \S+ acc ([\d.]+)%|Accuracy: (\d+/\d+) |Accuracy: "
        r"([\d.]+)%|Acc@1 ([\d.]+) ",
        text,
    )[-1]
    # MNIST's example rounds its percentage to a whole number.
    correct, _, total = "".join(found).partition("/")
    accuracy = 100 * int(correct) / int(total) if total else float(correct)
    return {
        "seconds": seconds,
        "memory": used.ru_maxrss / 2**20,
        "images_per_sec": images_per_sec(lines, images),
        "accuracy": accuracy,
    }


def images_per_sec(lines, images):
    """The speed of the last epoch: a recipe prints it.

    For an example, the time between its lines gives it.
    """
    if own := [re.search(r"([\d,]+) images/s", line) for _, line in lines if " images/s" in line]:
        return float(own[-1][1].replace(",", ""))
    steps = [
        (seconds, *map(int, found.groups()))
        for seconds, line in lines
        if (found := re.search(r"Epoch: \[?(\d+)\]? ?\[ *(\d+)/ *(\d+)", line))
    ]
    last = [
        (seconds, done / total) for seconds, epoch, done, total in steps if epoch == steps[-1][1]
    ]
    return images * (last[-1][1] - last[0][1]) / (last[-1][0] - last[0][0])


def compare(arguments, name, work):
    """The figures of a pair: [(of the example, of the recipe)], one for each turn."""
    file, theirs, recipe, ours, changes = PEERS[name]
    example, folder, turns = arguments.peers / file, Path(tempfile.mkdtemp(dir=work)), []
    copy = own_copy(folder, recipe, changes, example)
    data = "" if "imagenet" in recipe else "--data-dir ../data"
    ours = f"{ours} {data} {FLAGS} --test-batch-size {32 if 'imagenet' in recipe else 1000}"
    images = 60_000 if "mnist" in recipe else arguments.images  # of an epoch
    for _ in tqdm(range(arguments.repeats), unit="turn", desc=name):
        pair = [
            measure(
                command.format(example=example, recipe=copy, epochs=arguments.epochs),
                folder,
                arguments.threads,
                images,
                example.parent,
            )
            for command in (theirs, ours)
        ]
        turns.append(pair)
        shutil.rmtree(folder / "log")  # the next turn would refuse to write over it
    return turns


def markdown(result):
    """The page peers.md."""
    commits = ", ".join(f"{name} {commit}" for name, commit in result["commits"].items())
    rows = []
    for name, turns in result["turns"].items():
        ratios = [
            statistics.median(own[figure] / other[figure] for other, own in turns)
            for figure in ("seconds", "images_per_sec", "memory")
        ]
        for who, chosen in zip(
            (name, f"our {PEERS[name][2]}"), zip(*turns, strict=True), strict=True
        ):
            figures = [
                runs.marked([one[figure] for one in chosen], form)
                for figure, form in (
                    ("seconds", "{:.1f}"),
                    ("images_per_sec", "{:,.0f}"),
                    ("memory", "{:.2f}"),
                    ("accuracy", "{:.2f}%"),
                )
            ]
            rows.append(
                [
                    who,
                    *figures,
                    *([""] * 3 if who == name else [f"{ratio:.2f}" for ratio in ratios]),
                ]
            )
    return "\n".join(
        [
            ("# Beside the examples of PyTorch and Horovod"),
            "",
            runs.heading(result),
            "",
            runs.table(
                [
                    "script",
                    "seconds",
                    "images/s",
                    "GiB",
                    "accuracy",
                    "ratio of time",
                    "of images/s",
                    "of memory",
                ],
                rows,
            ),
            "",
            f"Epochs: {result['epochs']}. Turns: {result['repeats']}. See `python "
            "benchmarks/peers.py --help`. "
            f"Commits: {commits}. {runs.MARK}",
        ]
    )


def parse_args():
    parser = flags.Parser(__doc__)
    parser.add_argument("--repeats", type=flags.positive_int, default=5, metavar="N", help="turns")
    parser.add_argument(
        "--threads",
        type=flags.positive_int,
        default=1,
        metavar="N",
        help="threads per process, on the CPU",
    )
    parser.add_argument(
        "--out", type=Path, default=runs.RESULTS, metavar="DIR", help="folder for the results"
    )
    parser.add_argument(
        "--peers", type=Path, required=True, metavar="DIR", help=("with examples and horovod")
    )
    parser.add_argument(
        "--data-dir", type=Path, default=Path("data"), metavar="DIR", help="with MNIST"
    )
    parser.add_argument(
        "--tree", type=Path, metavar="DIR", help=("of JPEG files: also compare ImageNet")
    )
    parser.add_argument(
        "--epochs", type=flags.positive_int, default=1, metavar="N", help="(default: %(default)s)"
    )
    arguments = parser.parse_args()
    for name in ("peers", "data_dir"):
        setattr(arguments, name, getattr(arguments, name).resolve())
    return arguments


def main():
    arguments = parse_args()
    names = [name for name in PEERS if arguments.tree or "ImageNet" not in name]
    with tempfile.TemporaryDirectory() as work:
        Path(work, "data").symlink_to(arguments.data_dir)
        if arguments.tree:
            Path(work, "tree").symlink_to(arguments.tree.resolve())
            arguments.images = len(list(arguments.tree.glob("train/*/*")))
        result = runs.about(arguments) | {
            "epochs": arguments.epochs,
            "repeats": arguments.repeats,
            "commits": {
                name: runs.machine.commit(arguments.peers / name)
                for name in ("examples", "horovod")
            },
            "turns": {name: compare(arguments, name, work) for name in names},
        }
    runs.save(arguments, "peers", result, markdown(result))


if __name__ == "__main__":
    with runs.plain_exits():
        main()
