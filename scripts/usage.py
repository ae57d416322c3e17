"""Measure what a machine does while it trains: its GPUs, its CPU and its memory.

    python scripts/usage.py runs/usage &
    python mnist/single.py
    kill %1

Every 5 seconds it appends a line to the file HOST.jsonl in that folder, and writes the same for
TensorBoard. On SIGTERM or Ctrl-C it prints the means and ends. It is a process of its own, so the
run never waits for it. On a cluster each node of a job measures itself:

    USAGE=runs/usage sbatch slurm/ddp_2nodes.sh

It needs psutil, and for NVIDIA's GPUs nvidia-ml-py. requirements.txt has both.
"""

import argparse
import json
import os
import select
import signal
import socket
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path


def find_gpus():
    """Return (NVML, handles of this machine's GPUs), or no handles without the package or a GPU."""
    try:
        import pynvml
    except ImportError:
        if Path("/proc/driver/nvidia").exists():
            print("usage.py: pip install nvidia-ml-py, to measure the GPUs", file=sys.stderr)
        return None, []
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return pynvml, []
    return pynvml, [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(count)]


def of_gpu(nvml, handle):
    """The figures that a GPU supports."""
    reads = {
        # The share of time during which a kernel ran.
        "use": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        "gib": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / 2**30,
        "watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "celsius": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
    }
    figures = {}
    for name, read in reads.items():
        try:
            figures[name] = read()
        except nvml.NVMLError:
            continue
    return figures


def measure(psutil, nvml, gpus):
    """{name: number} of this machine: averages since the last call, or current values."""
    figures = {"cpu/use": psutil.cpu_percent() / 100}
    figures["cpu/gib"] = psutil.virtual_memory().used / 2**30
    for number, handle in enumerate(gpus):
        for name, value in of_gpu(nvml, handle).items():
            figures[f"gpu{number}/{name}"] = value
    return figures


UNITS = {"use": "{:.0%}", "gib": "{:.1f} GiB", "watts": "{:.0f} W", "celsius": "{:.0f} °C"}


def summary(host, seconds, sums, counts):
    """One line with the means of all figures, from {name: sum} and {name: count}."""
    parts = {}
    for name, total in sums.items():
        device, kind = name.split("/")
        mean = total / counts[name]
        parts.setdefault(device, []).append(UNITS[kind].format(mean))
    devices = "; ".join(f"{device} {', '.join(texts)}" for device, texts in parts.items())
    return f"{host}, mean of {timedelta(seconds=round(seconds))}: {devices}"


def main():
    # Not common.flags: it imports torch, which would take CPU time from the run.
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="folder for the figures of all machines")
    parser.add_argument(
        "--seconds", type=float, default=5, help="seconds between two lines (default: 5)"
    )
    args = parser.parse_args()
    if not args.folder:
        parser.error("folder is empty: give a path, or set the variable that should hold it")
    args.folder = Path(args.folder)
    if args.seconds <= 0:
        parser.error(f"--seconds {args.seconds:g}: give a number above 0")
    try:
        import psutil
        from tensorboard.summary import Writer
    except ImportError as error:
        parser.error(f"pip install psutil tensorboard ({error})")
    # A pipe, not a threading.Event: its wait() holds a lock, so the handler could deadlock.
    over, end = os.pipe()
    os.set_blocking(end, False)
    # srun passes on USR1, but not TERM.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: os.write(end, b"."))
    # SIGUSR2 asks the ranks for their stacks: ignore it here.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    host = socket.gethostname()
    try:
        args.folder.mkdir(parents=True, exist_ok=True)
        writer = Writer(str(args.folder / host))
    except OSError as error:
        parser.error(f"{args.folder}: {error.strerror}")
    nvml, gpus = find_gpus()
    # The first call starts the interval to measure.
    psutil.cpu_percent()
    began = time.time()
    # Sums only, not all figures: a run can take weeks.
    sums = Counter()
    counts = Counter()
    while not select.select([over], [], [], args.seconds)[0]:
        figures = measure(psutil, nvml, gpus)
        sums.update(figures)
        counts.update(figures.keys())
        now = time.time()
        with open(args.folder / f"{host}.jsonl", "a") as file:
            file.write(json.dumps({"time": now, **figures}) + "\n")
        for name, value in figures.items():
            writer.add_scalar(f"usage/{name}", value, round(now - began))
        writer.flush()
    writer.close()
    if sums:
        print(summary(host, time.time() - began, sums, counts))


if __name__ == "__main__":
    main()
