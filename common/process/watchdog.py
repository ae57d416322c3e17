"""Kill a process whose step hangs, and print the stack of each thread."""

import faulthandler
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from common.ranks import World


class Watchdog:
    """Kills this process if a batch and its step take longer than `seconds`.

    `before_end`, a function, is called after 90% of that time.
    `waited` is how long the last loop waited for its batches, in seconds.
    """

    def __init__(self, seconds: float, before_end=None):
        self.seconds = seconds
        self.before_end = before_end
        self.timer = None
        self.armed_at = None
        self.waited = 0.0

    def watch(self, loader: Iterable) -> Iterator:
        """Yield the batches of `loader`. Code after the loop is watched, too, until cancel()."""
        self.waited = 0.0
        self.arm()
        asked = time.perf_counter()
        for batch in loader:
            given = time.perf_counter()
            self.waited += given - asked
            # Not for each batch: arm() starts a thread, which takes up to 0.5 ms.
            if self.armed_at is None or given - self.armed_at > self.seconds / 100:
                self.arm()
            yield batch
            asked = time.perf_counter()
        self.arm()

    def arm(self) -> None:
        """Start the timer, or restart it."""
        self.cancel()
        faulthandler.dump_traceback_later(self.seconds, exit=True, file=sys.__stderr__)
        self.armed_at = time.perf_counter()
        if self.before_end:
            self.timer = threading.Timer(0.9 * self.seconds, self.before_end)
            self.timer.daemon = True
            self.timer.start()

    def cancel(self) -> None:
        """Stop the timer: what comes next, such as a save, may take long."""
        faulthandler.cancel_dump_traceback_later()
        self.armed_at = None
        if self.timer:
            self.timer.cancel()
            self.timer = None


def flight_recorder(folder: str | None, world: World):
    """A function that writes this rank's last collectives to `folder`/collectives-RANK.

    `torchfrtrace` reads them. None unless TORCH_FR_BUFFER_SIZE is set: then torch records them.
    """
    if "TORCH_FR_BUFFER_SIZE" not in os.environ:
        return None

    def write():
        recorder = torch._C._distributed_c10d
        dump = recorder._dump_fr_trace if world.device.type == "cpu" else recorder._dump_nccl_trace
        trace = pickle.loads(dump())
        # Gloo's differs from what torchfrtrace expects.
        ranks = str(list(range(world.size)))
        trace["pg_config"] = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
        with open(Path(folder or ".", f"collectives-{world.rank}"), "wb") as file:
            pickle.dump(trace, file)

    return write
