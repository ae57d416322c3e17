"""Start recipes as a user does, and read their results: shared by the benchmarks that compare
recipes.
"""

import contextlib
import datetime
import io
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(1, str(ROOT))
import torch

from common import flags, results
from common.errors import InputError, RunError
from scripts import machine

WIDE = 0.1  # tables mark figures with a larger spread: (largest - smallest) / median
TITLES = {
    "single": "one process",
    "independent": "independent processes",
    "ddp_spawn": "DDP, mp.spawn",
    "ddp_launch": "DDP, torchrun",
    "ddp_pinned": "DDP, pinned",
    "hvd_gloo": "Horovod, Gloo",
    "hvd_mpi": "Horovod, MPI",
    "hvd_nccl": "Horovod, NCCL",
}


def command(strategy: str, processes: int, folder: Path) -> str:
    """The command line that starts a strategy's recipe in `folder`, with that many processes."""
    return {
        "single": f"python {folder}/single.py",
        "ddp_spawn": f"python {folder}/ddp_spawn.py -g {processes}",
        "ddp_launch": f"torchrun --standalone --nproc-per-node={processes} {folder}/ddp_launch.py",
        "ddp_pinned": f"torchrun --standalone --nproc-per-node={processes} --no-python "
        f"{ROOT}/scripts/pin.sh {folder}/ddp_launch.py",
        "hvd_gloo": f"horovodrun --gloo -np {processes} python {folder}/hvd.py",
        "hvd_mpi": f"mpirun --oversubscribe --bind-to none -np {processes} python {folder}/hvd.py",
        "hvd_nccl": f"horovodrun -np {processes} python {folder}/hvd.py",
    }[strategy]


def available() -> list[str]:
    """The strategies that this machine can run."""
    there = ["single", "independent", "ddp_spawn", "ddp_launch"]
    there += ["ddp_pinned"] * (not torch.cuda.is_available())
    # Horovod prints what it lacks.
    with contextlib.suppress(ImportError), contextlib.redirect_stdout(io.StringIO()):
        import horovod.torch as hvd

        there += ["hvd_gloo"] * bool(hvd.gloo_built()) + ["hvd_mpi"] * bool(
            hvd.mpi_built() and shutil.which("mpirun")
        )
        there += ["hvd_nccl"] * bool(hvd.nccl_built() and torch.cuda.is_available())
    return there


def environment(threads: int) -> dict[str, str]:
    """The environment of what a benchmark starts: this Python, `threads` threads per process, MPI
    also as root.
    """
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


def start(line: str, threads: int, stdout=None) -> subprocess.Popen:
    """Start a command line with `threads` threads per process.

    Its output is kept, or goes to the file `stdout`.
    """
    printed = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `finish` reads it
    process = subprocess.Popen(
        line.split(),
        stdin=subprocess.DEVNULL,
        stdout=stdout or printed,
        stderr=printed,
        env=environment(threads),
    )
    process.printed = printed
    return process


def finish(process: subprocess.Popen) -> None:
    """Wait for a process that `start` returned; exit with one line if it failed."""
    try:
        status = process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.wait()
        sys.exit(130)
    if status:
        process.printed.seek(0)
        last = [line for line in process.printed.read().splitlines() if line.strip()][-1:]
        command = " ".join(process.args)
        raise RunError(f"{command} ended with status {status} ({' '.join(last)[:300]})")


def measure(setting: dict, threads: int, options: str = "") -> dict:
    """Run the recipe of a `setting` once, and return its figures.

    A setting is a dict: dataset, model, strategy, processes, batch (per process), steps (per
    epoch), epochs. The figures are images_per_sec in training (the median over all epochs but the
    first) and global_batch.
    """
    processes, dataset = setting["processes"], setting["dataset"]
    alone = setting["strategy"] == "independent"
    images = setting["batch"] * setting["steps"] * (1 if alone else processes)
    line = command("single" if alone else setting["strategy"], processes, ROOT / dataset)
    line += (
        f" --model {setting['model']} -b {setting['batch']} --synthetic {images} --epochs "
        f"{setting['epochs']}"
        f" --lr 0.001 {options}"
    )
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            start(f"{line} --log-dir {folder}/{k}", threads)
            for k in range(processes if alone else 1)
        ]
        for job in jobs:
            finish(job)
        found = [epochs_of(path) for path in sorted(Path(folder).iterdir())]
    rates = [[epoch["train"]["samples_per_sec"] for epoch in epochs] for epochs in found]
    return {
        "images_per_sec": sum(statistics.median(rate[1:] or rate) for rate in rates),
        "global_batch": setting["batch"] * (1 if alone else processes),
    }


def epochs_of(log_dir: Path) -> list[dict]:
    """[{"epoch", "train": figures, "val": figures}] of a run, from its results.jsonl."""
    path = Path(log_dir, "results.jsonl")
    epochs = []
    if not path.exists():
        return epochs
    for line in results.read(path):
        if line["event"] == "evaluation":
            figures = {"epoch": line["epoch"], "train": {}, "val": {}}
            for name, value in line.items():
                kind, _, short = name.partition("/")
                if short:
                    figures["val" if kind == "val" else "train"][short] = value
            epochs.append(figures)
    return epochs


@contextlib.contextmanager
def plain_exits():
    """Let an InputError or RunError end a benchmark with one line."""
    try:
        yield
    except (InputError, RunError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(error.status)


def marked(values: list[float], form: str = "{:,.0f}") -> str:
    """The median of `values` for a table's cell, with a mark if their spread is wide."""
    median = statistics.median(values)
    spread = (max(values) - min(values)) / median
    return form.format(median) + (f" (!{spread:.0%})" if spread > WIDE else "")


MARK = (
    "(!N%): the repetitions of this figure differ by N% of their median, which is more than "
    f"{WIDE:.0%}."
)


def about(arguments) -> dict:
    """How, on what hardware, when and at which commit of this repository a result was measured."""
    count = torch.cuda.device_count()
    gpus = f"{count} x {machine.hardware(torch.device('cuda', 0))}" if count else "no GPU"
    return {
        "command": shlex.join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
        "hardware": f"{os.cpu_count()} cores of an {machine.cpu()}, {gpus}",
        "threads": arguments.threads,
        "versions": machine.versions(),
        "commit": machine.commit(),
        "date": str(datetime.date.today()),
    }


def heading(result: dict) -> str:
    """The same, as a line for a page."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return (
        f"`{result['command']}`; {result['hardware']}, {result['threads']} thread(s) per "
        f"process; {versions}; "
        f"commit {result['commit']}, {result['date']}."
    )


def table(names: list[str], rows: list, left: int = 1) -> str:
    """A Markdown table; the first `left` columns are aligned left, the others right."""
    lines = [names, [*(["---"] * left), *(["---:"] * (len(names) - left))], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def add_device(p: flags.Parser) -> None:
    """The flag for the device of the recipes."""
    p.add_argument(
        "--device",
        choices=("auto", "cpu"),
        default="auto" if torch.cuda.device_count() > 1 else "cpu",
        help="auto: one GPU per process, if there are several",
    )


def add_threads(p: flags.Parser) -> None:
    """The flag for the threads of each process."""
    p.add_argument(
        "--threads",
        type=flags.positive_int,
        default=1,
        metavar="N",
        help="threads per process, on the CPU",
    )


def write(arguments, name: str, result: dict, markdown: str) -> None:
    """Write NAME.json and NAME.md."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    (arguments.out / f"{name}.md").write_text(markdown + "\n")


def save(arguments, name: str, result: dict, markdown: str) -> None:
    """Write NAME.json and NAME.md, and print the page."""
    write(arguments, name, result, markdown)
    print(markdown)
