"""A training run: its position, and how it resumes, saves and stops."""

import atexit
import itertools
import json
import math
import os
import threading
import time

import torch
from tqdm import tqdm

from common import checkpoint, processes
from common.output import Output
from common.processes import fail


class Run:
    """A run and its position: (epoch, samples of that epoch already used, over all ranks).

    Data order, augmentation, learning rate and random state are functions of seed and position. A checkpoint therefore
    holds the position and `state`, a dict of objects with a state_dict, but no ranks. All ranks call `resume`, `step`
    and `end_epoch`; rank 0 `log` and `save`. `lr` is scaled; `all_reduce` sums a tensor over all ranks in place.
    """

    def __init__(self, args, strategy: str, device: torch.device, state: dict, lr: float, rank: int = 0,
                 world_size: int = 1, all_reduce = lambda tensor: None):
        if world_size == 1 and {os.getenv(f"{n}_SIZE", "1") for n in ("WORLD", "OMPI_COMM_WORLD", "HOROVOD")} != {"1"}:
            fail("a launcher started several of these, and each would train alone: use python (hvd.py: horovodrun)")
        self.args, self.strategy, self.device, self.state = args, strategy, device, state
        self.rank, self.world_size, self.all_reduce = rank, world_size, all_reduce
        self.accumulate = getattr(args, "accumulate", 1)  # a flag of imagenet's recipes
        self.global_batch = args.batch_size * self.accumulate * world_size
        self.rate = {"global_batch": self.global_batch, "lr": lr, "epochs": args.epochs}
        self.arguments = json.loads(json.dumps(vars(args), default=str))  # a flag's type can be anything
        self.epoch, self.samples, self.steps = 0, 0, 0  # the position; the steps of this process
        self.sums, self.history, self.save_due, self.stopping = None, [], False, False  # sums: the metrics so far
        self.output = Output(self) if rank == 0 else None
        self.recorder = threading.Timer(0, None)  # see processes.arm_watchdog

    def resume(self, read=checkpoint.read) -> None:
        """Load the checkpoint that --resume names with `read`, create the output folders, and print the setup."""
        args, path, saved, damaged = self.args, None, {}, []
        if args.resume:
            path, saved, fingerprint, damaged = checkpoint.find(args.resume, args.checkpoint_dir or args.log_dir, read)
            total = torch.tensor([fingerprint], device=self.device)
            self.all_reduce(total)
            if total.item() != fingerprint * self.world_size:
                fail(f"--resume {args.resume}: the ranks do not see the same file: all machines must share the folder")
        if path:
            self.epoch, self.samples, self.sums, self.history = checkpoint.load(saved, self.state, args, self.rate)
        self._seed()
        if args.dry_run or getattr(args, "evaluate", False):
            args.epochs = self.epoch + args.dry_run
        if self.output:
            self.output.start(path, saved.get("saved_by"), damaged)

    def _seed(self):
        """Set the random state of this rank, which dropout uses, from seed and position."""
        seed = hash((self.args.seed, self.epoch, self.samples, self.rank))
        torch.default_generator.manual_seed(seed)  # 1 us; torch.manual_seed takes 200 us
        if self.device.type != "cpu":
            torch.get_device_module(self.device).manual_seed(seed)

    def progress(self, data):
        """Yield the batches of `data`, under the watchdog (--timeout); on a terminal, rank 0 shows a progress bar."""
        tqdm.set_lock(threading.RLock())  # the default is a semaphore, which a killed process leaks
        tqdm.monitor_interval = 0  # or a thread of tqdm clutters the watchdog's stacks
        batches = itertools.islice(data, self.accumulate if self.args.dry_run else None)
        self.bar = tqdm(batches, total=len(data), unit="batch", leave=False, disable=None if self.output else True)
        timeout, armed = self.args.timeout, time.monotonic()
        processes.arm_watchdog(self)
        for number, batch in enumerate(self.bar, 1):
            self.last_batch = number == len(data)
            yield batch
            if time.monotonic() - armed > timeout / 100:  # not each time: it starts a thread, which takes up to 0.5 ms
                processes.arm_watchdog(self)
                armed = time.monotonic()

    def step(self, metrics) -> None:
        """Advance the position by one global batch; every --log-interval steps, all-reduce the sums and a stop flag.

        Sets `save_due` every --checkpoint-every steps and after the last, and also `stopping` once a rank was told to.
        """
        self.samples, self.steps = self.samples + self.global_batch, self.steps + 1
        self._seed()
        self.save_due = self.last_batch or not self.samples // self.global_batch % (self.args.checkpoint_every or 1e9)
        if self.output and self.output.profiler:
            self.output.profiler.step()
        if self.steps % self.args.log_interval and not self.save_due:
            return
        total = torch.cat((metrics.sums, metrics.sums.new_full((1,), processes.stop_requested.is_set())))
        self.all_reduce(total)
        *sums, stop = total.tolist()  # the only line of Run at which Python waits for the GPU
        self.sums = [a + b for a, b in zip(sums, metrics.before, strict=True)]
        self._check_finite(self.sums[0])
        self.stopping, self.save_due = stop > 0, self.save_due or stop > 0
        if self.stopping and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):  # torchrun restarts after status 1
            atexit.register(lambda: processes.stop_requested.wait(2) or os._exit(1))  # of the ranks that were not told
        self.bar.set_postfix(loss=f"{self.sums[0] / self.sums[2]:.4f}", refresh=False)

    def _check_finite(self, loss):
        if not math.isfinite(loss):
            fail(f"the loss is not finite (epoch {self.epoch + 1}, sample {self.samples}): lower --lr, or check the "
                 "data, and resume; if that fails at once, too, resume from previous.pt or best.pt", status=1)

    def end_epoch(self, train: dict, val: dict) -> None:
        """Advance the position to the next epoch; `train` and `val` are the results of Metrics.average for this one."""
        self._check_finite(train["loss"] + val["loss"])
        self.epoch, self.samples, self.sums = self.epoch + 1, 0, None
        self._seed()
        lr = self.state["optimizer"].param_groups[0]["lr"]
        self.history.append({"epoch": self.epoch, "train": train, "val": val, "lr": lr})

    def log(self) -> None:
        """Print the results of the last epoch, and write them to TensorBoard and results.json."""
        self.output.log(self.history[-1])

    def save(self, states: dict | None = None) -> None:
        """Save last.pt, also as best.pt if no epoch was more accurate; `states`: the state_dicts, if not of `state`."""
        if not self.output.writes:
            return
        accuracies, folder = [epoch["val"]["accuracy"] for epoch in self.history], self.output.checkpoint_dir
        content = (states or {name: part.state_dict() for name, part in self.state.items()}) | {
            "epoch": self.epoch, "samples": self.samples, "sums": self.sums, "history": self.history, "rate": self.rate,
            "arguments": self.arguments, "saved_by": f"{self.strategy}, world size {self.world_size}"}
        try:
            checkpoint.save(folder, content, self.samples == 0 and accuracies[-1] > max(accuracies[:-1], default=-1))
        except OSError as error:
            fail(f"cannot save in {folder} ({error.strerror}); --resume auto uses the previous checkpoint", status=1)
        if self.stopping:
            print(f"stopped after a signal at epoch {self.epoch + 1}, sample {self.samples}: continue with --resume "
                  f"{folder / 'last.pt'}", flush=True)
