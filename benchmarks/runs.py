"""What the benchmarks share: how processes start, and how figures become files and pages.

    python benchmarks/runs.py

This rewrites the pages of benchmarks/results from their figures. The figures of a benchmark are in
NAME.jsonl: a line that says how, on what and when something was measured (it has "hardware"), and
then a line for each run. The page prints the "note" in the first line.
"""

import contextlib
import importlib
import io
import json
import os
import shlex
import shutil
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(1, str(ROOT))
import torch

from common import flags
from common.errors import InputError, RunError
from scripts import machine
from scripts.commands import Command

# Tables mark figures with a larger spread: (largest - smallest) / median.
WIDE = 0.1
MARK = f"(!N%): the repetitions differ by N% of their median (shown if above {WIDE:.0%})."
# Each module has a function `page` that takes what `read` returns.
PAGES = ("accuracy", "allreduce", "memory", "model", "peers", "scaling")
# What starts the processes of a strategy, and its name in tables.
LAUNCHERS = {
    "ddp_launch": "torchrun --standalone --nproc-per-node={}",
    "hvd_gloo": "horovodrun --gloo -np {} python",
    "hvd_mpi": "mpirun --oversubscribe --bind-to none -np {} python",
    "hvd_nccl": "horovodrun -np {} python",
}
TITLES = {
    "single": "one process",
    "independent": "independent processes",
    "ddp_launch": "DDP",
    "hvd_gloo": "Horovod, Gloo",
    "hvd_mpi": "Horovod, MPI",
    "hvd_nccl": "Horovod, NCCL",
}


def launchers() -> list[str]:
    """The strategies of several processes that this machine can run."""
    found = ["ddp_launch"]
    # Horovod prints what it lacks.
    with contextlib.suppress(ImportError), contextlib.redirect_stdout(io.StringIO()):
        import horovod.torch as hvd

        if hvd.gloo_built():
            found.append("hvd_gloo")
        if hvd.mpi_built() and shutil.which("mpirun"):
            found.append("hvd_mpi")
        if hvd.nccl_built() and torch.cuda.is_available():
            found.append("hvd_nccl")
    return found


def process_counts() -> list[int]:
    """The numbers of processes to measure: up to the GPUs, or on CPUs up to four."""
    gpus = torch.cuda.device_count()
    return [n for n in (1, 2, 4, 8) if n <= (gpus if gpus > 1 else 4)]


def start_of(strategy: str, processes: int, folder: Path) -> str:
    """The start of the command line of a strategy's recipe in `folder`."""
    if strategy in ("single", "independent"):
        return f"python {folder}/single.py"
    recipe = "ddp_launch.py" if strategy == "ddp_launch" else "hvd.py"
    return f"{LAUNCHERS[strategy].format(processes)} {folder}/{recipe}"


def finish(command: Command) -> None:
    """Wait for a command; if it fails, raise RunError with its last line."""
    command.finish()
    if command.status:
        said = command.last_words()[:300]
        raise RunError(f"{command.line} ended with status {command.status} ({said})")


def run(line: str, threads: int | None = None) -> Command:
    """Run a command to its end."""
    with Command(line, threads) as command:
        finish(command)
    return command


def about(threads) -> dict:
    """The command, hardware, versions, date and commit of a benchmark."""
    line = shlex.join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]])
    return machine.about(line, threads)


def read(path: Path) -> list[dict]:
    """The contents of a NAME.jsonl: a dict for each line with "hardware", with its "runs"."""
    if not path.exists():
        raise InputError(f"{path}: there is no such file; run make benchmarks")
    found = []
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if "hardware" in entry:
            found.append(entry | {"runs": []})
        else:
            found[-1]["runs"].append(entry)
    return found


def write(out: Path, name: str, measured: list[dict], page: str) -> None:
    """Write NAME.jsonl and NAME.md to the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    lines = []
    for one in measured:
        first = {key: value for key, value in one.items() if key != "runs"}
        lines += [json.dumps(entry) + "\n" for entry in (first, *one["runs"])]
    (out / f"{name}.jsonl").write_text("".join(lines))
    (out / f"{name}.md").write_text(page)


def document(title: str, explained: str, *parts: str) -> str:
    """A page of these parts."""
    return "\n\n".join([f"# {title}", explained, *parts]) + "\n"


def origin(measured: dict) -> str:
    """How, on what and when something was measured, in words, with its note."""
    return f"{machine.in_words(measured)} {measured.get('note', '')}".rstrip()


def table(names: list[str], rows: list, left: int = 1) -> str:
    """A Markdown table; the first `left` columns are aligned left, the others right."""
    lines = [names, [*(["---"] * left), *(["---:"] * (len(names) - left))], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def marked(values: list[float], form: str = "{:,.0f}") -> str:
    """The median of `values` for a table's cell, with a mark if their spread is wide."""
    median = statistics.median(values)
    spread = (max(values) - min(values)) / median
    return form.format(median) + (f" (!{spread:.0%})" if spread > WIDE else "")


def add_out(parser: flags.Parser) -> None:
    """The flag for the folder of the results."""
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="results folder")


def add_device(parser: flags.Parser) -> None:
    """The flag for the device of the recipes."""
    parser.add_argument(
        "--device",
        choices=("auto", "cpu"),
        default="auto" if torch.cuda.device_count() > 1 else "cpu",
        help="auto: one GPU per process, if there are several",
    )


def add_repeats(parser: flags.Parser, default: int) -> None:
    """The flags for repetitions and for the threads of each process."""
    add = parser.add_argument
    add("--repeats", type=flags.positive_int, default=default, metavar="N", help="repetitions")
    add("--threads", type=flags.positive_int, default=1, metavar="N", help="threads per process")


def page_of(out: Path, name: str) -> str:
    """A page, from the figures in the folder `out`."""
    module = importlib.import_module(name)
    # The model has no figures of its own.
    names = ("allreduce", "scaling") if name == "model" else (name,)
    return module.page(*(read(out / f"{each}.jsonl") for each in names))


if __name__ == "__main__":
    for each in PAGES:
        (RESULTS / f"{each}.md").write_text(page_of(RESULTS, each))
