"""A run as its user sees it: what it prints, TensorBoard, results.json, checkpoints, and what Ctrl-C does."""

import itertools
import json
import math
import os
import socket
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import torch
from tqdm import tqdm

from common import checkpoint, failures, machine, processes, schedule
from common.metrics import Metrics, figures
from common.profiler import Profiler
from common.ranks import Ranks, not_distributed

IMPORTED = processes.age()  # a recipe's last import but Horovod's
tqdm.set_lock(threading.RLock())  # its own one takes a semaphore, which a process that is ended leaves behind


class Run:
    """Prints, logs and saves on rank 0, for all ranks.

    Every rank makes one and calls the same methods in the same order. What needs all ranks goes through `all_reduce`,
    a function that sums a tensor over the ranks in place; this is the only line to other processes that `common` has.
    """

    def __init__(self, args, strategy, launcher, device, rank=0, world_size=1, all_reduce=not_distributed):
        if world_size == 1 and {os.environ.get(name, "1") for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")} != {"1"}:
            failures.fail("a launcher started several of these, and each would train by itself: hvd.py takes "
                          "horovodrun or mpirun, the recipes of DDP take torchrun, and all others none")
        self.args, self.strategy, self.launcher, self.device = args, strategy, launcher, device
        self.rank, self.world_size = rank, world_size
        self.ranks = Ranks(device, rank, world_size, all_reduce)
        self.epochs = []  # per-epoch figures, for results.json
        self.id = uuid.uuid4().hex  # in results.json and in checkpoints: which belong together
        self.step, self.sums = 0, None  # where in its epoch a resumed run begins, and the metrics that it had there
        self.broken = []  # checkpoints that --resume auto passed by
        self.start_up = {"began": time.time() - processes.age(),  # and the seconds from then on
                         "imported": IMPORTED, "joined": processes.age()}
        self.writer, self.profiler, self.warned = None, None, False
        self.keeps_files = not (args.dry_run or args.evaluate)
        self.watchdog = processes.Watchdog(args.timeout)

    def start(self, state):
        """Check --resume and the output folders, load the one, make the others, say what runs.

        `state` is a dict of what a checkpoint holds: objects with a state_dict, among them "model", "optimizer" and
        "scheduler". Returns the epoch to begin with: 0, or where the resumed run stopped.
        """
        self.state = state
        self.start_up["built"] = processes.age()
        torch.manual_seed(self.args.seed + self.rank)  # the weights are made: from here on each rank draws its own
        folder = self.args.checkpoint_dir or self.args.log_dir
        epoch, resumed, saved = 0, None, None
        if self.args.resume:
            found = self.ranks.on_rank_0(checkpoint.find, self.args.resume, folder and Path(folder))
            content = self.ranks.from_rank_0(found[1] if found else b"")
            if content:
                saved = checkpoint.unpack(content)
                checkpoint.check(saved, self.args.resume, self.args, self.world_size)
                epoch = self._load(saved)
                if self.rank == 0:
                    resumed, _, self.broken = found
        if self.args.evaluate and not saved:
            failures.fail("--evaluate: of which checkpoint? --resume FILE, or --resume auto with --log-dir of a run")
        if self.args.profile and not self.keeps_files:
            failures.fail("--profile writes a file, and --dry-run and --evaluate write none: leave one of them out")
        args, lr = self.args, state["scheduler"].base_lrs[0]
        self.hosts = self.ranks.gather_names(socket.gethostname())
        if args.dry_run:
            args.epochs = epoch + 1
        if self.keeps_files:
            self.ranks.on_rank_0(self._open_folders, resumed)
            if args.profile and self.rank == 0:
                self.profiler = Profiler(self.log_dir)
        if self.rank == 0:
            hosts = f" on {len(self.hosts)} hosts" if len(self.hosts) > 1 else ""
            times = f" x {args.accumulate} accumulated" if args.accumulate > 1 else ""
            print(f"{args.dataset}: {self.strategy} | launcher {self.launcher} | world size {self.world_size}{hosts} | "
                  f"device {self.device.type} ({machine.hardware(self.device)}) | "
                  f"batch {args.batch_size} per process{times}, "
                  f"{args.batch_size * args.accumulate * self.world_size} global | learning rate {lr:g}")
            if resumed:
                print(f"resumed from {resumed} after epoch {epoch}{f' and {self.step} steps' if self.step else ''}"
                      f"{': --epochs asks for no more' if epoch >= args.epochs and self.keeps_files else ''}")
            elif args.resume:
                print(f"no checkpoint in {folder} yet: starting from the beginning")
            if self.keeps_files:
                print(f"TensorBoard events and results.json in {self.log_dir}, checkpoints in {self.checkpoint_dir}")
            sys.stdout.flush()
        self.watchdog.start()
        if resumed and self.keeps_files:
            self._spare(self._write_results)  # it may have been killed between the checkpoint and these
            if epoch >= args.epochs:
                self._export()
        return epoch

    def _open_folders(self, resumed):
        """Refuse what is of another run, then make the folders; `resumed` is the checkpoint that was loaded."""
        recipe = Path(sys.argv[0]).stem
        default = f"runs/{self.args.dataset}-{recipe}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self.log_dir = Path(self.args.log_dir or default)
        self.checkpoint_dir = Path(self.args.checkpoint_dir or self.log_dir)
        results, newest = self.log_dir / "results.json", checkpoint.committed(self.checkpoint_dir)
        newest = next((path for path in newest if path not in self.broken), None)
        if results.exists() and self.id.encode() not in results.read_bytes():
            failures.fail(f"{results} is of another run: choose another --log-dir, or go on with it by --resume auto")
        if newest or any(self.checkpoint_dir.glob("*.pt")):
            if not resumed or resumed.resolve().parent != self.checkpoint_dir.resolve():
                failures.fail(f"{self.checkpoint_dir} has checkpoints of another run: choose another --checkpoint-dir, "
                              "or --resume auto")
            if newest and not resumed.samefile(newest):
                failures.fail(f"--resume {self.args.resume}: {newest} is newer, and would be lost: take that one "
                              "(--resume auto), or another --log-dir and --checkpoint-dir")
        if self.args.export and not resumed and Path(self.args.export).exists():
            failures.fail(f"--export {self.args.export}: the file is there already; choose another name")
        folders = self.log_dir, self.checkpoint_dir
        for folder in folders:
            existing = next(path for path in (folder, *folder.parents) if path.exists())
            try:
                tempfile.TemporaryFile(dir=existing).close()
            except OSError as error:
                failures.fail(f"cannot write to {folder} ({error.strerror}): "
                              "choose another --log-dir or --checkpoint-dir")
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        for path in self.broken:
            path.rename(f"{path}.broken")
        checkpoint.tidy(self.checkpoint_dir, self.args.keep, self._best_first())

    def metrics(self):
        """Empty sums for one pass over the data."""
        return Metrics(self.device, self.ranks.all_reduce, self.args.top5)

    def batches(self, data, metrics):
        """The batches of `data`, behind a progress bar where rank 0 has a terminal; the waiting goes to `metrics`.

        In an epoch of training it also looks after the loss, saves (--checkpoint-every), and stops all ranks after the
        same step when one was warned that it has to end; a resumed run goes on here within its epoch. There,
        `batches_in_step` says how many batches a step has, by --accumulate, or fewer at the end of the epoch, and
        `ends_step` whether the one that was given is the last of them.
        """
        per_step, done = self.args.accumulate if data.epoch is not None else 1, 0
        if data.epoch is not None and self.step:
            done, self.step = self.step * per_step, 0
            metrics.load_state(self.sums)
        iterator = data.from_batch(done)
        with tqdm(total=len(data), initial=done, unit="batch", leave=False,
                  disable=None if self.rank == 0 else True) as bar:
            for number in itertools.count(done + 1):
                asked = time.perf_counter()
                batch = next(iterator, None)
                self.watchdog.alive()
                metrics.waited += time.perf_counter() - asked
                if batch is None:
                    return
                step = math.ceil(number / per_step)
                self.batches_in_step = min(per_step, len(data) - (step - 1) * per_step)
                self.ends_step = number == (step - 1) * per_step + self.batches_in_step
                yield batch
                bar.update()
                if not self.ends_step:
                    continue
                if step % self.args.log_interval == 0 and not bar.disable:
                    bar.set_postfix(loss=f"{metrics.local_loss():.4f}")
                if self.args.dry_run:
                    return
                if data.epoch is not None:
                    self._after_step(data.epoch, step, metrics, last=number == len(data))

    def _after_step(self, epoch, step, metrics, last):
        if "first_step" not in self.start_up:
            self.start_up["first_step"] = processes.age()
        if self.profiler:
            self._spare(self.profiler.step, epoch, step, last)
        stop = self.ranks.any_warned()
        save = self.args.checkpoint_every and step % self.args.checkpoint_every == 0 and not last
        if save or stop or last or step % self.args.log_interval == 0:
            self._stop_unless_finite(metrics, f"epoch {epoch + 1}, by step {step}")
        if save or stop:
            self._save(epoch, step, self.ranks.gather(metrics.state()))
        if stop:
            self._stop(f"epoch {epoch} and {step} steps")

    def _stop(self, done):
        """End all ranks with status 0, as all is saved: what started the run can start it again, and it goes on."""
        if self.rank == 0:
            print(f"stopped by SIGUSR1 after {done}: --resume {self.checkpoint_dir / 'last.pt'} goes on from there")
        failures.end(0)

    def _stop_unless_finite(self, metrics, when):
        """End all ranks, at the same step, where the loss of one is infinite or not a number."""
        ranks = self.ranks.gather(~metrics.finite()).nonzero().flatten().tolist()
        if ranks:
            failures.fail(f"the loss is not finite (rank {', '.join(map(str, ranks))}; {when}): the last checkpoint is "
                          "from before; take a smaller --lr, or look at the data", status=1)

    def end_epoch(self, epoch, train, val):
        """Print, log and save what epoch `epoch` (from 0) gave: two results of Metrics.average. Every rank calls it."""
        rate, seconds = train["images"] / train["seconds"], train["seconds"] + val["seconds"]
        lr = self.state["scheduler"].get_last_lr()[0]
        self.epochs.append({"epoch": epoch + 1, "train": train, "val": val, "lr": lr, "images_per_sec": rate,
                            "seconds": seconds})
        if self.rank == 0:
            print(f"epoch {epoch + 1}/{self.args.epochs}: train {figures(train)} | val {figures(val)} | "
                  f"{rate:,.0f} images/s | {seconds:.1f} s | {train['data_wait']:.0%} waiting for data", flush=True)
        if not math.isfinite(val["loss"]):  # over all ranks, so that each of them ends here
            failures.fail(f"the validation loss of epoch {epoch + 1} is not finite: the last checkpoint is from before "
                          "it; take a smaller --lr, or look at the data", status=1)
        if not self.keeps_files:
            return
        scalars = {f"{split}/{name}": values[name] for split, values in (("train", train), ("val", val))
                   for name in ("loss", "accuracy", "top5") if name in values}
        self._spare(self._log_scalars, epoch + 1, {**scalars, "lr": lr, "perf/images_per_sec": rate})
        self._save(epoch + 1, 0, None)
        self._spare(self._write_results)
        if epoch + 1 == self.args.epochs:
            self._export()
            if self.profiler:
                self.profiler.finish()
        elif self.ranks.any_warned(now=True):
            self._stop(f"epoch {epoch + 1}")

    def end_evaluation(self, val):
        """Print what an evaluation alone (--evaluate) gave, a result of Metrics.average. Every rank calls it."""
        if self.rank == 0:
            print(f"{val['images']:,} images of val: {figures(val)} | {val['images'] / val['seconds']:,.0f} images/s | "
                  f"{val['data_wait']:.0%} waiting for data", flush=True)

    def _best_first(self):
        """The epochs so far, that of the highest validation accuracy first."""
        return [epoch["epoch"] for epoch in sorted(self.epochs, key=lambda epoch: -epoch["val"]["accuracy"])]

    def _save(self, epoch, step, sums):
        """Save a checkpoint after `epoch` epochs and `step` steps; `sums` [ranks, 6] is what the metrics had there."""
        random_states = self.ranks.gather(self._random_state())
        self.ranks.on_rank_0(self._commit, {
            "epoch": epoch, "step": step, "sums": sums, "epochs": self.epochs, "random_states": random_states,
            "world_size": self.world_size, "arguments": vars(self.args), "run": self.id})

    def _commit(self, position):
        parts = {name: part.state_dict() for name, part in self.state.items()}
        try:
            checkpoint.save(self.checkpoint_dir, {**parts, **position}, self.args.keep, self._best_first())
        except OSError as error:
            failures.fail(f"cannot save a checkpoint in {self.checkpoint_dir} ({error.strerror}): make room, then "
                          "--resume auto goes on from the last one", status=1)

    def _export(self):
        if self.args.export:
            self.ranks.on_rank_0(self._write_weights)

    def _write_weights(self):
        from safetensors.torch import save  # here: no other run needs the package

        best = self.checkpoint_dir / "best.pt"
        try:
            weights = checkpoint.unpack(checkpoint.read(best))["model"]
            checkpoint.write(Path(self.args.export), save(weights))
        except (OSError, checkpoint.Broken) as error:
            failures.fail(f"--export {self.args.export}: {error}", status=1)
        print(f"exported {best.resolve().name} to {self.args.export}", flush=True)

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
            "start_up": self.start_up, "versions": machine.versions(),
            "hardware": {"hosts": self.hosts, "cpu": machine.cpu(), "cores": os.cpu_count(),
                         "threads": torch.get_num_threads(),
                         "device": f"{self.device.type} ({machine.hardware(self.device)})"},
        }
        checkpoint.write(self.log_dir / "results.json", (json.dumps(results, indent=2) + "\n").encode())

    def _spare(self, write, *args):
        """Let rank 0 write figures; where that fails, training goes on: a full disk costs them, and not the run."""
        if self.rank == 0:
            try:
                write(*args)
            except OSError as error:
                if not self.warned:
                    print(f"warning: no figures are written to {self.log_dir} ({error.strerror}); training goes on",
                          file=sys.stderr, flush=True)
                self.warned = True

    def _load(self, saved):
        """Take over what a checkpoint holds, and return the epoch to begin with."""
        own = {name: tensor.shape for name, tensor in self.state["model"].state_dict().items()}
        name = "model"
        try:
            other = {name: tensor.shape for name, tensor in saved["model"].items()}
            differ = [key for key in {**own, **other} if own.get(key) != other.get(key)]
            if differ:
                raise ValueError(f"{len(differ)} weights differ, among them {', '.join(differ[:3])}")
            if self.args.evaluate:
                self.state["model"].load_state_dict(saved["model"])
                return saved["epoch"]
            for name, part in self.state.items():
                if name == "scheduler" and saved["world_size"] != self.world_size:
                    schedule.seek(part, saved["epoch"])
                elif name == "scheduler" and saved[name]["steps_per_epoch"] != part.steps_per_epoch:
                    raise ValueError(f"{saved[name]['steps_per_epoch']} steps in an epoch, and {part.steps_per_epoch} "
                                     "here: the data set has another number of images")
                else:
                    part.load_state_dict(saved[name])
            name = "position"
            self.step, self.id, self.epochs = saved["step"], saved["run"], saved["epochs"]
            self.sums = saved["sums"][self.rank] if self.step else None
            self._best_first()  # the figures, too, are what it needs
            if self.rank < saved["world_size"]:  # a rank that is new draws from its own seed
                self._set_random_state(saved["random_states"][self.rank])
            return saved["epoch"]
        except (KeyError, IndexError, TypeError, AttributeError, RuntimeError, ValueError) as error:
            failures.fail(f"--resume {self.args.resume}: its {name} does not fit this run "
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
