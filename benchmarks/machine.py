"""What a measurement ran on."""

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch


def versions():
    """The versions of Python, of the installed packages, and of the libraries under torch and
    Horovod.
    """
    found = {"python": platform.python_version()}
    for package in ("torch", "torchvision", "horovod", "apex"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    if torch.cuda.is_available():
        found |= {"CUDA": torch.version.cuda, "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    with contextlib.suppress(AttributeError):  # where Horovod has loaded no MPI
        text = ctypes.create_string_buffer(8192)
        ctypes.CDLL(None).MPI_Get_library_version(text, ctypes.byref(ctypes.c_int()))
        found["MPI library"] = text.value.decode().split(",")[0]
    return found


def commit(folder=Path(__file__).parent):
    """The commit of the repository that holds `folder`.

    -dirty if files other than results differ from it.
    """

    def git(*words):
        return subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True)

    with contextlib.suppress(OSError):  # there is no git
        if name := git("describe", "--always").stdout.strip():
            others = ":/", ":(top,exclude)benchmarks/results", ":(top,exclude)README.md"
            return name + "-dirty" * git("diff", "--quiet", "HEAD", "--", *others).returncode
    return "unknown"


def hardware(device):
    """The name of the GPU that `device` is, or how many cores the machine has."""
    return (
        torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} cores"
    )


def cpu():
    """The name of the CPU, as the kernel reports it (on Linux)."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
