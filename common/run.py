"""A run as its user sees it: what it prints, TensorBoard, results.json, checkpoints, and what Ctrl-C does."""

import contextlib
import importlib.metadata
import itertools
import json
import os
import platform
import socket
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import torch
from tqdm import tqdm

from common import checkpoint, flags
from common.metrics import Metrics

tqdm.set_lock(threading.RLock())  # its own one takes a semaphore, which a process that is ended leaves behind


def not_distributed(tensor):
    """The all-reduce of a run of one process: the sum over all ranks is what it has."""


class Run:
    """Prints, logs and saves on rank 0, for all ranks.

    Every rank makes one and calls the same methods in the same order. What needs all ranks goes through `all_reduce`,
    a function that sums a tensor over the ranks in place; this is the only line to other processes that `common` has.
    """

    def __init__(self, args, strategy, launcher, device, rank=0, world_size=1, all_reduce=not_distributed):
        self.args, self.strategy, self.launcher, self.device = args, strategy, launcher, device
        self.rank, self.world_size, self.all_reduce = rank, world_size, all_reduce
        self.epochs = []  # per-epoch figures, for results.json
        self.id = uuid.uuid4().hex  # in results.json and in checkpoints: which belong together
        self.writer = None

    def start(self, state):
        """Check --resume and the output folders, load the one, make the others, say what runs.

        `state` is a dict of what a checkpoint holds: objects with a state_dict, among them "scheduler". Returns the
        epoch to begin with: 0, or where the resumed run stopped.
        """
        self.state = state
        torch.manual_seed(self.args.seed + self.rank)  # the weights are made: from here on each rank draws its own
        epoch = self._resume() if self.args.resume else 0
        args, lr = self.args, state["scheduler"].base_lrs[0]
        if args.dry_run:
            args.epochs = epoch + 1
        if self.rank == 0:
            if not args.dry_run:
                self._open_folders()
            print(f"{args.dataset}: {self.strategy} | launcher {self.launcher} | world size {self.world_size} | "
                  f"device {self.device.type} ({self._hardware()}) | batch {args.batch_size} per process, "
                  f"{args.batch_size * self.world_size} global | learning rate {lr:g}")
            if epoch:
                print(f"resumed from {args.resume} after epoch {epoch}"
                      f"{': --epochs asks for no more' if epoch >= args.epochs else ''}")
            if not args.dry_run:
                print(f"TensorBoard events and results.json in {self.log_dir}, checkpoint {self.checkpoint_path}")
            sys.stdout.flush()
        return epoch

    def _hardware(self):
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else f"{os.cpu_count()} cores"

    def _open_folders(self):
        recipe = Path(sys.argv[0]).stem
        default = f"runs/{self.args.dataset}-{recipe}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self.log_dir = Path(self.args.log_dir or default)
        self.checkpoint_path = Path(self.args.checkpoint_dir or self.log_dir) / "last.pt"
        results = self.log_dir / "results.json"
        of_this_run = {
            results: results.exists() and self.id.encode() in results.read_bytes(),
            self.checkpoint_path: os.path.realpath(self.args.resume or "") == os.path.realpath(self.checkpoint_path),
        }
        for path, ours in of_this_run.items():
            if path.exists() and not ours:
                flags.fail(f"{path} is of another run: choose another folder, or --resume {self.checkpoint_path}")
        folders = self.log_dir, self.checkpoint_path.parent
        for folder in folders:
            existing = next(path for path in (folder, *folder.parents) if path.exists())
            try:
                tempfile.TemporaryFile(dir=existing).close()
            except OSError as error:
                flags.fail(f"cannot write to {folder} ({error.strerror}): choose another --log-dir or --checkpoint-dir")
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)

    def metrics(self):
        """Empty sums for one pass over the data."""
        return Metrics(self.device, self.all_reduce)

    def batches(self, data, metrics):
        """The batches of `data`, behind a progress bar where rank 0 has a terminal; the waiting goes to `metrics`."""
        iterator = iter(data)
        with tqdm(total=len(data), unit="step", leave=False, disable=None if self.rank == 0 else True) as bar:
            for step in itertools.count(1):
                asked = time.perf_counter()
                batch = next(iterator, None)
                metrics.waited += time.perf_counter() - asked
                if batch is None:
                    return
                yield batch
                bar.update()
                if step % self.args.log_interval == 0 and not bar.disable:
                    bar.set_postfix(loss=f"{metrics.local_loss():.4f}")
                if self.args.dry_run:
                    return

    def end_epoch(self, epoch, train, val):
        """Print, log and save what epoch `epoch` (from 0) gave: two results of Metrics.average. Every rank calls it."""
        rate, seconds = train["images"] / train["seconds"], train["seconds"] + val["seconds"]
        lr = self.state["scheduler"].get_last_lr()[0]
        self.epochs.append({"epoch": epoch + 1, "train": train, "val": val, "lr": lr, "images_per_sec": rate,
                            "seconds": seconds})
        if self.rank == 0:
            print(f"epoch {epoch + 1}/{self.args.epochs}: "
                  f"train loss {train['loss']:.4f} accuracy {train['accuracy']:.2%} | "
                  f"val loss {val['loss']:.4f} accuracy {val['accuracy']:.2%} | "
                  f"{rate:,.0f} images/s | {seconds:.1f} s | {train['data_wait']:.0%} waiting for data", flush=True)
        if self.args.dry_run:
            return
        random_states = self._gather_random_states()
        if self.rank == 0:
            self._log_scalars(epoch + 1, {
                "train/loss": train["loss"], "train/accuracy": train["accuracy"], "val/loss": val["loss"],
                "val/accuracy": val["accuracy"], "lr": lr, "perf/images_per_sec": rate})
            self._write_results()
            checkpoint.save(self.checkpoint_path, {
                **{name: part.state_dict() for name, part in self.state.items()}, "epoch": epoch + 1,
                "epochs": self.epochs, "random_states": random_states, "world_size": self.world_size,
                "arguments": vars(self.args), "run": self.id,
            })

    def _log_scalars(self, step, scalars):
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter  # here: the first epoch need not wait for the import

            self.writer = SummaryWriter(self.log_dir, purge_step=step)
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def _write_results(self):
        """results.json: what runs, on what, and how each epoch so far went."""
        results = {
            "run": self.id, "strategy": self.strategy, "launcher": self.launcher, "world_size": self.world_size,
            "arguments": vars(self.args), "command": sys.argv, "epochs": self.epochs,
            "versions": {"python": platform.python_version(), **installed("torch", "torchvision", "horovod", "apex")},
            "hardware": {"host": socket.gethostname(), "cores": os.cpu_count(), "threads": torch.get_num_threads(),
                         "device": f"{self.device.type} ({self._hardware()})"},
        }
        partial = self.log_dir / ".results.json"
        partial.write_text(json.dumps(results, indent=2) + "\n")
        partial.replace(self.log_dir / "results.json")

    def _resume(self):
        saved = checkpoint.load(self.args.resume, self.args, self.world_size)
        try:
            for name, part in self.state.items():
                part.load_state_dict(saved[name])
            name = "random state"
            self._set_random_state(saved["random_states"][self.rank])
            self.id, self.epochs = saved["run"], saved["epochs"]
            return saved["epoch"]
        except (KeyError, IndexError, TypeError, AttributeError, RuntimeError, ValueError) as error:
            flags.fail(f"--resume {self.args.resume}: its {name} does not fit this run "
                       f"({' '.join(str(error).split())[:160]})")

    def _random_state(self):
        """This rank's random state as one uint8 tensor: the CPU's, then the GPU's where it trains on one."""
        cpu = torch.get_rng_state()
        return torch.cat((cpu, torch.cuda.get_rng_state(self.device))) if self.device.type == "cuda" else cpu

    def _set_random_state(self, state):
        size = torch.get_rng_state().numel()
        torch.set_rng_state(state[:size].clone())
        if self.device.type == "cuda" and state.numel() > size:
            torch.cuda.set_rng_state(state[size:].clone(), self.device)

    def _gather_random_states(self):
        """uint8 [world_size, bytes]: each rank fills in its row, and the sum over the ranks has them all."""
        own = self._random_state()
        # int32, as Horovod does not sum uint8
        states = torch.zeros(self.world_size, own.numel(), dtype=torch.int32, device=self.device)
        states[self.rank] = own
        self.all_reduce(states)
        return states.to("cpu", torch.uint8)


def installed(*packages):
    """The versions of those of the packages that are installed."""
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
