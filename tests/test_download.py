"""Downloads, from a server on this machine: whole files appear, and nothing of what was stalled, cut or changed."""

import gzip
import hashlib
import http.server
import io
import multiprocessing
import os
import tarfile
import threading
import time

import pytest
import torch
from torchvision.datasets import CIFAR10, MNIST

from common import files, flags


class Server(http.server.ThreadingHTTPServer):
    """Serves the dict `files` ({name: bytes}) on a free port while a `with` block runs; `fault` spoils each answer."""

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
            content = content[:half] + bytes([content[half] ^ 1]) + content[half + 1:]
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[:half] if fault in ("truncated", "stalled") else content)
        if fault == "stalled":
            time.sleep(2)
        if fault == "slow":
            time.sleep(0.5)

    def log_message(self, *_):
        pass


def args_for(dataset, folder):
    return flags.parser("", dataset, ("convnet",), 1, 1, 1, 0).parse_args(["--data-dir", str(folder)])


@pytest.fixture
def mnist(real_data, monkeypatch):
    """The files that a mirror of MNIST has, as torchvision then expects them."""
    raw = real_data("mnist") / "MNIST" / "raw"
    files = {f"{path.name}.gz": gzip.compress(path.read_bytes(), compresslevel=1) for path in sorted(raw.iterdir())}
    monkeypatch.setattr(MNIST, "resources", [(name, md5(content)) for name, content in files.items()])
    return files


def md5(content):
    return hashlib.md5(content).hexdigest()


def refused(dataset, folder, capsys):
    """The line with which a download ends; it leaves nothing."""
    with pytest.raises(SystemExit, match="2"):
        files.download(args_for(dataset, folder))
    assert not folder.exists(), "a download that failed leaves nothing"
    line = capsys.readouterr().err.splitlines()[-1]
    assert "the download failed" in line
    assert "bring the files" in line
    return line


@pytest.mark.parametrize("fault", ["wrong bytes", "truncated", "stalled"])
def test_spoiled(fault, mnist, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(files, "STALLED", 0.5)
    with Server(mnist, fault) as server:
        monkeypatch.setattr(MNIST, "mirrors", [server.url])
        started = time.monotonic()
        refused("mnist", tmp_path / "data", capsys)
        assert time.monotonic() - started < 20


def test_second_mirror(mnist, tmp_path, monkeypatch, real_data):
    with Server(mnist, "wrong bytes") as bad, Server(mnist) as good:
        monkeypatch.setattr(MNIST, "mirrors", [bad.url, good.url])
        files.download(args_for("mnist", tmp_path / "data"))
        assert bad.answers
    for path in (real_data("mnist") / "MNIST" / "raw").iterdir():
        assert (tmp_path / "data" / "MNIST" / "raw" / path.name).read_bytes() == path.read_bytes()
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["MNIST"], "nothing else is left"


def download_alone(args):
    torch.set_num_threads(1)  # OpenMP's threads did not come along in the fork
    files.download(args)


def test_two_processes(mnist, tmp_path, monkeypatch):
    """One downloads, the other waits; what a killed process left is swept."""
    (tmp_path / "data" / ".downloading-stale").mkdir(parents=True)
    with Server(mnist, "slow") as server:
        monkeypatch.setattr(MNIST, "mirrors", [server.url])
        files.download(args_for("mnist", tmp_path / "alone"))
        requests = len(server.answers)
        fork = multiprocessing.get_context("fork")
        both = [fork.Process(target=download_alone, args=(args_for("mnist", tmp_path / "data"),), daemon=True)
                for _ in range(2)]
        for process in both:
            process.start()
        for process in both:
            process.join(60)
        assert [process.exitcode for process in both] == [0, 0]
        assert len(server.answers) == 2 * requests, "one of the two downloads"
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["MNIST"]


def archive(members):
    """A .tar.gz of the TarInfo and bytes in `members`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def link(name, target, kind):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def test_archive(tmp_path, monkeypatch):
    served = archive([(tarfile.TarInfo(name), name.encode()) for name in (*files.CIFAR10_FILES, "readme.html")])
    with Server({"cifar.tar.gz": served}) as server:
        monkeypatch.setattr(CIFAR10, "url", f"{server.url}cifar.tar.gz")
        monkeypatch.setattr(CIFAR10, "tgz_md5", md5(served))
        files.download(args_for("cifar10", tmp_path))
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == \
           sorted(files.CIFAR10_FILES)
    assert (tmp_path / files.CIFAR10_FILES[0]).read_text() == files.CIFAR10_FILES[0]


@pytest.mark.parametrize("member", [
    tarfile.TarInfo("../canary"), tarfile.TarInfo("/tmp/canary"), tarfile.TarInfo("cifar-10-batches-py/../../canary"),
    link("cifar-10-batches-py/data_batch_1", "/etc/passwd", tarfile.SYMTYPE),
    link("cifar-10-batches-py/data_batch_1", "../../canary", tarfile.LNKTYPE),
], ids=lambda member: f"{member.name}-{member.linkname}")
def test_archive_that_leads_out(member, tmp_path, monkeypatch, capsys):
    """Refused although its digest is right, before anything is unpacked."""
    served = archive([*((tarfile.TarInfo(name), b"x") for name in files.CIFAR10_FILES[1:]), (member, b"")])
    with Server({"cifar.tar.gz": served}) as server:
        monkeypatch.setattr(CIFAR10, "url", f"{server.url}cifar.tar.gz")
        monkeypatch.setattr(CIFAR10, "tgz_md5", md5(served))
        assert f"leads out of it: {member.name}" in refused("cifar10", tmp_path / "data", capsys)
    assert not list(tmp_path.iterdir())
    assert not os.path.exists("/tmp/canary")


def test_archive_with_wrong_digest_is_not_opened(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(files, "_unpack", lambda *_: pytest.fail("it was opened"))
    with Server({"cifar.tar.gz": archive([(tarfile.TarInfo(name), b"x") for name in files.CIFAR10_FILES])}) as server:
        monkeypatch.setattr(CIFAR10, "url", f"{server.url}cifar.tar.gz")
        refused("cifar10", tmp_path / "data", capsys)
