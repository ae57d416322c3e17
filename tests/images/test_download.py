"""Downloads from a server on this machine: only whole files appear."""

import gzip
import hashlib
import http.server
import io
import multiprocessing
import os
import pickle
import signal
import socket
import tarfile
import threading
import time

import numpy as np
import pytest
import torch
from launch import PATIENCE
from torchvision.datasets import CIFAR10, MNIST
from tqdm import tqdm

from cifar10 import cifar
from common.errors import InputError
from common.process import launch, signals
from mnist import digits

pytestmark = pytest.mark.check


class Server(http.server.ThreadingHTTPServer):
    """Serves the dict `files` ({name: bytes}) on a free port while a `with` block runs.

    `fault` spoils each answer.
    """

    def __init__(self, files, fault=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.fault, self.answers = files, fault, []

    def __enter__(self):
        threading.Thread(target=self.serve_forever).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/"

    def handle_error(self, *_):  # a client that gave up
        pass


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        content, fault = self.server.files[self.path.strip("/")], self.server.fault
        self.server.answers.append(self.path)
        half = len(content) // 2
        if fault == "wrong bytes":
            content = content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[:half] if fault in ("truncated", "stalled") else content)
        if fault == "stalled":
            time.sleep(30)
        if fault == "slow":
            time.sleep(0.5)

    def log_message(self, *_):
        pass


def md5(content):
    return hashlib.md5(content).hexdigest()


@pytest.fixture(scope="module")
def mnist_files(real_data):
    """The files that a mirror of MNIST has."""
    raw = real_data("mnist") / "MNIST" / "raw"
    return {
        f"{path.name}.gz": gzip.compress(path.read_bytes(), compresslevel=1)
        for path in sorted(raw.iterdir())
    }


@pytest.fixture
def mnist(mnist_files, monkeypatch):
    """The same; torchvision is told their checksums."""
    monkeypatch.setattr(
        MNIST, "resources", [(name, md5(content)) for name, content in mnist_files.items()]
    )
    return mnist_files


@pytest.fixture
def cifar10(monkeypatch):
    """The archive of a small CIFAR-10, {name: bytes}; torchvision is told its checksums."""
    generator, contents = np.random.default_rng(0), {}
    for name in cifar.TRAIN_FILES + cifar.VAL_FILES:
        batch = {
            "data": generator.integers(256, size=(20, 3072), dtype=np.uint8),
            "labels": list(range(10)) * 2,
        }
        contents[name] = pickle.dumps(batch, protocol=2)
    contents["cifar-10-batches-py/batches.meta"] = pickle.dumps({"label_names": list("abcdefghij")})
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in {**contents, "cifar-10-batches-py/readme.html": b"read me"}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    sums = {name.partition("/")[2]: md5(content) for name, content in contents.items()}
    monkeypatch.setattr(
        CIFAR10, "train_list", [[f"data_batch_{k}", sums[f"data_batch_{k}"]] for k in range(1, 6)]
    )
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": sums["batches.meta"]})
    monkeypatch.setattr(CIFAR10, "tgz_md5", md5(buffer.getvalue()))
    return {CIFAR10.filename: buffer.getvalue()}


LOAD = {"mnist": digits.load, "cifar10": cifar.load}


def files_in(folder):
    """The names of all files in a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def refused(dataset, folder):
    """The error of a download that fails; it leaves nothing, also no folder."""
    with pytest.raises(InputError) as raised:
        LOAD[dataset](folder, None, 0)
    assert not list(folder.parent.iterdir()), "a download that failed leaves nothing"
    line = str(raised.value)
    assert "\n" not in line
    assert "the download failed" in line
    assert "--synthetic" in line
    return line


@pytest.mark.parametrize("fault", ["wrong bytes", "truncated", "stalled"])
@pytest.mark.parametrize("dataset", LOAD)
def test_spoiled(fault, dataset, request, tmp_path, monkeypatch):
    set_timeout = socket.setdefaulttimeout
    # A user waits longer.
    monkeypatch.setattr(
        socket, "setdefaulttimeout", lambda seconds: set_timeout(seconds and seconds / 60)
    )
    with Server(request.getfixturevalue(dataset), fault) as server:
        monkeypatch.setattr(MNIST, "mirrors", [server.url])
        monkeypatch.setattr(CIFAR10, "url", server.url + CIFAR10.filename)
        line = refused(dataset, tmp_path / "data")
    assert fault != "stalled" or "timed out" in line
    assert socket.getdefaulttimeout() is None, "it is as before"


def test_archive(cifar10, tmp_path, monkeypatch):
    with Server(cifar10) as server:
        monkeypatch.setattr(CIFAR10, "url", server.url + CIFAR10.filename)
        cifar.load(tmp_path, None, 0)
    train, val = cifar.load(tmp_path, None, 0)  # from the files
    assert (train.tensors[0].shape, val.tensors[0].shape) == ((100, 3, 32, 32), (20, 3, 32, 32))
    assert train.tensors[1].tolist() == list(range(10)) * 10
    assert files_in(tmp_path) == sorted(cifar.TRAIN_FILES + cifar.VAL_FILES)
    assert socket.getdefaulttimeout() is None, "it is as before"


def test_what_is_there_is_kept(mnist, tmp_path, monkeypatch, real_data):
    """Only the file that is missing comes from the download."""
    *there, missing = digits.FILES
    for name in there:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(real_data("mnist") / name, tmp_path / name)
    with Server(mnist) as server:
        monkeypatch.setattr(MNIST, "mirrors", [server.url])
        digits.load(tmp_path, None, 0)
    assert all((tmp_path / name).samefile(real_data("mnist") / name) for name in there)
    assert (tmp_path / missing).read_bytes() == (real_data("mnist") / missing).read_bytes()


def as_rank(rank, folder):
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    tqdm.set_lock(threading.RLock())  # tqdm's own is the parent's, too: a killed fork would keep it
    os.environ["RANK"] = str(rank)
    with launch.plain_exits():
        digits.load(folder, None, 0)


def two_ranks(folder):
    """The exit statuses of two processes that want the data at the same time."""
    fork = multiprocessing.get_context("fork")
    both = [fork.Process(target=as_rank, args=(rank, folder), daemon=True) for rank in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(PATIENCE)
    return [process.exitcode for process in both]


def test_two_processes(mnist, tmp_path, monkeypatch):
    """One downloads, the other waits and finds the files."""
    with Server(mnist, "slow") as server:
        monkeypatch.setattr(MNIST, "mirrors", [server.url])
        assert two_ranks(tmp_path / "data") == [0, 0]
        assert len(server.answers) == 2 * len(mnist), (
            "one of the two downloads; torchvision asks for a redirect first"
        )
    assert files_in(tmp_path / "data") == sorted(digits.FILES)


def test_two_processes_that_cannot_download(mnist, tmp_path, monkeypatch, capfd):
    """Each says why; the second does not go on without the files."""
    with Server(mnist, "wrong bytes") as server:
        monkeypatch.setattr(MNIST, "mirrors", [server.url])
        assert two_ranks(tmp_path / "data") == [2, 2]
    reasons = [
        line for line in capfd.readouterr().err.splitlines() if "the download failed" in line
    ]
    assert len(reasons) == 2
    assert sum("rank 1: " in line for line in reasons) == 1
    assert all("not found or corrupted" in line for line in reasons), "torchvision's reason"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ended_by_a_signal(number, mnist, tmp_path, monkeypatch):
    """It leaves nothing: `ln -s /datasets data` would else make a link in an empty folder."""
    # The thread that handles SIGINT gets no time.
    monkeypatch.setattr(signals, "start_thread", lambda process: None)
    with Server(mnist, "stalled") as server:
        monkeypatch.setattr(MNIST, "mirrors", [server.url])
        fork = multiprocessing.get_context("fork")
        process = fork.Process(target=as_rank, args=(0, tmp_path / "data"), daemon=True)
        process.start()
        while not server.answers:
            time.sleep(0.01)
        os.kill(process.pid, number)
        process.join(PATIENCE)
    assert process.exitcode == -number
    assert not list(tmp_path.iterdir())


def test_what_sigkill_left(mnist, tmp_path, monkeypatch):
    """The next download removes it, and nothing else beside the folder."""
    (tmp_path / ".data.downloading-abc" / "MNIST").mkdir(parents=True)
    (tmp_path / ".other.downloading-abc").mkdir()
    with Server(mnist) as server:
        monkeypatch.setattr(MNIST, "mirrors", [server.url])
        digits.load(tmp_path / "data", None, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.downloading-abc", "data"]
