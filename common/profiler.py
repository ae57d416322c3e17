"""What a few steps of a run consist of (--profile), as a trace for https://ui.perfetto.dev."""

import os

import torch
from tqdm import tqdm

BEFORE, STEPS = 6, 10  # the first steps allocate memory and choose algorithms


class Profiler:
    """Records ten steps of a run on this rank, from the seventh on, or as many as the epoch has left.

    The trace has every operation, on the device as well, and DDP's all-reduces. Source: torch.profiler.
    """

    def __init__(self, folder):
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it prints lines of its own, one an error without a GPU
        self.folder, self.step_number, self.recorded = folder, 0, 0
        schedule = torch.profiler.schedule(wait=BEFORE - 1, warmup=1, active=STEPS, repeat=1)
        self.profile = torch.profiler.profile(schedule=schedule)
        self.profile.start()

    def step(self, epoch, step, last):
        """Call it after each step of training; writes the trace once it is whole, and says so."""
        if self.profile is None:
            return
        self.step_number += 1
        self.recorded = self.step_number - BEFORE
        if self.recorded < STEPS and not (last and self.recorded > 0):
            self.profile.step()
            return
        profile, self.profile = self.profile, None
        profile.stop()
        path = self.folder / f"trace-epoch-{epoch + 1:04d}-step-{step:06d}.json.gz"
        profile.export_chrome_trace(str(path))
        tqdm.write(f"profile of {self.recorded} steps in {path}: open it in https://ui.perfetto.dev")

    def finish(self):
        """Say at the end of the run if it had too few steps."""
        if self.profile is not None:
            self.profile.stop()
            print(f"no profile: it begins after {BEFORE} steps, and the run had {self.step_number}")
