import shutil
import subprocess
import sys

import hypothesis
import pytest
from cluster import Cluster, need_cluster
from launch import need
from recipes import ROOT, SHARED_DATA

# Beside other tests everything can be slow
hypothesis.settings.register_profile(
    "slow", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("slow")
FOLDERS = {"mnist": "MNIST", "cifar10": "cifar-10-batches-py"}


@pytest.fixture(scope="session")
def real_data(tmp_path_factory):
    """A function that gives a folder with a real data set: that of CI, or a copy of data/."""
    folder = tmp_path_factory.mktemp("real")

    def unpack(dataset):
        name = FOLDERS[dataset]
        if SHARED_DATA.exists():
            command = [sys.executable, SHARED_DATA / "unpack.py", folder, "--only", dataset]
            subprocess.run(command, check=True)
        else:
            there = (ROOT / "data" / name).exists()
            need(there, f"real images: python {dataset}/single.py --dry-run downloads them")
            shutil.copytree(ROOT / "data" / name, folder / name, dirs_exist_ok=True)
        return folder

    return unpack


@pytest.fixture(scope="session")
def cluster():
    need_cluster()
    with Cluster() as cluster:
        yield cluster
