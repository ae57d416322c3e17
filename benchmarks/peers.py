"""Compare recipes with what else people would take: the example scripts of PyTorch and of Horovod,
Lightning's Trainer, Hugging Face accelerate, and the training scripts of torchvision and of timm.

    git clone https://github.com/pytorch/examples peers/examples
    git clone https://github.com/horovod/horovod peers/horovod
    git clone https://github.com/pytorch/vision peers/vision
    git clone https://github.com/huggingface/pytorch-image-models peers/pytorch-image-models
    python -m venv peers/venv
    peers/venv/bin/pip install torch torchvision lightning accelerate timm
    python benchmarks/jpeg_tree.py runs/jpegs --images 192 --classes 10
    python benchmarks/peers.py --peers peers --data-dir data --tree runs/jpegs

peers/venv needs the torch of the recipes. A pair whose script or program is missing is left out.

Each script starts as its own documentation says, and the recipe as README.md says. The scripts of
Lightning and accelerate are ours, as no documentation has our model. The recipe is a copy with the
model and the optimizer of the script, and the same batch, epochs, processes and threads. It keeps
its schedule (a cosine to 0), so the accuracies can differ. The two take turns. A ratio is the
recipe's figure divided by the script's, in each turn; a table has the median. Time and memory are
those of the whole command, with its start and its evaluations; the memory is that of its largest
process. images/s are those of training in the last epoch. Lines are those of code in the script
that is started, which is what a user writes or changes: without blank lines, comments and
docstrings, and without what it imports. Each pair is written when it is measured; the same command
goes on with the next.
"""

import ast
import dataclasses
import io
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tokenize
from pathlib import Path

import runs
import torch
from tqdm import tqdm

from common import flags
from common.errors import InputError, RunError

BENCHMARKS = Path(__file__).resolve().parent
CHECKOUTS = ("examples", "horovod", "vision", "pytorch-image-models")
# A pair that an earlier run measured with all this the same is not measured again.
SAME = ("hardware", "threads", "versions", "commit", "epochs", "repeats", "commits", "venv")
PACKAGES = ("torch", "torchvision", "lightning", "accelerate", "timm")

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


@dataclasses.dataclass
class Pair:
    """A script of others, and our recipe that does the same.

    `script` is a path in --peers, or one of this folder. `theirs` and `ours` are the commands;
    `compare` fills in what is in braces. `changes` are lines of the recipe, and what the script has
    instead.
    """

    script: str | Path
    theirs: str
    recipe: str
    ours: str
    changes: dict[str, str] = dataclasses.field(default_factory=dict)

    def data(self) -> str:
        """The data set: mnist, cifar10 or imagenet."""
        return Path(self.recipe).parent.name


MNIST = "--dataset mnist --data-dir ../data --batch-size 64 --lr 0.02 --epochs {epochs}"
OUR_MNIST = "{recipe} -b 64 --lr 0.02 --scale-lr none --epochs {epochs}"
CIFAR10 = (
    "--dataset cifar10 --data-dir ../data --batch-size 128 --lr 0.02 --weight-decay 5e-4 "
    "--epochs {epochs}"
)
OUR_CIFAR10 = (
    "{recipe} --model convnet -b 128 --lr 0.02 --weight-decay 5e-4 --scale-lr none "
    "--epochs {epochs}"
)
OUR_IMAGENET = (
    "python {recipe} -a resnet18 --lr 0.1 --label-smoothing 0 -b 32 -j 1 --epochs {epochs} "
    "--data-dir ../tree"
)
TORCHRUN = "torchrun --standalone --nproc-per-node=2 "
# On two cores, one process leaves a core for a worker of its DataLoader, as Lightning advises. Two
# processes leave none.
LIGHTNING_ONE = "{venv}/python {script} --workers 1 "
LIGHTNING_TWO = "{venv}/python {script} --workers 0 --devices 2 "
ACCELERATE_ONE = "{venv}/python {script} --workers 1 "
ACCELERATE_TWO = "{venv}/" + TORCHRUN + "{script} --workers 0 {cpu} "
LIGHTNING = BENCHMARKS / "with_lightning.py"
ACCELERATE = BENCHMARKS / "with_accelerate.py"

PEERS = {
    "pytorch/examples, MNIST, one process": Pair(
        "examples/mnist/main.py",
        "python {script} --epochs {epochs}",
        "mnist/single.py",
        "python {recipe} --lr 1 -b 64 --epochs {epochs}",
        {MODEL: "Net()", OPTIMIZER: ADADELTA},
    ),
    "pytorch/examples, MNIST, one process; ours in bf16, channels-last": Pair(
        "examples/mnist/main.py",
        "python {script} --epochs {epochs}",
        "mnist/ddp_amp.py",
        "torchrun --nproc-per-node=1 {recipe} --lr 1 -b 64 --epochs {epochs} --channels-last",
        {MODEL: "Net()", OPTIMIZER: ADADELTA, MOMENTUM: ""},
    ),
    "horovod/examples, MNIST, two processes": Pair(
        "horovod/examples/pytorch/pytorch_mnist.py",
        "horovodrun -np 2 python {script} --data-dir ../data --epochs {epochs}",
        "mnist/hvd.py",
        "horovodrun -np 2 python {recipe} --lr 0.01 --momentum 0.5 -b 64 --epochs {epochs}",
        {MODEL: "Net()"},
    ),
    "horovod/examples, MNIST, two processes, with mpi_yield_when_idle, which our recipe sets": Pair(
        "horovod/examples/pytorch/pytorch_mnist.py",
        "env OMPI_MCA_mpi_yield_when_idle=1 horovodrun -np 2 python {script} --data-dir ../data "
        "--epochs {epochs}",
        "mnist/hvd.py",
        "horovodrun -np 2 python {recipe} --lr 0.01 --momentum 0.5 -b 64 --epochs {epochs}",
        {MODEL: "Net()"},
    ),
    "Lightning, MNIST, one process": Pair(
        LIGHTNING, LIGHTNING_ONE + MNIST, "mnist/single.py", "python " + OUR_MNIST
    ),
    "Lightning, MNIST, two processes": Pair(
        LIGHTNING, LIGHTNING_TWO + MNIST, "mnist/ddp_launch.py", TORCHRUN + OUR_MNIST
    ),
    "Lightning, CIFAR-10, one process": Pair(
        LIGHTNING, LIGHTNING_ONE + CIFAR10, "cifar10/single.py", "python " + OUR_CIFAR10
    ),
    "Lightning, CIFAR-10, two processes": Pair(
        LIGHTNING, LIGHTNING_TWO + CIFAR10, "cifar10/ddp_launch.py", TORCHRUN + OUR_CIFAR10
    ),
    "accelerate, MNIST, one process": Pair(
        ACCELERATE, ACCELERATE_ONE + MNIST, "mnist/single.py", "python " + OUR_MNIST
    ),
    "accelerate, MNIST, two processes": Pair(
        ACCELERATE, ACCELERATE_TWO + MNIST, "mnist/ddp_launch.py", TORCHRUN + OUR_MNIST
    ),
    "accelerate, CIFAR-10, one process": Pair(
        ACCELERATE, ACCELERATE_ONE + CIFAR10, "cifar10/single.py", "python " + OUR_CIFAR10
    ),
    "accelerate, CIFAR-10, two processes": Pair(
        ACCELERATE, ACCELERATE_TWO + CIFAR10, "cifar10/ddp_launch.py", TORCHRUN + OUR_CIFAR10
    ),
    "pytorch/examples, ImageNet's script on generated JPEGs, ResNet-18, one process": Pair(
        "examples/imagenet/main.py",
        "python {script} -a resnet18 -b 32 -j 1 -p 1 --epochs {epochs} ../tree",
        "imagenet/single.py",
        OUR_IMAGENET,
    ),
    "torchvision's reference script on generated JPEGs, ResNet-18, one process": Pair(
        "vision/references/classification/train.py",
        "{venv}/python {script} --model resnet18 --lr 0.1 -b 32 -j 1 --print-freq 1 "
        "--lr-scheduler cosineannealinglr --epochs {epochs} --device {device} --data-path ../tree",
        "imagenet/single.py",
        OUR_IMAGENET,
    ),
    "timm's train.py on generated JPEGs, ResNet-18, one process": Pair(
        "pytorch-image-models/train.py",
        # Its `sgd` has Nesterov's momentum. Crop and flip are its defaults, as they are ours.
        "{venv}/python {script} --model resnet18 --opt momentum --lr 0.1 --weight-decay 1e-4 -b 32 "
        "-j 1 --warmup-epochs 0 --smoothing 0 --color-jitter 0 --train-interpolation bilinear "
        "--log-interval 1 --num-classes {classes} --epochs {epochs} --device {device} "
        "--data-dir ../tree --output timm",
        "imagenet/single.py",
        OUR_IMAGENET,
    ),
}


def lines_of_code(path):
    """How many lines of a Python file hold code: not blank, no comment, no docstring."""
    text = Path(path).read_text()
    no_code = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in no_code:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def missing(pair, arguments):
    """What this machine lacks for a pair, or None."""
    script = arguments.peers / pair.script
    python = arguments.peers / "venv" / "bin" / "python"
    if not script.exists():
        return str(script)
    if "{venv}" in pair.theirs and not python.exists():
        return str(python)
    path = runs.environment(arguments.threads)["PATH"]
    if "horovodrun" in pair.ours and shutil.which("horovodrun", path=path) is None:
        return "horovodrun"
    if pair.data() == "imagenet" and arguments.tree is None:
        return "--tree"
    return None


def own_copy(folder, recipe, changes, script):
    """A copy of the recipe, in `folder`, with the script's model and optimizer.

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
            "\ndef parse_args():": f"from {script.stem} import Net\n\n\ndef parse_args():",
        }
    for old, new in changes.items():
        if text.count(old) != 1:
            raise RunError(f"{recipe} does not contain '{old}'")
        text = text.replace(old, new)
    copy.write_text(text)
    return copy


def measure(command, cwd, environment, images):
    """Run a command.

    Return its seconds, GiB of memory, images/s in training, and validation accuracy.
    """
    began = time.perf_counter()
    lines = []
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
    return {
        "seconds": seconds,
        "memory": used.ru_maxrss / 2**20,
        "images_per_sec": images_per_sec(lines, images),
        "accuracy": accuracy([line for _, line in lines]),
    }


def accuracy(lines):
    """The last accuracy in what a script printed, in percent."""
    text = "\n".join(lines)
    forms = (
        r"val loss \S+ acc ([\d.]+)%",  # a recipe
        r"Accuracy: (\d+/\d+) ",  # MNIST's example rounds its percentage to a whole number
        r"Accuracy: ([\d.]+)%",
        r"Acc@1 ([\d.]+) ",
        r"Acc@1: +[\d.]+ \( *([\d.]+)\)",  # timm has the batch's, and in brackets the average
    )
    found = "".join(re.findall("|".join(forms), text)[-1])
    correct, _, total = found.partition("/")
    return 100 * int(correct) / int(total) if total else float(correct)


def images_per_sec(lines, images):
    """The speed of the last epoch: a recipe prints it.

    For a script of others, the time between its lines gives it.
    """
    text = "\n".join(line for _, line in lines)
    if own := re.findall(r"([\d,]+) (?:samples|images)/s", text):
        return float(own[-1].replace(",", ""))
    steps = [
        (seconds, *map(int, found.groups()))
        for seconds, line in lines
        if (found := re.search(r"(?:Epoch|Train): \[?(\d+)\]? *\[ *(\d+)/ *(\d+)", line))
    ]
    last = [
        (seconds, done / total) for seconds, epoch, done, total in steps if epoch == steps[-1][1]
    ]
    return images * (last[-1][1] - last[0][1]) / (last[-1][0] - last[0][0])


def compare(arguments, name, work):
    """The figures of a pair: [(of the script, of the recipe)], one for each turn."""
    pair = PEERS[name]
    script = arguments.peers / pair.script
    folder = Path(tempfile.mkdtemp(dir=work))
    copy = own_copy(folder, pair.recipe, pair.changes, script)
    data = "" if pair.data() == "imagenet" else "--data-dir ../data"
    test_batch = 32 if pair.data() == "imagenet" else 1000
    ours = f"{pair.ours} {data} {FLAGS} --test-batch-size {test_batch}"
    if arguments.device == "cpu":
        ours += " --device cpu"
    images = {"mnist": 60_000, "cifar10": 50_000, "imagenet": arguments.images}[pair.data()]
    fill_in = {
        "script": script,
        "recipe": copy,
        "venv": arguments.peers / "venv" / "bin",
        "epochs": arguments.epochs,
        "classes": arguments.classes,
        "cpu": "--cpu" if arguments.device == "cpu" else "",
        "device": "cuda" if arguments.device == "auto" and torch.cuda.is_available() else "cpu",
    }
    environment = runs.environment(arguments.threads) | {"PYTHONUNBUFFERED": "1"}
    if arguments.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if pair.changes:
        # The copy imports the model from the script.
        environment["PYTHONPATH"] = str(script.parent)
    turns = []
    for _ in tqdm(range(arguments.repeats), unit="turn", desc=name):
        turn = [
            measure(command.format(**fill_in), folder, environment, images)
            for command in (pair.theirs, ours)
        ]
        turns.append(turn)
        shutil.rmtree(folder / "log")  # the next turn would refuse to write over it
    return turns


def versions_of_venv(peers):
    """The versions of what peers/venv has."""
    python = peers / "venv" / "bin" / "python"
    if not python.exists():
        return {}
    code = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    found = {}
    for package in PACKAGES:
        done = subprocess.run([python, "-c", code, package], capture_output=True, text=True)
        if done.returncode == 0:
            found[package] = done.stdout.strip()
    return found


def figures_of(who, lines, measured, ratios):
    """A row of the table; `measured` are the figures of each turn, `ratios` are texts."""
    forms = {
        "seconds": "{:.1f}",
        "images_per_sec": "{:,.0f}",
        "memory": "{:.2f}",
        "accuracy": "{:.2f}%",
    }
    figures = [
        runs.marked([one[figure] for one in measured], form) for figure, form in forms.items()
    ]
    return [who, lines, *figures, *ratios]


def ratios_of(turns):
    """The medians of our time, images/s and memory, divided by theirs."""
    return [
        statistics.median(own[figure] / other[figure] for other, own in turns)
        for figure in ("seconds", "images_per_sec", "memory")
    ]


def markdown(result):
    """The page peers.md."""
    commits = ", ".join(f"{name} {commit}" for name, commit in result["commits"].items())
    installed = ", ".join(f"{name} {version}" for name, version in result["venv"].items())
    rows = []
    for name, turns in result["turns"].items():
        theirs, ours = zip(*turns, strict=True)
        their_lines, our_lines = result["lines"][name]
        ratios = [f"{ratio:.2f}" for ratio in ratios_of(turns)]
        rows.append(figures_of(name, their_lines, theirs, [""] * 3))
        rows.append(figures_of(f"our {PEERS[name].recipe}", our_lines, ours, ratios))
    columns = [
        "script",
        "lines",
        "seconds",
        "images/s",
        "GiB",
        "accuracy",
        "ratio of time",
        "of images/s",
        "of memory",
    ]
    return "\n".join(
        [
            "# Beside what else people would take",
            "",
            runs.heading(result),
            "",
            runs.table(columns, rows),
            "",
            f"Epochs: {result['epochs']}. Turns: {result['repeats']}. See `python "
            "benchmarks/peers.py --help`. "
            f"Commits: {commits}. In their environment: {installed}. {runs.MARK}",
        ]
    )


def parse_args():
    parser = flags.Parser(__doc__)
    parser.add_argument("--repeats", type=flags.positive_int, default=5, metavar="N", help="turns")
    runs.add_threads(parser)
    parser.add_argument(
        "--out", type=Path, default=runs.RESULTS, metavar="DIR", help="folder for the results"
    )
    parser.add_argument(
        "--peers", type=Path, required=True, metavar="DIR", help="with the checkouts, and venv"
    )
    parser.add_argument(
        "--data-dir", type=Path, default=Path("data"), metavar="DIR", help="with the data sets"
    )
    parser.add_argument(
        "--tree", type=Path, metavar="DIR", help="of JPEG files: also compare ImageNet"
    )
    parser.add_argument(
        "--epochs", type=flags.positive_int, default=1, metavar="N", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="pairs with one of these words"
    )
    runs.add_device(parser)
    arguments = parser.parse_args()
    for name in ("peers", "data_dir"):
        setattr(arguments, name, getattr(arguments, name).resolve())
    return arguments


def chosen(arguments):
    """The names of the pairs to measure. Says which of them are left out, and why."""
    names = []
    for name, pair in PEERS.items():
        if not any(word.lower() in name.lower() for word in arguments.only):
            continue
        if lacking := missing(pair, arguments):
            print(f"without {lacking}, this is left out: {name}", file=sys.stderr)
        else:
            names.append(name)
    if not names:
        raise InputError(f"nothing to compare with in {arguments.peers} (see --help)")
    return names


def known(path, settings):
    """{name: turns} of an earlier run with the same settings that wrote `path`, or nothing."""
    if not path.exists():
        return {}
    earlier = json.loads(path.read_text())
    return earlier["turns"] if all(earlier.get(key) == settings[key] for key in SAME) else {}


def main():
    arguments = parse_args()
    names = chosen(arguments)
    arguments.images = arguments.classes = 0
    checkouts = [name for name in CHECKOUTS if (arguments.peers / name).exists()]
    result = runs.about(arguments) | {
        "epochs": arguments.epochs,
        "repeats": arguments.repeats,
        "commits": {name: runs.machine.commit(arguments.peers / name) for name in checkouts},
        "venv": versions_of_venv(arguments.peers),
        "lines": {
            name: [
                lines_of_code(arguments.peers / pair.script),
                lines_of_code(runs.ROOT / pair.recipe),
            ]
            for name, pair in PEERS.items()
            if (arguments.peers / pair.script).exists()
        },
    }
    result["turns"] = known(arguments.out / "peers.json", result)
    with tempfile.TemporaryDirectory() as work:
        Path(work, "data").symlink_to(arguments.data_dir)
        if arguments.tree:
            Path(work, "tree").symlink_to(arguments.tree.resolve())
            arguments.images = len(list(arguments.tree.glob("train/*/*")))
            arguments.classes = len(list(arguments.tree.glob("train/*")))
        for name in names:
            if name not in result["turns"]:
                result["turns"][name] = compare(arguments, name, work)
                runs.write(arguments, "peers", result, markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    with runs.plain_exits():
        main()
