"""What a run has beside its training: a folder, a log, checkpoints, and how it ends."""

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

# Steps from a look at the loss, and at whether to stop, to the next.
LOOK_EVERY = 10
# Or seconds: a launcher waits 30 s and more after it asked a run to stop.
LOOK_AFTER = 5
# A look stalls the GPU: seconds between two of them, so that it takes about 1% of the time.
LOOK_NOT_WITHIN = 0.02


class Run:
    """A run begins here: its folder is held, and the checkpoint of --resume is loaded into `state`.

    `args` has the flags of flags.add_training_flags(). `state` is a dict of objects with state_dict
    and load_state_dict; "model" is one of them. The position of the run, its `sums` and its best
    result are added to it. `rates` sets the learning rates, as schedule.WarmupCosine does: it has
    set(position), `peak` and `current`. The parts of `state` that are `optional` may be missing in
    a checkpoint. All ranks of `world` make this call; rank 0 alone writes the log and checkpoints.
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
        # What is compared with a checkpoint, and what is only said of it.
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
        # Whether a step has begun, and not ended; and whether steps() has ended without a record().
        self.in_step = False
        self.to_record = False
        # Whether the present batch is the last one of its step.
        self.ends_step = True
        self.stop = StopSignal()
        log_folder = self.folder if self.writes else None
        quiet = world.rank != 0
        self.log = Log(
            log_folder, self.position, args.log_seconds, args.log_interval, args.forms, quiet
        )
        # Before the watchdog ends a rank, the rank writes its last collectives.
        recorder = flight_recorder(args.log_dir, world)
        self.watchdog = Watchdog(args.timeout, before_end=recorder)
        found = self._begin_or_resume(optional)
        self.log.start(self.config | self.facts, [self._setup(), *self._lines(found)])
        if self.position.over:
            world.say("nothing left to do: the run has had its --epochs or --max-steps")

    def _begin_or_resume(self, optional):
        """Hold the folder, and load the checkpoint of --resume; return what was found."""
        args = self.args
        if self.writes:
            # Before the checkpoint is read: another job may be writing it.
            lease.hold(self.folder)
        # The weights to evaluate are in the model already.
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
            # Refuses a folder that holds another run.
            checkpoint.claim(self.folder, found)
            launch.last_checkpoint = self.folder / "last.pt"
        return found

    def _setup(self):
        """A line that says what is trained, and how."""
        world = self.world
        sampler = self.position.sampler
        return (
            f"{self.args.task}: {world.strategy} | world size {world.size} | "
            f"{devices.describe(world.device)} | batch {sampler.batch_size} per process, "
            f"{sampler.global_batch} global | lr {self.rates.peak:g}"
        )

    def _lines(self, found):
        """Where the run resumes, and what is different from what one might expect."""
        lines = found.lines(self.position)
        if found.path:
            lines += self._other_steps(found.saved["config"])
        return lines

    def _other_steps(self, saved):
        """A line, if the run that saved the flags `saved` had another global batch or rate."""
        batch = saved.get("global_batch")
        lr = saved.get("peak_lr")
        own_batch = self.facts["global_batch"]
        own_lr = self.facts["peak_lr"]
        # A user types them into a shell: only numbers.
        are_numbers = type(batch) is int and type(lr) is float
        if not are_numbers or (batch == own_batch and lr == own_lr):
            return []
        return [
            f"it was saved with global batch {batch} and peak rate {lr}, and this run has "
            f"{own_batch} and {own_lr}: -G {batch} --lr {lr} keeps them"
        ]

    @property
    def over(self) -> bool:
        """Whether the run has come to its end, was told to stop, or was a --dry-run."""
        return self.ended or self.position.over

    def steps(self, train: DataObject) -> Iterator:
        """Yield the batches up to the next evaluation, on the device: one for each step.

        The order of the data, the rates and the random numbers of a step are functions of the seed,
        the position of the run and the rank, so a resume repeats them. After a step it is counted;
        every few steps the ranks add up their sums, agree whether one of them was told to stop,
        log and save. With --accumulate a step has several batches, and `ends_step` is true in the
        last one. A `break` would leave a step uncounted: leave the loop around this one instead.

        A step that takes longer than --timeout ends this process. So does SIGTERM until there is
        something to save, which is after the first step; from then on it asks the run to stop.
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
        # An evaluation may take long: what it follows is saved before it.
        self.figures = self._look()
        self.save()
        self.to_record = True
        if self.stop.agreed:
            self.ended = True
            self.log.stopped()
            # The ranks that were not told themselves start again, without the node that was.
            launch.leave_restart_to_torchrun(self.stop)

    def batches(self, loader: Iterable) -> Iterator:
        """Yield the batches of `loader`, for an evaluation, on the device; with --dry-run one.

        A batch that takes longer than --timeout ends this process.
        """
        for batch in self.watchdog.watch(loader):
            yield to_device(batch, self.world.device)
            if self.args.dry_run:
                break

    def record(self, result: dict[str, float], best: float | None = None) -> None:
        """Log and save an evaluation: its `result` by name.

        `best` is a figure that is higher for a better result: the highest one so far is kept as
        best.pt. None keeps none. If the epoch is over, the next one begins.
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
        """Save `state` in the folder; all ranks make this call, and wait until it is there."""
        # It may take longer than a step. The next batch starts the watchdog again.
        self.watchdog.cancel()
        if not self.saves:
            return
        # On all ranks, as each may have a share of it.
        parts = {name: part.state_dict() for name, part in self.state.items()}
        if self.writes:
            checkpoint.save(self.folder, parts, self.config | self.facts, is_best)
        if self.world.all_reduce:
            # Else the others wait in their next step, and the watchdog takes that for a hang.
            nothing = torch.zeros(1, device=self.world.device)
            self.world.all_reduce(nothing)
            # Waits for it, also with NCCL.
            nothing.item()

    def _refuse_break(self):
        if self.in_step:
            raise RuntimeError(
                "a `break` left run.steps() within a step, which is not counted: "
                "leave the loop around it after run.record()"
            )

    def _watched(self, loader):
        """Its batches, timed, and the first ones traced with --profile."""
        batches = self.watchdog.watch(loader)
        if self.profile:
            self.profile = False
            path = self.folder / f"trace-{self.position.steps}.json.gz"
            return profiler.trace(batches, path)
        return batches

    def _look(self):
        """The averages of training so far, over all ranks.

        The same message says whether one of them got SIGTERM or SIGUSR1, so that all stop after
        the same step; else they would wait for each other.
        """
        averages = self.sums.result(self.stop.carried_by(self.world.all_reduce))
        return averages | self.loss_scales.figures()

    def _look_due(self):
        """Whether all ranks look at their figures now: the same on each.

        It is every LOOK_EVERY steps, and more often where these take longer than LOOK_AFTER
        seconds. On a GPU those are left out that come LOOK_NOT_WITHIN seconds after another one.
        With --log-interval it is at each line of the log. Before a save of --checkpoint-every, too.
        """
        position = self.position
        steps = position.steps - self.looked_at
        now = time.perf_counter()
        seconds = now - self.looked_when
        if self.world.all_reduce:
            # The clocks of the ranks differ. They have agreed on this.
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
