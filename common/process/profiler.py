"""--profile: a trace of ten steps, for https://ui.perfetto.dev."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from common.errors import show


def trace(batches: Iterable, path: Path) -> Iterator:
    """Yield `batches`, and write a trace of ten of their steps to `path` (.json.gz).

    It starts after six steps, as the first ones allocate memory. With fewer than seven there is no
    trace.
    """
    # Else Kineto logs to stderr, on a CPU even an error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    profiler = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=5, warmup=1, active=10, repeat=1),
        on_trace_ready=lambda finished: finished.export_chrome_trace(str(path)),
    )
    try:
        with profiler:
            for batch in batches:
                yield batch
                profiler.step()
    finally:
        # Also if the loop was left early.
        show(f"--profile: {path if path.exists() else 'no trace: fewer than 7 steps'}")
