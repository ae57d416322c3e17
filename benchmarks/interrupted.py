"""What a SIGKILL and a SIGTERM within an epoch cost: our recipe beside Lightning's Trainer and
Hugging Face accelerate.

    python -m venv peers/venv
    peers/venv/bin/pip install torch torchvision lightning accelerate
    python benchmarks/interrupted.py --peers peers --data-dir data

Each trains our ConvNet on MNIST in one process, and saves a checkpoint every --checkpoint-every
steps in the way that its documentation says. About the middle of the last epoch, half-way between
two checkpoints, it gets the signal, and it is started again in the documented way. All print each
step, so the steps that it repeats are those between the last step before the signal and the first
step afterwards. Its weights at the end are compared with those of a run without a signal, bit for
bit. That comparison says something only where two such runs agree, so there are two.

Beside the defaults there are options that help: Lightning's save_on_exception, and accelerate's
use_seedable_sampler with set_epoch.
"""

import dataclasses
import re
import signal
import subprocess
import tempfile
from pathlib import Path

import runs
import torch
from peers import ACCELERATE, LIGHTNING, versions_of_venv
from tqdm import tqdm

from common import flags
from common.errors import InputError, RunError

SIGNALS = (signal.SIGKILL, signal.SIGTERM)


@dataclasses.dataclass
class Trainer:
    """What trains: its command, the words that let it go on, and where its weights are."""

    command: str
    resume: str
    weights: str


COMMON = "--data-dir {data} --epochs {epochs} --checkpoint-every {every}"
TRAINERS = {
    "our mnist/single.py": Trainer(
        f"python {runs.ROOT}/mnist/single.py {COMMON} --device cpu --log-dir log --log-interval 1 "
        "--log-seconds 0",
        "--resume auto",
        "log/last.pt",
    ),
    # It always asks for the last checkpoint, if there is one.
    "Lightning": Trainer(f"{{venv}}/python {LIGHTNING} {COMMON} --print-steps", "", "weights.pt"),
    "Lightning, save_on_exception": Trainer(
        f"{{venv}}/python {LIGHTNING} {COMMON} --print-steps --save-on-exception", "", "weights.pt"
    ),
    "accelerate": Trainer(
        f"{{venv}}/python {ACCELERATE} {COMMON} --print-steps", "--resume", "weights.pt"
    ),
    "accelerate, use_seedable_sampler and set_epoch": Trainer(
        f"{{venv}}/python {ACCELERATE} {COMMON} --print-steps --seedable-sampler",
        "--resume",
        "weights.pt",
    ),
}


def run(command, folder, environment, signal_at=None, number=None):
    """Run a command in `folder`; with `signal_at`, send it signal `number` after that step.

    Returns the steps that it printed, and its exit status.
    """
    process = subprocess.Popen(
        command.split(),
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    steps = []
    lines = []
    for line in process.stdout:
        lines.append(line)
        if found := re.search(r"\bstep (\d+)", line):
            steps.append(int(found[1]))
            if steps[-1] == signal_at:
                process.send_signal(number)
    status = process.wait()
    if status and number is None:
        raise RunError(f"{command} ended with {status}: {''.join(lines[-3:])}")
    return steps, status


def weights_of(trainer, folder):
    """The tensors of the model at the end of a run."""
    saved = torch.load(folder / trainer.weights, map_location="cpu", weights_only=True)
    return saved.get("model", saved)


def same(some, others):
    """Whether two models have the same weights, bit for bit."""
    return some.keys() == others.keys() and all(
        torch.equal(tensor, others[name]) for name, tensor in some.items()
    )


def undisturbed(trainer, command, work, environment):
    """A run without a signal: its weights, and the number of its steps."""
    folder = Path(tempfile.mkdtemp(dir=work))
    steps, _ = run(command, folder, environment)
    return weights_of(trainer, folder), steps[-1]


def interrupted(trainer, command, work, environment, number, at):
    """A run that gets a signal after step `at` and goes on: its weights, and what it did."""
    folder = Path(tempfile.mkdtemp(dir=work))
    before, status = run(command, folder, environment, at, number)
    after, _ = run(f"{command} {trainer.resume}", folder, environment)
    figures = {
        "status": status,
        "last_before": before[-1],
        "first_after": after[0],
        "last_after": after[-1],
        "repeated": before[-1] + 1 - after[0],
    }
    return weights_of(trainer, folder), figures


def measure(arguments, name, work):
    """What each signal costs a trainer."""
    trainer = TRAINERS[name]
    command = trainer.command.format(
        data=arguments.data_dir,
        epochs=arguments.epochs,
        every=arguments.checkpoint_every,
        venv=arguments.peers / "venv" / "bin",
    )
    environment = runs.environment(arguments.threads) | {
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    expected, steps = undisturbed(trainer, command, work, environment)
    again, _ = undisturbed(trainer, command, work, environment)
    steps_per_epoch = steps // arguments.epochs
    epoch_began = steps - steps_per_epoch
    result = {"steps": steps, "repeatable": same(expected, again), "signals": {}}
    # Half-way between two checkpoints, where a signal costs as much as it does on average.
    middle = epoch_began + steps_per_epoch // 2
    every = arguments.checkpoint_every
    at = middle // every * every + every // 2
    for number in SIGNALS:
        weights, figures = interrupted(trainer, command, work, environment, number, at)
        figures["within_epoch"] = epoch_began + 1 < figures["first_after"] <= steps
        figures["same_weights"] = same(expected, weights)
        result["signals"][number.name] = figures
    return result


def answer(is_so):
    return "yes" if is_so else "no"


def markdown(result):
    """The page interrupted.md."""
    rows = []
    for name, measured in result["trainers"].items():
        for number, figures in measured["signals"].items():
            rows.append(
                [
                    name,
                    number,
                    figures["status"],
                    figures["last_before"],
                    figures["repeated"],
                    answer(figures["within_epoch"]),
                    f"{figures['last_after']} of {measured['steps']}",
                    answer(figures["same_weights"]),
                    answer(measured["repeatable"]),
                ]
            )
    columns = [
        "training with",
        "signal",
        "exit status",
        "after step",
        "steps repeated",
        "goes on within the epoch",
        "ends at step",
        "weights of an undisturbed run",
        "two undisturbed runs agree",
    ]
    installed = ", ".join(f"{name} {version}" for name, version in result["venv"].items())
    return "\n".join(
        [
            "# What a signal within an epoch costs",
            "",
            runs.heading(result),
            "",
            runs.table(columns, rows, left=2),
            "",
            f"Epochs: {result['epochs']}, and the signal comes about the middle of the last. A "
            f"checkpoint every {result['checkpoint_every']} steps. Exit status: of the process "
            "that got the signal; -N if signal N ended it. See `python benchmarks/interrupted.py "
            f"--help`. In the others' environment: {installed}.",
        ]
    )


def parse_args():
    parser = flags.Parser(__doc__)
    add = parser.add_argument
    add("--peers", type=Path, required=True, metavar="DIR", help="with venv")
    add("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="with MNIST")
    add("--epochs", type=flags.positive_int, default=2, metavar="N", help="of each run")
    add("--checkpoint-every", type=flags.positive_int, default=100, metavar="STEPS")
    add("--threads", type=flags.positive_int, default=1, metavar="N", help="threads per process")
    add("--out", type=Path, default=runs.RESULTS, metavar="DIR", help="folder for the results")
    arguments = parser.parse_args()
    arguments.peers = arguments.peers.resolve()
    arguments.data_dir = arguments.data_dir.resolve()
    python = arguments.peers / "venv" / "bin" / "python"
    if not python.exists():
        raise InputError(f"{python} is missing (see --help)")
    return arguments


def main():
    arguments = parse_args()
    with tempfile.TemporaryDirectory() as work:
        result = runs.about(arguments) | {
            "epochs": arguments.epochs,
            "checkpoint_every": arguments.checkpoint_every,
            "venv": versions_of_venv(arguments.peers),
            "trainers": {name: measure(arguments, name, work) for name in tqdm(TRAINERS)},
        }
    runs.save(arguments, "interrupted", result, markdown(result))


if __name__ == "__main__":
    with runs.plain_exits():
        main()
