"""What a run ran on: for its first line, results.json and the tables of benchmarks/."""

import contextlib
import importlib.metadata
import os
import platform
from pathlib import Path

import torch


def versions():
    """The versions of Python and of those of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in ("torch", "torchvision", "horovod", "apex"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def hardware(device):
    """The name of the GPU that `device` is, or how many cores the machine has."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{os.cpu_count()} cores"


def cpu():
    """The name of the CPU, as the kernel has it (on Linux)."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
