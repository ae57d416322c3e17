"""The CPU time that Linux allows this process and its neighbours in a control group (cgroup)."""

import math
from contextlib import suppress
from pathlib import Path


def cgroup_folders(root: Path = Path("/")) -> list[Path]:
    """The folders of this process's cgroups and of those above them: each limit applies.

    Version 1 has a tree of folders per controller, version 2 has one tree. Empty if there is none.
    """
    found = []
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                tree = root / "sys/fs/cgroup" / controller
                folder = tree / path.lstrip("/")
                # In a container the path can be the host's, which does not exist here.
                found += [folder, *folder.parents[: len(folder.relative_to(tree).parts)]]
    return [folder for folder in found if folder.is_dir()]


def numbers_in(path: Path) -> list[float]:
    """The numbers in a cgroup's file, where "max" is infinity; none if there is no such file."""
    if not path.exists():
        return []
    return [math.inf if word == "max" else int(word) for word in path.read_text().split()]


def cpu_quota(root: Path = Path("/")) -> float:
    """How many CPUs this process and its neighbours in the cgroup may use at a time."""
    quotas = [math.inf]
    for folder in cgroup_folders(root):
        of_version_1 = [
            *numbers_in(folder / "cpu.cfs_quota_us"),
            *numbers_in(folder / "cpu.cfs_period_us"),
        ]
        for limit in (numbers_in(folder / "cpu.max"), of_version_1):
            # Version 1 has a quota of -1 for no limit.
            if limit and limit[0] > 0:
                quota, period = limit
                quotas.append(quota / period)
    return min(quotas)
