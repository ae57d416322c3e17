"""Compare recipes with what people use otherwise: the example scripts of PyTorch and of Horovod,
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
those of the whole command, including start-up and evaluations; the memory is that of its largest
process. images/s are those of training in the last epoch. Lines count the code of the started
script, which is what a user writes or changes: without blank lines, comments, docstrings and
imported files. Each pair is written when it is measured; the same command continues with the next
one.
"""

import ast
import dataclasses
import io
import re
import shutil
import statistics
import sys
import tempfile
import tokenize
from pathlib import Path

import runs
import torch
from tqdm import tqdm

from common import flags
from common.errors import InputError, RunError
from scripts.commands import Command, plain_exits

BENCHMARKS = Path(__file__).resolve().parent
CHECKOUTS = ("examples", "horovod", "vision", "pytorch-image-models")
# A pair is not measured again if an earlier run had the same values of these.
SAME = ("hardware", "threads", "versions", "commit", "epochs", "repeats", "commits", "venv")
PACKAGES = ("torch", "torchvision", "lightning", "accelerate", "timm")
# What is measured of a command, and its form in the table.
FIGURES = {
    "seconds": "{:.1f}",
    "images_per_sec": "{:,.0f}",
    "memory": "{:.2f}",
    "accuracy": "{:.2f}%",
}

MODEL = "digits.build(args.model)"
OPTIMIZER = """torch.optim.SGD(
        model.parameters(), lr, args.momentum, weight_decay=args.weight_decay, fused=True
    )"""
ADADELTA = "torch.optim.Adadelta(model.parameters(), lr)"
FLAGS = "--warmup-epochs 0 --log-dir log"


@dataclasses.dataclass
class Pair:
    """Someone else's script, and our recipe that does the same.

    `script` is a path in --peers, or one of this folder. `theirs` and `ours` are the commands;
    `compare` fills in what is in braces. `changes` maps lines of the recipe to the script's.
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
        # Its `sgd` has Nesterov's momentum. Its defaults for crop and flip are ours, too.
        "{venv}/python {script} --model resnet18 --opt momentum --lr 0.1 --weight-decay 1e-4 -b 32 "
        "-j 1 --warmup-epochs 0 --smoothing 0 --color-jitter 0 --train-interpolation bilinear "
        "--log-interval 1 --num-classes {classes} --epochs {epochs} --device {device} "
        "--data-dir ../tree --output timm",
        "imagenet/single.py",
        OUR_IMAGENET,
    ),
}


def lines_of_code(path):
    """How many lines of a Python file hold code, not comments or docstrings."""
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


def missing(pair, args):
    """The first thing that this machine lacks for a pair, or None."""
    needed = [args.peers / pair.script]
    if "{venv}" in pair.theirs:
        needed.append(args.peers / "venv" / "bin" / "python")
    lacking = [str(path) for path in needed if not path.exists()]
    if "horovodrun" in pair.ours and "hvd_gloo" not in runs.launchers():
        lacking.append("horovodrun")
    if pair.data() == "imagenet" and args.tree is None:
        lacking.append("--tree")
    return lacking[0] if lacking else None


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


def measure(line, folder, threads, variables, images):
    """Run a command line in a folder, and return its FIGURES."""
    with Command(line, threads, folder, PYTHONUNBUFFERED="1", **variables) as command:
        runs.finish(command)
    return {
        "seconds": command.seconds,
        "memory": command.gib,
        "images_per_sec": images_per_sec(command.printed, images),
        "accuracy": accuracy(command.lines()),
    }


def accuracy(lines):
    """The last accuracy in what a script printed, in percent."""
    text = "\n".join(lines)
    forms = (
        r"val loss \S+ acc ([\d.]+)%",  # a recipe
        r"Accuracy: (\d+/\d+) ",  # MNIST's example rounds its percentage to a whole number
        r"Accuracy: ([\d.]+)%",
        r"Acc@1 ([\d.]+) ",
        r"Acc@1: +[\d.]+ \( *([\d.]+)\)",  # timm: the batch's, and the average in brackets
    )
    found = "".join(re.findall("|".join(forms), text)[-1])
    correct, _, total = found.partition("/")
    return 100 * int(correct) / int(total) if total else float(correct)


def images_per_sec(lines, images):
    """The speed of the last epoch: a recipe prints it.

    For other scripts, the time between their lines gives it.
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


def compare(args, name, work):
    """Measure a pair: FIGURES of the script and of the recipe, each a list with one per turn."""
    pair = PEERS[name]
    script = args.peers / pair.script
    folder = Path(tempfile.mkdtemp(dir=work))
    of_imagenet = pair.data() == "imagenet"
    ours = f"{pair.ours} {FLAGS} --test-batch-size {32 if of_imagenet else 1000}"
    if not of_imagenet:
        ours += " --data-dir ../data"
    if args.device == "cpu":
        ours += " --device cpu"
    images = {"mnist": 60_000, "cifar10": 50_000, "imagenet": args.images}[pair.data()]
    fill_in = {
        "script": script,
        "recipe": own_copy(folder, pair.recipe, pair.changes, script),
        "venv": args.peers / "venv" / "bin",
        "epochs": args.epochs,
        "classes": args.classes,
        "cpu": "--cpu" if args.device == "cpu" else "",
        "device": "cuda" if args.device == "auto" and torch.cuda.is_available() else "cpu",
    }
    # The copy imports the model from the script.
    variables = {"PYTHONPATH": str(script.parent)} if pair.changes else {}
    if args.device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    lines = [lines_of_code(script), lines_of_code(runs.ROOT / pair.recipe)]
    run = {"pair": name, "lines": lines}
    for who in ("theirs", "ours"):
        run[who] = {figure: [] for figure in FIGURES}
    for _ in tqdm(range(args.repeats), unit="turn", desc=name):
        for who, line in (("theirs", pair.theirs), ("ours", ours)):
            found = measure(line.format(**fill_in), folder, args.threads, variables, images)
            for figure in FIGURES:
                run[who][figure].append(found[figure])
        # The next turn would refuse to overwrite it.
        shutil.rmtree(folder / "log")
    return run


def versions_of_venv(peers):
    """The versions of the PACKAGES in peers/venv."""
    python = peers / "venv" / "bin" / "python"
    if not python.exists():
        return {}
    lines = runs.run(f"{python} -m pip list --format=freeze").lines()
    installed = dict(line.split("==") for line in lines if line.count("==") == 1)
    return {name: installed[name] for name in PACKAGES if name in installed}


def page(measured):
    (one,) = measured
    rows = []
    for run in one["runs"]:
        theirs = run["theirs"]
        ours = run["ours"]
        ratios = []
        for figure in ("seconds", "images_per_sec", "memory"):
            pairs = zip(ours[figure], theirs[figure], strict=True)
            ratios.append(f"{statistics.median(own / other for own, other in pairs):.2f}")
        both = [
            f"{runs.marked(theirs[figure], form)}, {runs.marked(ours[figure], form)}"
            for figure, form in FIGURES.items()
        ]
        lines = ", ".join(map(str, run["lines"]))
        rows.append([run["pair"], PEERS[run["pair"]].recipe, lines, *both, *ratios])
    columns = ["script", "our recipe", "lines", "seconds", "images/s", "GiB", "accuracy"]
    explained = (
        "In a cell with two figures the first is the script's, and the second our recipe's. A "
        f"ratio is ours divided by theirs. Epochs: {one['epochs']}. Turns: {one['repeats']}. "
        f"`python benchmarks/peers.py --help` says what is measured. {runs.MARK}"
    )
    table = runs.table([*columns, "ratio of time", "of images/s", "of memory"], rows, left=2)
    commits = ", ".join(f"{name} {commit}" for name, commit in one["commits"].items())
    installed = ", ".join(f"{name} {version}" for name, version in one["venv"].items())
    others = f"Commits: {commits}. In their environment: {installed}."
    return runs.document("Compared with other scripts", explained, table, runs.origin(one), others)


def parse_args():
    parser = flags.Parser(__doc__)
    runs.add_repeats(parser, 5)
    runs.add_device(parser)
    runs.add_out(parser)
    add = parser.add_argument
    add("--peers", type=Path, required=True, metavar="DIR", help="checkouts and venv")
    add("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="the data sets")
    add("--tree", type=Path, metavar="DIR", help="JPEG files: also compare ImageNet")
    add("--epochs", type=flags.positive_int, default=1, metavar="N")
    add("--only", nargs="+", default=[""], metavar="WORD", help="pairs with one of these words")
    args = parser.parse_args()
    args.peers, args.data_dir = args.peers.resolve(), args.data_dir.resolve()
    return args


def chosen(args):
    """The names of the pairs to measure. Prints which are left out, and why."""
    names = []
    for name, pair in PEERS.items():
        if not any(word.lower() in name.lower() for word in args.only):
            continue
        if lacking := missing(pair, args):
            print(f"left out, as {lacking} is missing: {name}", file=sys.stderr)
        else:
            names.append(name)
    if not names:
        raise InputError(f"nothing to compare with in {args.peers} (see --help)")
    return names


def known(path, settings):
    """The runs in `path`, if they were measured with the same settings, or none."""
    if not path.exists():
        return []
    (earlier,) = runs.read(path)
    same = all(earlier.get(key) == settings[key] for key in SAME)
    return earlier["runs"] if same else []


def main():
    args = parse_args()
    names = chosen(args)
    args.images = args.classes = 0
    checkouts = [name for name in CHECKOUTS if (args.peers / name).exists()]
    measured = runs.about(args.threads) | {
        "epochs": args.epochs,
        "repeats": args.repeats,
        "commits": {name: runs.machine.commit(args.peers / name) for name in checkouts},
        "venv": versions_of_venv(args.peers),
    }
    measured["runs"] = known(args.out / "peers.jsonl", measured)
    done = [run["pair"] for run in measured["runs"]]
    with tempfile.TemporaryDirectory() as work:
        Path(work, "data").symlink_to(args.data_dir)
        if args.tree:
            Path(work, "tree").symlink_to(args.tree.resolve())
            args.images = len(list(args.tree.glob("train/*/*")))
            args.classes = len(list(args.tree.glob("train/*")))
        for name in names:
            if name not in done:
                measured["runs"].append(compare(args, name, work))
                runs.write(args.out, "peers", [measured], page([measured]))
    print(page([measured]))


if __name__ == "__main__":
    with plain_exits():
        main()
