"""The output of rank 0: a progress bar or lines, results.jsonl, TensorBoard events."""

import importlib.util
import json
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
from tqdm import tqdm

from common import lease, results
from common.errors import InputError, in_one_line, show
from common.position import Position
from common.process import launch


class Progress(tqdm):
    """A progress bar; without a terminal that can show one, a line every half minute."""

    # Else a thread of tqdm shows up in the watchdog's stack traces.
    monitor_interval = 0

    def __init__(self, *args, **options):
        self.in_lines = not shows_bars()
        if self.in_lines:
            options |= {"mininterval": 30, "delay": 30}
        super().__init__(*args, leave=False, **options)

    def display(self, msg=None, pos=None):
        """Show `msg`, or the progress so far."""
        if not self.in_lines:
            super().display(msg, pos)
        elif msg is None:
            show(str(self))


def shows_bars() -> bool:
    """Whether a terminal can show a progress bar. Emacs (TERM=dumb) prints each update in a row."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def plain(figures: dict) -> dict[str, float]:
    """The figures as Python numbers: JSON cannot hold those of torch and NumPy."""
    return {
        name: value.item() if hasattr(value, "item") else value for name, value in figures.items()
    }


class Log:
    """The log of a run, in `folder` (None: it only prints).

    It writes figures as a JSON line to results.jsonl, and as scalars of the same names to
    TensorBoard, at the step of `position`. In training it logs every `interval` steps (None: any),
    but at most once every `seconds` (None: 10, or 0 with `interval`). `forms` has format strings
    for printing figures by name, such as "acc {:.2%}"; the default gives "loss 0.1". On ranks other
    than 0 it is `quiet`, and does nothing. Raises InputError for a folder name that TensorBoard
    cannot use.
    """

    def __init__(
        self,
        folder: Path | None,
        position: Position,
        seconds: float | None = None,
        interval: int | None = None,
        forms: dict[str, str] | None = None,
        quiet: bool = False,
    ):
        self.folder = folder
        try:
            str(folder).encode()
        except UnicodeEncodeError as error:
            raise InputError(f"--log-dir {folder}: TensorBoard needs a name in UTF-8") from error
        self.position = position
        self.quiet = quiet
        if seconds is None:
            seconds = 0 if interval else 10
        self.seconds = seconds
        self.interval = interval
        self.forms = forms or {}
        self.writer = None
        self.warned = False
        # Functions to call with (figures by name, step): wandb.log, mlflow.log_metrics.
        self.listeners = []

    def start(self, config: dict, lines: list[str]) -> None:
        """Print `lines`, and start results.jsonl with `config`, the flags of the run.

        A resumed run keeps the lines up to its position, and appends. Raises InputError if the
        folder cannot be written.
        """
        if self.quiet:
            return
        self.started = time.monotonic()
        if self.folder is not None:
            self._begin_results(config)
            lines = [*lines, f"results, TensorBoard events and checkpoints in {self.folder}"]
        for line in lines:
            show(line)
        if self.folder is not None:
            self._find_tensorboard()

    def _find_tensorboard(self):
        """Import TensorBoard if it is installed. It may be broken: it needs protobuf and NumPy."""
        self.writer_class = None
        if not importlib.util.find_spec("tensorboard"):
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        # Incompatible versions of these can raise any exception.
        except Exception as error:
            show(f"warning: no TensorBoard events, as it cannot be imported: {in_one_line(error)}")
            return
        self.writer_class = SummaryWriter

    def _begin_results(self, config):
        event = {
            "event": "start",
            "config": config,
            "command": sys.argv,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            results.keep_until(self.folder / "results.jsonl", self.position)
            self._append(event)
        except OSError as error:
            raise InputError(
                f"cannot write to {self.folder} ({error.strerror}): choose another --log-dir"
            ) from error

    def _append(self, content):
        position = self.position
        place = {"step": position.steps, "epoch": position.epoch, "samples": position.samples}
        line = json.dumps({**place, **content}, default=str)
        # After a full disk, the file may end with part of a line.
        start = "\n" if self.warned else ""
        lease.require(self.folder)
        with open(self.folder / "results.jsonl", "a") as file:
            file.write(f"{start}{line}\n")

    def begin(self) -> None:
        """Start a stretch of training, up to the next evaluation."""
        if self.quiet:
            return
        # tqdm's default is a semaphore, which a killed process leaks.
        tqdm.set_lock(threading.RLock())
        # Else a thread of tqdm shows up in the watchdog's stack traces.
        tqdm.monitor_interval = 0
        steps = self.position.steps
        total = steps + self.position.steps_left
        self.bar = tqdm(
            total=total, initial=steps, unit="step", leave=False, disable=not shows_bars()
        )
        self.first_step = steps
        self.began = time.perf_counter()
        self.logged = self.began

    def _seconds_and_rate(self):
        """The seconds of this stretch of training, and its samples per second."""
        seconds = time.perf_counter() - self.began
        steps = self.position.steps - self.first_step
        return seconds, steps * self.position.sampler.global_batch / seconds

    def step(self, figures: dict) -> None:
        """Show the figures of training so far; log them if it is time."""
        if self.quiet:
            return
        if not self.bar.disable:
            self.bar.set_postfix_str(self.in_words(figures), refresh=False)
            self.bar.update(self.position.steps - self.bar.n)
        now = time.perf_counter()
        at_interval = self.interval is None or self.position.multiple_of(self.interval)
        if not at_interval or now - self.logged < self.seconds:
            return
        self.logged = now
        _, rate = self._seconds_and_rate()
        if self.bar.disable:
            self._print_step(figures, rate)
        elif self.interval is not None:
            # Above the bar, as --log-interval asks for lines.
            with self.bar.external_write_mode(sys.stdout):
                self._print_step(figures, rate)
        figures = {f"train/{name}": value for name, value in plain(figures).items()}
        self.write("step", {**figures, "perf/samples_per_sec": rate, **memory()})

    def _print_step(self, figures, rate):
        position = self.position
        parts = [f"step {position.steps}/{self.bar.total}: {self.in_words(figures)}"]
        parts.append(f"{rate:,.0f} samples/s")
        parts += [f"{gib:.1f} GiB" for gib in memory().values()]
        seconds = position.steps_left * position.sampler.global_batch / rate
        parts.append(f"{timedelta(seconds=round(seconds))} left")
        show(" | ".join(parts))

    def end(self, waited: float) -> None:
        """End the stretch of training, which spent `waited` seconds waiting for data."""
        if self.quiet:
            return
        self.bar.close()
        seconds, rate = self._seconds_and_rate()
        self.speed = {
            "perf/samples_per_sec": rate,
            "perf/data_wait": waited / seconds,
            "perf/seconds": seconds,
        }

    def evaluation(self, train: dict, rates: dict, val: dict) -> None:
        """Print and log the results `train` and `val`, the learning `rates`, and the speed."""
        if self.quiet:
            return
        epochs = f"epoch {self.position.epochs_done:.4g}"
        if self.position.max_steps is None:
            epochs += f"/{self.position.epochs}"
        else:
            epochs += f", step {self.position.steps}/{self.position.max_steps}"
        rate = self.speed["perf/samples_per_sec"]
        data_wait = self.speed["perf/data_wait"]
        took = timedelta(seconds=round(time.monotonic() - self.started))
        speed = f"{rate:,.0f} samples/s | {data_wait:.0%} data wait"
        results = f"train {self.in_words(train)} | val {self.in_words(val)}"
        show(f"{epochs}: {results} | {speed} | after {took}")
        figures = {f"train/{name}": value for name, value in plain(train | rates).items()}
        figures |= {f"val/{name}": value for name, value in plain(val).items()}
        self.write("evaluation", figures | self.speed)

    def in_words(self, figures: dict[str, float]) -> str:
        """The figures as text, such as "loss 0.1234 acc 98.76%"."""
        words = []
        for name, value in figures.items():
            if name in self.forms:
                words.append(self.forms[name].format(value))
            else:
                words.append(f"{name} {value:.4g}")
        return " ".join(words)

    def write(self, event: str, figures: dict) -> None:
        """Append a JSON line, write the figures to TensorBoard, and hand them to the listeners."""
        if self.folder is None:
            return
        for listener in self.listeners:
            listener(figures, self.position.steps)
        try:
            self._append({"event": event, **figures})
            self._write_scalars(figures)
        except OSError as error:
            # A full disk must not end the run. TensorBoard's writer cannot recover, so drop it.
            self.writer = None
            if not self.warned:
                show(
                    f"warning: no results are written to {self.folder} ({error.strerror}); "
                    "training continues"
                )
            self.warned = True

    def _write_scalars(self, figures):
        if self.writer_class is None:
            return
        if self.writer is None:
            self.writer = self.writer_class(self.folder, purge_step=self.position.steps)
            # It has a thread, which a notebook must not keep.
            launch.to_give_back.append(self.writer.close)
        for name, value in figures.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(name, value, self.position.steps)
        self.writer.flush()

    def stopped(self) -> None:
        """Print where the run stopped, and how to resume it."""
        if self.quiet:
            return
        where = f"epoch {self.position.epoch + 1}, sample {self.position.samples}"
        how = f": continue with --resume {self.folder / 'last.pt'}" if self.folder else ""
        show(f"stopped after a signal at {where}{how}")


def memory() -> dict[str, float]:
    """Peak GPU memory of this process's tensors so far, in GiB; empty without CUDA."""
    if not torch.cuda.is_initialized():
        return {}
    return {"perf/gpu_gib": torch.cuda.max_memory_allocated() / 2**30}


def new_folder(task: str) -> Path:
    """A name for the folder of a new run: runs/TASK-SCRIPT-TIME-RANDOM."""
    script = Path(sys.argv[0]).stem
    # Not the process id: in containers all runs may have the same one.
    random = os.urandom(3).hex()
    return Path("runs", f"{task}-{script}-{time.strftime('%Y%m%d-%H%M%S')}-{random}")
