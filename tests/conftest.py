import compileall
import functools
import importlib.util
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import filelock
import hypothesis
import numpy as np
import pytest
import torch
from cluster import Cluster, need_cluster
from launch import need
from PIL import Image
from pods import build, need_podman
from recipes import DATASETS, ROOT, SHARED_DATA

# Beside other tests everything can be slow. The examples are the same each time, as a change must
# not be refused for another's fault; make fuzz draws new ones.
hypothesis.settings.register_profile(
    "tests",
    deadline=None,
    derandomize="FUZZ" not in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tests")
FOLDERS = {"mnist": "MNIST", "cifar10": "cifar-10-batches-py"}

# What tests start imports sitecustomize.py from there.
START = str(ROOT / "tests" / "helpers" / "start")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [START, os.environ.get("PYTHONPATH")]))

# Several threads would wait for each other by spinning, on cores that other tests use.
torch.set_num_threads(1)


def pytest_configure():
    """Compile our modules once. With PYTHONDONTWRITEBYTECODE=1 each process would do it again."""
    for folder in ("common", "images", *(dataset.name for dataset in DATASETS)):
        compileall.compile_dir(ROOT / folder, quiet=1)


@pytest.fixture(scope="session")
def real_data(tmp_path_factory):
    """A function that gives the folder of a real data set, which all workers share."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        # The folder of all workers.
        folder = folder.parent

    def unpack(dataset):
        with filelock.FileLock(folder / "real.lock"):
            if not (folder / FOLDERS[dataset]).exists():
                lay_out(dataset, folder)
        return folder

    return unpack


def lay_out(dataset, folder):
    """Put a real data set into `folder`: that of CI, or a copy of data/."""
    if SHARED_DATA.exists() and dataset == "cifar10":
        lay_out_a_tenth_of_cifar10(folder / FOLDERS[dataset])
        return
    if SHARED_DATA.exists():
        command = [sys.executable, SHARED_DATA / "unpack.py", folder, "--only", dataset]
        subprocess.run(command, check=True)
        return
    name = FOLDERS[dataset]
    there = (ROOT / "data" / name).exists()
    need(there, f"real images: python {dataset}/single.py --dry-run downloads them")
    shutil.copytree(ROOT / "data" / name, folder / name)


def lay_out_a_tenth_of_cifar10(folder):
    """Write every tenth image in the format of CIFAR-10. (To decode all takes half a minute.)"""
    rows = {"train": [], "test": []}
    classes = []
    with tarfile.open(SHARED_DATA / "cifar10-jpeg.tar.xz") as tar:
        for member in tar:
            if member.name.endswith("0.jpg"):
                split, name, _ = member.name.split("/")
                if name not in classes:
                    classes.append(name)
                pixels = np.asarray(Image.open(tar.extractfile(member)).convert("RGB"))
                rows[split].append((classes.index(name), pixels.transpose(2, 0, 1).flatten()))
    files = {f"data_batch_{number + 1}": rows["train"][number::5] for number in range(5)}
    files["test_batch"] = rows["test"]
    folder.mkdir()
    for name, part in files.items():
        labels, images = zip(*part, strict=True)
        batch = {"labels": list(labels), "data": np.stack(images)}
        (folder / name).write_bytes(pickle.dumps(batch))


@pytest.fixture(scope="session")
def apex():
    """The folder to put on PYTHONPATH for NVIDIA Apex: "" if it is installed.

    It skips in CI, too: the tag with amp is only on GitHub.
    """
    if importlib.util.find_spec("apex"):
        return ""
    folder = os.environ.get("APEX", "")
    if folder and (Path(folder) / "apex" / "__init__.py").exists():
        return folder
    pytest.skip(
        "NVIDIA Apex: see docs/install.md, or set APEX to a folder with its Python sources "
        "(tag 25.05)"
    )


@pytest.fixture(scope="session")
def cluster():
    need_cluster()
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def image():
    """A function that gives the name of the image of a target of the Containerfile."""
    need_podman()
    return functools.cache(build)


# No longer than a module: in the meantime this process has a running event loop.
@pytest.fixture(scope="module")
def browser():
    need(shutil.which("chromium"), "apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium refuses its sandbox to root.
        yield playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
