"""What rank 0 prints and writes: TensorBoard events, results.json, a profiler trace."""

import json
import os
import sys
import time
from pathlib import Path

import torch

from common.checkpoint import write
from common.metrics import format_metrics
from common.processes import fail


class Output:
    """The output of the Run `run`, on rank 0."""

    def __init__(self, run):
        self.run, self.args, self.writer, self.profiler = run, run.args, None, None
        self.writes = not (run.args.dry_run or getattr(run.args, "evaluate", False))

    def start(self, resumed: Path | None, saved_by: str | None, damaged: list) -> None:
        """Create the folders, and print the setup; `resumed` is the path of a checkpoint, or None."""
        run, args = self.run, self.args
        default = f"runs/{args.dataset}-{Path(sys.argv[0]).stem}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self.log_dir = Path(args.log_dir or default)
        self.checkpoint_dir = Path(args.checkpoint_dir or self.log_dir)
        name = torch.cuda.get_device_name() if run.device.type == "cuda" else f"{os.cpu_count()} cores"
        self.device = f"{run.device.type} ({name})"
        for path, reason in damaged:
            print(f"skipped {path}: {reason}", file=sys.stderr)
        if self.writes:
            self._make_folders(resumed, [path for path, _ in damaged])
        times = f" x {run.accumulate} accumulated" * (run.accumulate > 1)
        print(f"{args.dataset}: {run.strategy} | world size {run.world_size} | {self.device} | batch {args.batch_size} "
              f"per process{times}, {run.global_batch} global | lr {run.rate['lr']:g}")
        if resumed:
            print(f"resumed from {resumed} at epoch {run.epoch + 1}, sample {run.samples} (saved by {saved_by})"
                  + ": nothing left to do for --epochs" * (run.epoch >= args.epochs and self.writes))
        elif args.resume:
            print(f"no checkpoint in {self.checkpoint_dir} yet: starting from the beginning")
        if self.writes:
            folders = dict.fromkeys((str(self.log_dir), str(self.checkpoint_dir)))
            print(f"results, TensorBoard events and checkpoints in {' and '.join(folders)}", flush=True)
        if args.profile and self.writes:
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it logs, on a CPU even an error
            self.trace = path = str(self.log_dir / f"trace-epoch-{run.epoch + 1:04d}.json.gz")
            steps = torch.profiler.schedule(wait=5, warmup=1, active=10, repeat=1)  # the first steps allocate memory
            self.profiler = torch.profiler.profile(schedule=steps, on_trace_ready=lambda p: p.export_chrome_trace(path))
            self.profiler.start()

    def _make_folders(self, resumed, damaged):
        """Create the folders and results.json, unless they would overwrite another run."""
        there = [self.checkpoint_dir / name for name in ("last.pt", "previous.pt", "best.pt")]
        there += [] if self.args.resume else [self.log_dir / "results.json"]
        newest = next((path for path in there if path.exists() and path not in damaged), None)
        if newest and not (resumed and newest.samefile(resumed)):
            fail(f"{newest} is from another run, or newer than --resume, and would be overwritten: choose another "
                 "--log-dir (and --checkpoint-dir), or --resume auto")
        try:
            for path in damaged:  # else the next save would overwrite the good previous.pt with it
                path.rename(f"{path}.damaged")
            for folder in (self.checkpoint_dir, self.log_dir):
                folder.mkdir(parents=True, exist_ok=True)
            self._write_results()
        except OSError as error:
            fail(f"cannot write to {error.filename or self.log_dir} ({error.strerror}): choose another --log-dir or "
                 "--checkpoint-dir")

    def log(self, last: dict) -> None:
        """Print and write the results of the epoch `last` of the history."""
        if self.profiler:
            self.profiler.stop()  # if the epoch was short, writes the trace
            self.profiler = None
            print(f"--profile: {self.trace if os.path.exists(self.trace) else 'no trace: fewer than 7 steps'}")
        train, val = last["train"], last["val"]
        print(f"epoch {last['epoch']}/{self.args.epochs}: {format_metrics(train)} | val {format_metrics(val)} | "
              f"{train['images_per_sec']:,.0f} images/s | {train['data_wait']:.0%} data wait", flush=True)
        try:
            if self.writes:
                self._write_scalars(last)
                self._write_results()
        except OSError as error:  # a full disk must not end the run
            print(f"warning: no results are written to {self.log_dir} ({error.strerror}); training goes on", flush=True)

    def _write_scalars(self, last):
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter  # here, to start the first epoch sooner
            self.writer = SummaryWriter(self.log_dir, purge_step=last["epoch"])
        scalars = {"lr": last["lr"], "perf/images_per_sec": last["train"]["images_per_sec"]}
        scalars |= {f"{split}/{name}": last[split][name] for split in ("train", "val")
                    for name in ("loss", "accuracy", "top5") if name in last[split]}
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, last["epoch"])
        self.writer.flush()

    def _write_results(self):
        results = {"strategy": self.run.strategy, "world_size": self.run.world_size, "arguments": self.run.arguments,
                   "command": sys.argv, "torch": torch.__version__, "device": self.device,
                   "threads": torch.get_num_threads(), "epochs": self.run.history}
        write(self.log_dir / "results.json", (json.dumps(results, indent=2) + "\n").encode())
