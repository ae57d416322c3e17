"""The machine and the versions behind a measurement."""

import contextlib
import ctypes
import datetime
import importlib.metadata
import math
import os
import platform
import subprocess
from pathlib import Path

import torch

from common.process.cgroups import cgroup_folders, numbers_in


def versions():
    """The versions of Python, of installed packages, and of libraries that these use."""
    found = {"python": platform.python_version()}
    for package in ("torch", "torchvision", "horovod", "apex"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    if torch.cuda.is_available():
        found["CUDA"] = torch.version.cuda
        # torch sees AMD's GPUs as CUDA devices, and calls their library NCCL.
        found["ROCm"] = torch.version.hip
        with contextlib.suppress(AttributeError):  # torch was built without NCCL
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    with contextlib.suppress(AttributeError):  # where Horovod has loaded no MPI
        text = ctypes.create_string_buffer(8192)
        ctypes.CDLL(None).MPI_Get_library_version(text, ctypes.byref(ctypes.c_int()))
        found["MPI library"] = text.value.decode().split(",")[0]
    return {name: version for name, version in found.items() if version}


def commit(folder=Path(__file__).parent):
    """The commit of the repository that holds `folder`.

    It ends with -dirty if files other than results differ from it.
    """

    def git(*words):
        return subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True)

    with contextlib.suppress(OSError):  # there is no git
        if name := git("describe", "--always").stdout.strip():
            others = (":/", ":(top,exclude)benchmarks/results", ":(top,exclude)README.md")
            differs = git("diff", "--quiet", "HEAD", "--", *others).returncode != 0
            return f"{name}-dirty" if differs else name
    return "unknown"


def about(command: str, threads=None) -> dict:
    """The command, hardware, versions, date and commit of a measurement."""
    count = torch.cuda.device_count()
    gpus = f"{count} x {torch.cuda.get_device_name(0)}" if count else "no GPU"
    found = {"command": command, "hardware": f"{os.cpu_count()} cores of an {cpu()}, {gpus}"}
    if threads:
        found["threads"] = threads
    date = str(datetime.date.today())
    return found | {"versions": versions(), "commit": commit(), "date": date}


def in_words(found: dict) -> str:
    """The dict that about() returns, as a sentence."""
    threads = f", threads per process: {found['threads']}" if "threads" in found else ""
    versions = ", ".join(map(" ".join, found["versions"].items()))
    return (
        f"`{found['command']}`; {found['hardware']}{threads}; {versions}; "
        f"commit {found['commit']}, {found['date']}."
    )


def cpu():
    """The name of the CPU, as the kernel reports it (on Linux)."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def memory_of_cgroup(root=Path("/")):
    """(bytes in use, limit) of the cgroup that is nearest to its limit, or (0, infinity).

    The kernel drops the file cache before it kills a process, so the cache does not count as in
    use. The cgroup that first reads a file is charged for it.
    """
    found = [(0, math.inf)]
    for folder in cgroup_folders(root):
        use = numbers_in(folder / "memory.current") + numbers_in(folder / "memory.usage_in_bytes")
        limit = numbers_in(folder / "memory.max") + numbers_in(folder / "memory.limit_in_bytes")
        if use and limit:
            lines = (folder / "memory.stat").read_text().splitlines()
            counts = dict(line.split() for line in lines)
            # In version 1, a count without "total_" leaves out nested cgroups.
            cache = sum(
                int(counts.get(f"total_{part}", counts.get(part, 0)))
                for part in ("active_file", "inactive_file")
            )
            found.append((use[0] - cache, limit[0]))
    return max(found, key=lambda use_and_limit: use_and_limit[0] / use_and_limit[1])
