"""Run a recipe, and print what a step of it costs on the GPU, as a line of JSON.

    python benchmarks/probe.py mnist/single.py --synthetic
    torchrun --nproc-per-node=1 benchmarks/probe.py mnist/ddp_launch.py --synthetic

steps_per_sec leaves out the first ten steps; waits are the lines at which Python waited for the GPU, as
torch.cuda.set_sync_debug_mode reports them, in the same steps; peak_memory is in GiB. SEARCH=0 turns off
cudnn.benchmark, and NVIDIA_TF32_OVERRIDE=0 (NVIDIA's own variable) TF32.
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

WARM = 10  # steps in which memory is allocated and models are compiled

waits, times, calls = [], [], itertools.count()


def after_step(*_):
    if "horovod.torch" in sys.modules and next(calls) % 2:
        return  # its optimizer calls this twice in a step
    times.append(time.perf_counter())
    if not torch.cuda.is_available():
        return
    if len(times) == 1:
        torch.cuda.set_sync_debug_mode("warn")
        torch.backends.cudnn.benchmark = os.environ.get("SEARCH") != "0"
    if len(times) == WARM:
        torch.cuda.synchronize()
        waits.clear()
        times[-1] = time.perf_counter()


def count(message, category, filename, lineno, *_):
    if "synchronizing CUDA operation" in str(message):
        waits.append(f"{os.path.basename(filename)}:{lineno}")


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    warnings.simplefilter("always")
    warnings.showwarning = count
    optimizer.register_optimizer_step_post_hook(after_step)
    runpy.run_path(sys.argv[0], run_name="__main__")
    if os.environ.get("RANK", "0") == "0":
        took = times[-1] - times[WARM - 1] if len(times) > WARM else float("nan")
        print(json.dumps({"steps": len(times), "steps_per_sec": (len(times) - WARM) / took,
                          "waits": collections.Counter(waits),
                          "peak_memory": torch.cuda.max_memory_allocated() / 2**30}))
