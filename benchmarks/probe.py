"""Run a recipe, and print what a step of it costs on the GPU, as a line of JSON.

    python benchmarks/probe.py mnist/single.py --synthetic
    torchrun --nproc-per-node=1 benchmarks/probe.py mnist/ddp_launch.py --synthetic

steps_per_sec leaves out the first twenty steps; waits are the lines at which Python waited for the
GPU in the other steps, as torch.cuda.set_sync_debug_mode reports them; peak_memory is in GiB.
SEARCH=0 turns off cudnn.benchmark, and NVIDIA_TF32_OVERRIDE=0 (NVIDIA's own variable) TF32.
"""

import collections
import itertools
import json
import os
import runpy
import sys
import time
import warnings

import torch
import torch.optim.optimizer as optimizer

# Steps in which memory is allocated, models are compiled, and a CUDA graph is captured.
WARM = 20

# Since_step: the waits since the last step.
waits, since_step, times, calls = [], [], [], itertools.count()


def now():
    """The time when the GPU has done what it was given: an event, or without a GPU seconds."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class CountedGraph(torch.cuda.CUDAGraph):
    """With --cuda-graph a step is a replay, in which no optimizer of Python runs."""

    def replay(self):
        super().replay()
        after_step()


def after_step(*_):
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return
    horovod = sys.modules.get("horovod.torch")
    if horovod and horovod.is_initialized() and next(calls) % 2:
        return  # its optimizer calls this twice in a step
    times.append(now())
    if len(times) == 1 and torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("warn")
    if len(times) > WARM:
        waits.extend(since_step)
    since_step.clear()


def seconds():
    """Between the end of step WARM and the end of the last one."""
    if len(times) <= WARM:
        return float("nan")
    first, last = times[WARM - 1], times[-1]
    if not torch.cuda.is_available():
        return last - first
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def count(message, category, filename, lineno, *_):
    if "synchronizing CUDA operation" in str(message):
        since_step.append(f"{os.path.basename(filename)}:{lineno}")


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    warnings.simplefilter("always")
    warnings.showwarning = count
    optimizer.register_optimizer_step_post_hook(after_step)
    torch.cuda.CUDAGraph = CountedGraph
    if os.environ.get("SEARCH") == "0":
        # An attribute now: what the recipe sets does not reach cuDNN.
        type(torch.backends.cudnn).benchmark = False
    runpy.run_path(sys.argv[0], run_name="__main__")
    if os.environ.get("RANK", "0") == "0":
        print(
            json.dumps(
                {
                    "steps": len(times),
                    "steps_per_sec": (len(times) - WARM) / seconds(),
                    "waits": collections.Counter(waits),
                    "peak_memory": torch.cuda.max_memory_allocated() / 2**30,
                }
            ),
            flush=True,
        )
    # A rank ends without destructors of the process group, which can abort it.
    os._exit(0)
