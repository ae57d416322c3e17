import subprocess
import sys

import hypothesis
import pytest
from cluster import Cluster, need_cluster
from launch import need
from recipes import ROOT

# Beside other tests everything can be slow
hypothesis.settings.register_profile(
    "slow", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("slow")
SHARED = ROOT.parent / "shared" / "data"


@pytest.fixture(scope="session")
def real_data(tmp_path_factory):
    """A function that unpacks a real data set into a folder and returns the folder."""
    folder = tmp_path_factory.mktemp("real")

    def unpack(dataset):
        need(SHARED.exists(), f"{SHARED}: the real images")
        subprocess.run(
            [sys.executable, SHARED / "unpack.py", folder, "--only", dataset], check=True
        )
        return folder

    return unpack


@pytest.fixture(scope="session")
def cluster():
    need_cluster()
    with Cluster() as cluster:
        yield cluster
