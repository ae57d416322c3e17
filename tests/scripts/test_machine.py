"""scripts/machine.py: the limits of cgroups, in trees of both versions."""

import math

import pytest

from common.process.cgroups import cpu_quota
from scripts.machine import memory_of_cgroup

MIB = 2**20
# What the kernel shows of no limit in version 1.
NONE = 9223372036854771712
CACHE = f"active_file {5 * MIB}\ninactive_file {15 * MIB}\n"
TOTAL_CACHE = f"total_active_file {5 * MIB}\ntotal_inactive_file {15 * MIB}\n"
# A job in a system slice with the limits above it, and a container that sees its own cgroup as /.
TREES = {
    "version 2": {
        "proc/self/cgroup": "0::/pod/container\n",
        "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/pod/container/cpu.max": "max 100000\n",
        "sys/fs/cgroup/pod/memory.max": f"{100 * MIB}\n",
        "sys/fs/cgroup/pod/memory.current": f"{80 * MIB}\n",
        "sys/fs/cgroup/pod/memory.stat": f"anon 1\n{CACHE}",
        "sys/fs/cgroup/pod/container/memory.max": "max\n",
        "sys/fs/cgroup/pod/container/memory.current": f"{70 * MIB}\n",
        "sys/fs/cgroup/pod/container/memory.stat": f"anon 1\n{CACHE}",
    },
    "version 1": {
        "proc/self/cgroup": "4:memory:/docker/1234\n2:cpu,cpuacct:/docker/1234\n1:name=systemd:/\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{100 * MIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{80 * MIB}\n",
        "sys/fs/cgroup/memory/memory.stat": "active_file 1\ninactive_file 1\n" + TOTAL_CACHE,
    },
}


def write_tree(files, root):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.check
@pytest.mark.parametrize("version", TREES)
def test_limits_of_cgroups(version, tmp_path):
    write_tree(TREES[version], tmp_path)
    assert cpu_quota(tmp_path) == 1.5
    assert memory_of_cgroup(tmp_path) == (60 * MIB, 100 * MIB)


@pytest.mark.check
def test_a_container_whose_cgroup_is_the_root_that_it_sees(tmp_path):
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}
    write_tree(files, tmp_path)
    assert cpu_quota(tmp_path) == 2.5


@pytest.mark.check
def test_no_limits(tmp_path):
    assert cpu_quota(tmp_path) == math.inf
    assert memory_of_cgroup(tmp_path) == (0, math.inf)
    files = TREES["version 1"] | {
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{NONE}\n",
    }
    write_tree(files, tmp_path)
    assert cpu_quota(tmp_path) == math.inf
    use, limit = memory_of_cgroup(tmp_path)
    assert use < limit / 1e9
