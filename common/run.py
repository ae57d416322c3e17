"""Everything around the training step: the folder, the log, checkpoints, and a clean exit."""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from common import checkpoint, devices, lease
from common.data import DataObject, to_device
from common.log import Log, new_folder
from common.loss_scale import LossScales
from common.metrics import Best, Sums
from common.position import Position, seed_step
from common.process import launch, profiler
from common.process.signals import StopSignal
from common.process.watchdog import Watchdog, flight_recorder
from common.ranks import World

# How many steps apart the ranks add up their sums, and check for a stop signal.
LOOK_EVERY = 10
# At most this many seconds apart: launchers kill a run 30 s or more after SIGTERM.
LOOK_AFTER = 5
# On a GPU at least this many seconds apart: each check stalls it, and should take about 1% of time.
LOOK_NOT_WITHIN = 0.02


class Run:
    """Start a run: lock its folder, and load the checkpoint of --resume into `state`.

    `args` has the flags of flags.add_training_flags(). `state` is a dict of objects with state_dict
    and load_state_dict; "model" is one of them. The run adds its position, its `sums` and its best
    result. `rates` sets the learning rates, as schedule.WarmupCosine does: it has set(position),
    `peak` and `current`. The `optional` parts of `state` may be missing in a checkpoint. All ranks
    of `world` make this call; only rank 0 writes the log and checkpoints.
    Raises InputError if the folder or the checkpoint does not fit this run.
    """

    def __init__(
        self,
        args,
        world: World,
        state: dict,
        sums: Sums,
        rates,
        train: DataObject,
        optional: Iterable[str] = (),
    ):
        self.args = args
        self.world = world
        self.sums = sums
        self.rates = rates
        self.position = Position(train.sampler, args.epochs, args.max_steps, args.eval_every)
        self.best = Best()
        self.loss_scales = LossScales(state, world.device)
        self.state = {**state, "position": self.position, "sums": sums, "best": self.best}
        self.saves = not (args.dry_run or args.evaluate)
        self.writes = self.saves and world.rank == 0
        self.folder = Path(args.log_dir or new_folder(args.task))
        # A checkpoint has to have the same `config`; the `facts` are saved for information.
        no_flags = ("may_change", "forms")
        self.config = {name: value for name, value in vars(args).items() if name not in no_flags}
        self.facts = {
            "saved_by": f"{world.strategy}, world size {world.size}",
            "global_batch": train.sampler.global_batch,
            "peak_lr": float(rates.peak),
        }
        self.profile = args.profile and self.writes
        # Whether the run ends before its --epochs: after a signal, or with --dry-run.
        self.ended = False
        # Whether a step is under way; and whether steps() has ended, but record() is still due.
        self.in_step = False
        self.to_record = False
        # Whether this is the last batch of its step (--accumulate).
        self.ends_step = True
        self.stop = StopSignal()
        log_folder = self.folder if self.writes else None
        quiet = world.rank != 0
        self.log = Log(
            log_folder, self.position, args.log_seconds, args.log_interval, args.forms, quiet
        )
        # Before the watchdog kills a rank, the rank writes down its last collectives.
        recorder = flight_recorder(args.log_dir, world)
        self.watchdog = Watchdog(args.timeout, before_end=recorder)
        found = self._begin_or_resume(optional)
        self.log.start(self.config | self.facts, [self._setup(), *self._lines(found)])
        if self.position.over:
            world.say("nothing left to do: the run has reached its --epochs or --max-steps")

    def _begin_or_resume(self, optional):
        """Lock the folder, and load the checkpoint of --resume; return what was found."""
        args = self.args
        if self.writes:
            # Before the checkpoint is read: another job may be writing it.
            lease.hold(self.folder)
        # With --evaluate, init_from() has loaded the weights already.
        resume = None if args.evaluate else args.resume
        found = checkpoint.resume(
            resume,
            args.log_dir,
            self.state,
            self.config,
            args.may_change,
            optional,
            self.world,
        )
        if self.writes:
            # Raises InputError if the folder holds another run.
            checkpoint.claim(self.folder, found)
            launch.last_checkpoint = self.folder / "last.pt"
        return found

    def _setup(self):
        """The first line of the log: what is trained, and how."""
        world = self.world
        sampler = self.position.sampler
        return (
            f"{self.args.task}: {world.strategy} | world size {world.size} | "
            f"{devices.describe(world.device)} | batch {sampler.batch_size} per process, "
            f"{sampler.global_batch} global | lr {self.rates.peak:g}"
        )

    def _lines(self, found):
        """Lines on where the run resumes, and on what may come as a surprise."""
        lines = found.lines(self.position)
        if found.path:
            lines += self._other_steps(found.saved["config"])
        return lines

    def _other_steps(self, saved):
        """A line if the checkpoint, with the flags `saved`, had another global batch or rate."""
        batch = saved.get("global_batch")
        lr = saved.get("peak_lr")
        own_batch = self.facts["global_batch"]
        own_lr = self.facts["peak_lr"]
        # Users paste the line into a shell, and the file is untrusted: print numbers only.
        are_numbers = type(batch) is int and type(lr) is float
        if not are_numbers or (batch == own_batch and lr == own_lr):
            return []
        return [
            f"it was saved with global batch {batch} and peak rate {lr}, and this run has "
            f"{own_batch} and {own_lr}: -G {batch} --lr {lr} keeps them"
        ]

    @property
    def over(self) -> bool:
        """Whether the run is finished, was told to stop, or was a --dry-run."""
        return self.ended or self.position.over

    def steps(self, train: DataObject) -> Iterator:
        """Yield the batches up to the next evaluation, on the device: one per step.

        The order of the data, the rates and the random numbers of a step depend only on the seed,
        the position of the run and the rank, so a resumed run repeats them. Each step is counted
        when it ends. Every few steps the ranks add up their sums, agree on whether to stop, log and
        save. With --accumulate a step has several batches, and `ends_step` is true for the last
        one. A `break` would leave a step uncounted: leave the outer loop instead.

        The watchdog kills this process if a step takes longer than --timeout. SIGTERM kills it in
        the first step, as there is nothing to save yet; later it asks the run to save and stop.
        """
        self._refuse_break()
        if self.to_record:
            raise RuntimeError("run.record() has to follow run.steps(): else the run never ends")
        position = self.position
        train.sampler.set_epoch(position.epoch, position.samples, position.steps_to_evaluation)
        self.looked_at = position.steps
        self.looked_when = time.perf_counter()
        self.log.begin()
        self.loss_scales.begin()
        try:
            for number, batch in enumerate(self._watched(train.loader)):
                batch = to_device(batch, self.world.device)
                part = number % self.args.accumulate
                self.ends_step = part == self.args.accumulate - 1
                if part == 0:
                    self.rates.set(position)
                    seed_step(self.args.seed, position, self.world.device, self.world.rank)
                self.in_step = True
                yield batch
                self.in_step = False
                if not self.ends_step:
                    continue
                position.advance()
                self.loss_scales.count()
                self.stop.listen()
                if self._look_due():
                    self.log.step(self._look() | {"lr": self.rates.current})
                    if self.stop.agreed:
                        break
                    if self._save_due:
                        self.save()
                if self.args.dry_run:
                    break
        finally:
            self.log.end(self.watchdog.waited)
        # Save before the evaluation, which may take long.
        self.figures = self._look()
        self.save()
        self.to_record = True
        if self.stop.agreed:
            self.ended = True
            self.log.stopped()
            # Ranks that got no signal are restarted by torchrun, without the node that got one.
            launch.leave_restart_to_torchrun(self.stop)

    def batches(self, loader: Iterable) -> Iterator:
        """Yield the batches of `loader` on the device, to evaluate; with --dry-run only one.

        The watchdog kills this process if a batch takes longer than --timeout.
        """
        for batch in self.watchdog.watch(loader):
            yield to_device(batch, self.world.device)
            if self.args.dry_run:
                break

    def record(self, result: dict[str, float], best: float | None = None) -> None:
        """Log an evaluation, with its `result` by name, and save.

        `best` is a score, higher is better: the checkpoint with the highest one so far is best.pt.
        With None there is no best.pt. If the epoch is over, the next one begins.
        """
        self._refuse_break()
        self.to_record = False
        self.position.record_evaluation()
        self.sums.reset()
        self.log.evaluation(self.figures, {"lr": self.rates.current}, result)
        is_best = best is not None and self.best.update(best)
        self.save(is_best)
        if self.args.dry_run:
            self.ended = True
        elif self.position.over:
            self.loss_scales.require_a_step(self.position.steps)

    def save(self, is_best: bool = False) -> None:
        """Save `state` in the folder; all ranks make this call, and wait until it is written."""
        # A save may take longer than --timeout. The next batch starts the watchdog again.
        self.watchdog.cancel()
        if not self.saves:
            return
        # On all ranks: a state_dict may be sharded, and collecting it takes all of them.
        parts = {name: part.state_dict() for name, part in self.state.items()}
        if self.writes:
            checkpoint.save(self.folder, parts, self.config | self.facts, is_best)
        if self.world.all_reduce:
            # Else the others wait in their next step, and their watchdogs take that for a hang.
            nothing = torch.zeros(1, device=self.world.device)
            self.world.all_reduce(nothing)
            # Wait for the all-reduce: with NCCL it is asynchronous.
            nothing.item()

    def _refuse_break(self):
        if self.in_step:
            raise RuntimeError(
                "a `break` left run.steps() within a step, which is not counted: "
                "leave the loop around it after run.record()"
            )

    def _watched(self, loader):
        """The batches of `loader`, timed; with --profile some of them are traced."""
        batches = self.watchdog.watch(loader)
        if self.profile:
            self.profile = False
            path = self.folder / f"trace-{self.position.steps}.json.gz"
            return profiler.trace(batches, path)
        return batches

    def _look(self):
        """The training averages so far, over all ranks.

        The same all-reduce tells all ranks whether one of them got SIGTERM or SIGUSR1, so that all
        stop after the same step; else some would wait for the others forever.
        """
        averages = self.sums.result(self.stop.carried_by(self.world.all_reduce))
        return averages | self.loss_scales.figures()

    def _look_due(self):
        """Whether the ranks add up their sums after this step; all ranks decide the same.

        They do so every LOOK_EVERY steps, earlier once LOOK_AFTER seconds have passed, and on a GPU
        not within LOOK_NOT_WITHIN seconds of the last time. With --log-interval they do so for each
        line of the log instead. They also do so before each save of --checkpoint-every.
        """
        position = self.position
        steps = position.steps - self.looked_at
        now = time.perf_counter()
        seconds = now - self.looked_when
        if self.world.all_reduce:
            # The ranks' clocks differ, so they use the mean that they have agreed on.
            slow = steps * self.stop.seconds_per_step > LOOK_AFTER
        else:
            slow = seconds > LOOK_AFTER
        on_gpu = self.world.device.type != "cpu"
        too_soon = on_gpu and steps * self.stop.seconds_per_step < LOOK_NOT_WITHIN
        if self.args.log_interval:
            regular = position.multiple_of(self.args.log_interval)
        else:
            regular = position.multiple_of(LOOK_EVERY) and not too_soon
        if not (slow or self._save_due or regular):
            return False
        self.stop.seconds_per_step = seconds / steps
        self.looked_at = position.steps
        self.looked_when = now
        return True

    @property
    def _save_due(self):
        return self.position.multiple_of(self.args.checkpoint_every)
