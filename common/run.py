"""What a run has beside its training: a folder, a log, checkpoints, and how it ends."""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from common import checkpoint, devices, lease
from common.flags import MAY_CHANGE
from common.log import Log, new_folder
from common.metrics import Best
from common.process import launch, profiler
from common.process.signals import StopSignal
from common.process.watchdog import Watchdog, flight_recorder

# Steps from a look at the loss, and at whether to stop, to the next.
CHECK_EVERY = 10
# Or seconds: a launcher waits 30 s and more after it asked a run to stop.
CHECK_AFTER = 5
# Python waits for the GPU at a check, and then the GPU for Python: that is to be a hundredth.
CHECK_NOT_WITHIN = 0.02


class Run:
    """A run begins here: its folder is held, and the checkpoint of --resume is loaded into `state`.

    `args` has the flags of flags.add_run_flags(), and `dataset`, the name of the task. `state` is a
    dict of objects with state_dict and load_state_dict; "model" and "position" are two of them.
    `strategy` and `lr` are for the log, and `unit` is what a sample is called there. All ranks make
    this call: `all_reduce` adds up a tensor over all of them in place. Rank 0 alone writes.
    Raises InputError if the folder or the checkpoint does not fit this run.
    """

    def __init__(
        self,
        args,
        state: dict,
        device: torch.device,
        strategy: str,
        lr: float,
        unit: str = "samples",
        lines: Iterable[str] = (),
        rank: int = 0,
        world_size: int = 1,
        all_reduce=None,
        optional: Iterable[str] = (),
        may_change: Iterable[str] = (),
        only_weights: bool = False,
        read=checkpoint.read,
        damage=None,
    ):
        """`lines` are printed below the first line, which says what and where this run is.

        The parts of `state` that are `optional` may be missing in the checkpoint. The flags in
        `may_change` may differ from those in it. With `only_weights` it may be of any other run,
        and nothing is written. `read` reads its file, and `damage` looks at those beside it, as in
        checkpoint.resume.
        """
        self.state = state
        self.position = state["position"]
        self.device = device
        self.all_reduce = all_reduce
        self.saves = not (args.dry_run or only_weights)
        self.writes = self.saves and rank == 0
        self.folder = Path(args.log_dir or new_folder(args.dataset))
        self.config = vars(args) | {"saved_by": f"{strategy}, world size {world_size}"}
        self.profile = args.profile and self.writes
        log_folder = self.folder if self.writes else None
        seconds = args.log_seconds
        if seconds is None:
            seconds = 0 if args.log_interval else 10
        quiet = rank != 0
        self.log = Log(log_folder, self.position, unit, seconds, args.log_interval, quiet)
        # A function of the folder that saves parts of the state there, on all ranks, and returns
        # what a checkpoint holds of them: for a state that no rank can hold as a whole.
        self.save_shards = None
        self.stop = StopSignal()
        self.log_interval = args.log_interval
        self.checkpoint_every = args.checkpoint_every
        # Before the watchdog ends a rank, the rank writes its last collectives.
        recorder = flight_recorder(args.log_dir, rank, world_size, device)
        self.watchdog = Watchdog(args.timeout, before_end=recorder)

        if self.writes:
            # Before the checkpoint is read: another job may be writing it.
            lease.hold(self.folder)
        found = checkpoint.resume(
            args.resume,
            args.log_dir,
            state,
            {} if only_weights else self.config,
            MAY_CHANGE | set(may_change),
            # A checkpoint of an older version has no metadata.
            {"metadata", *optional},
            all_reduce,
            read,
            damage,
        )
        if self.writes:
            # Refuses a folder that holds another run.
            checkpoint.claim(self.folder, found)
        sampler = self.position.sampler
        batch = f"batch {sampler.batch_size} per process, {sampler.global_batch} global"
        place = f"world size {world_size} | {devices.describe(device)}"
        setup = f"{args.dataset}: {strategy} | {place} | {batch} | lr {lr:g}"
        found_lines = found.lines(None if only_weights else self.position)
        if self.writes:
            found_lines += self._warn_if_no_best()
        self.log.start(self.config, [setup, *lines, *found_lines])
        if self.position.over and not only_weights:
            self.log.say("nothing left to do: the run has had its --epochs or --max-steps")

    def _warn_if_no_best(self):
        """A line for the log: a run that goes on in a new folder may never have a best.pt there."""
        best = self.state.get("best")
        if not isinstance(best, Best) or best.value is None or (self.folder / "best.pt").exists():
            return []
        return [f"best.pt comes with a result better than {best.value:.4g}, the best so far"]

    def batches(self, loader: Iterable) -> Iterator:
        """Yield the batches of `loader`, for training: timed, and traced with --profile.

        A step that takes longer than --timeout ends this process. So does SIGTERM until there is
        something to save, which is after the first step; from then on it asks the run to stop.
        """
        batches = self.watchdog.watch(loader)
        if self.profile:
            self.profile = False
            path = self.folder / f"trace-{self.position.steps}.json.gz"
            batches = profiler.trace(batches, path)
        self.log.begin()
        self.checked_at = self.position.steps
        self.checked_when = time.perf_counter()
        try:
            for batch in batches:
                yield batch
                self.stop.listen()
        finally:
            # Also where the loop is left before its end.
            self.log.end(self.watchdog.waited)

    def check_due(self) -> bool:
        """Whether all ranks look at their loss now, and agree whether to stop. All get the same.

        It is every CHECK_EVERY steps, and more often where these take longer than CHECK_AFTER
        seconds. On a GPU those are left out that come CHECK_NOT_WITHIN seconds after another one.
        With --log-interval it is at each line of the log. Before a save of --checkpoint-every, too;
        then `save_due` is true.
        """
        position = self.position
        steps = position.steps - self.checked_at
        now = time.perf_counter()
        seconds = now - self.checked_when
        if self.all_reduce:
            # The clocks of the ranks differ. They have agreed on this.
            slow = steps * self.stop.seconds_per_step > CHECK_AFTER
        else:
            slow = seconds > CHECK_AFTER
        on_gpu = self.device.type != "cpu"
        too_soon = on_gpu and steps * self.stop.seconds_per_step < CHECK_NOT_WITHIN
        if self.log_interval:
            regular = position.multiple_of(self.log_interval)
        else:
            regular = position.multiple_of(CHECK_EVERY) and not too_soon
        self.save_due = position.multiple_of(self.checkpoint_every)
        if not (slow or self.save_due or regular):
            return False
        self.stop.seconds_per_step = seconds / steps
        self.checked_at = position.steps
        self.checked_when = now
        return True

    def save(self, is_best: bool = False) -> None:
        """Save `state` in the folder; all ranks make this call, and wait until it is there."""
        # It may take longer than a step. The next batch starts the watchdog again.
        self.watchdog.cancel()
        if not self.saves:
            return
        parts = self.save_shards(self.folder) if self.save_shards else {}
        for name, part in self.state.items():
            if name not in parts:
                # On all ranks, as each may have a share of it.
                parts[name] = part.state_dict()
        if self.writes:
            checkpoint.save(self.folder, parts, self.config, is_best)
        if self.all_reduce:
            # Else the others wait in their next step, and the watchdog takes that for a hang.
            nothing = torch.zeros(1, device=self.device)
            self.all_reduce(nothing)
            # Waits for it, also with NCCL.
            nothing.item()

    def leave(self) -> None:
        """Say where the run stopped after a signal.

        With torchrun --max-restarts the ranks that were not told themselves start again, without
        the node that was.
        """
        self.log.stopped()
        launch.leave_restart_to_torchrun(self.stop)
