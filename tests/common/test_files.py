"""What a machine refuses for a moment is tried again, and is never taken for damage."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from launch import ENVIRONMENT, need
from recipes import ROOT

from common import checkpoint, files
from common.errors import InputError, RunError

pytestmark = pytest.mark.check

# A file system for paths with /fuse/, which a script arms: its next open but `skip` fails with
# `code`, in C++ and Rust, too, and it maps no file.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
static int left = -1, number, maps = 1;
void arm(int skip, int code, int can_map) { left = skip; number = code; maps = can_map; }
int fired(void) { return left < 0; }
static int fails(const char *path) {
    if (left < 0 || !path || !strstr(path, "/fuse/") || left-- > 0) return 0;
    errno = number;
    return 1;
}
#define OPEN(name) int name(const char *path, int flags, ...) { \
    static int (*real)(const char *, int, ...); va_list v; va_start(v, flags); \
    int mode = va_arg(v, int); va_end(v); if (!real) real = dlsym(RTLD_NEXT, #name); \
    return fails(path) ? -1 : real(path, flags, mode); }
OPEN(open)
OPEN(open64)
#define MAP(name) void *name(void *a, size_t n, int p, int f, int fd, off_t o) { \
    static void *(*real)(void *, size_t, int, int, int, off_t); char link[64], path[4096] = ""; \
    if (!real) real = dlsym(RTLD_NEXT, #name); \
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd); \
    if (fd >= 0 && !maps && readlink(link, path, sizeof path - 1) > 0 && strstr(path, "/fuse/")) { \
        errno = ENODEV; return MAP_FAILED; } \
    return real(a, n, p, f, fd, o); }
MAP(mmap)
MAP(mmap64)
"""

READS = """
import ctypes, errno, os, sys, tarfile
from pathlib import Path

sys.path[:0] = [sys.argv[1], f"{sys.argv[1]}/imagenet"]
import archives
import torch
from PIL import Image
from safetensors.torch import save_file

from common import checkpoint, files, weights
from images import folders

shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
files.PAUSES = (0, 0)
fuse = Path.cwd() / "fuse"
fuse.mkdir()
model = torch.nn.Linear(3, 2).state_dict()
checkpoint.save(fuse, {"model": model}, {})
checkpoint.save(fuse, {"model": model}, {})
torch.save(model, fuse / "model.pth")
save_file(model, fuse / "model.safetensors", {"classes": '["a"]'})
for name in "ab":
    (fuse / "tree" / name).mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(fuse / "tree" / name / "1.png")
with tarfile.open(fuse / "train.tar", "w") as tar:
    tar.add(fuse / "tree", "")
archives.Archive(fuse / "train.tar", "train")
inode = (fuse / "train.tar.train.index").stat().st_ino
folder = folders.Folder(fuse / "tree")

def archive():
    return archives.Archive(fuse / "train.tar", "train").read(1)

reads = [
    lambda: checkpoint.find("auto", fuse).path,
    lambda: list(weights.read_weights(fuse / "last.pt")[0]),
    lambda: list(weights.read_weights(fuse / "model.pth")[0]),
    lambda: weights.read_weights(str(fuse / "model.safetensors"))[1],
    lambda: folder[1][0].size,
    archive,
]
for read in reads:
    expected = read()
    shim.arm(-1, 0, 0)
    assert read() == expected, "no mmap"
    for code in (errno.ESTALE, errno.EMFILE):
        for skip in range(9):
            shim.arm(skip, code, 1)
            assert read() == expected, (os.strerror(code), skip)
            if not shim.fired():
                break
        assert skip > 0 or read is reads[4]
    shim.arm(-1, 0, 1)
assert (fuse / "train.tar.train.index").stat().st_ino == inode, "the index was made again"
print("read")
"""


def test_what_a_machine_refuses_once(tmp_path):
    """Each open of each kind of file, and a file system without mmap."""
    need(shutil.which("gcc"), "gcc")
    (tmp_path / "shim.c").write_text(SHIM)
    build = ["gcc", "-shared", "-fPIC", "-o", "shim.so", "shim.c", "-ldl"]
    subprocess.run(build, cwd=tmp_path, check=True)
    variables = {**os.environ, **ENVIRONMENT, "LD_PRELOAD": str(tmp_path / "shim.so")}
    script = [sys.executable, "-c", READS, str(ROOT)]
    done = subprocess.run(script, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.stdout.endswith("read\n"), done.stderr


def always(code):
    def refuses(*_, **__):
        raise OSError(code, os.strerror(code))

    return refuses


def test_what_a_machine_goes_on_to_refuse(tmp_path, monkeypatch):
    """It is named, and no file is set aside."""
    monkeypatch.setattr(files, "PAUSES", (0, 0))
    for _ in range(2):
        checkpoint.save(tmp_path, {"position": 1}, {})
    monkeypatch.setattr(checkpoint.zipfile, "ZipFile", always(errno.EIO))
    with pytest.raises(InputError, match=r"--resume auto: .*last.pt: Input/output error"):
        checkpoint.find("auto", tmp_path)


def test_a_save_that_is_refused_for_a_moment(tmp_path, monkeypatch):
    """By a server that does not answer; what it goes on to refuse ends the run."""
    monkeypatch.setattr(files, "PAUSES", (0, 0))
    checkpoint.save(tmp_path, {"position": 1}, {})
    real = os.replace
    left = [errno.EBUSY, errno.ETIMEDOUT]

    def replace(*arguments):
        if left:
            always(left.pop())()
        real(*arguments)

    monkeypatch.setattr(os, "replace", replace)
    checkpoint.save(tmp_path, {"position": 2}, {})
    assert checkpoint.read(tmp_path / "last.pt")[0]["position"] == 2
    assert checkpoint.read(tmp_path / "previous.pt")[0]["position"] == 1
    left += [errno.EBUSY] * 9
    with pytest.raises(RunError, match="Device or resource busy"):
        checkpoint.save(tmp_path, {"position": 3}, {})


def test_a_file_with_a_lease(tmp_path):
    """A file server has one: who opens the file waits until it is given back."""
    path = tmp_path / "1.jpg"
    path.write_bytes(b"image")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGIO})
        descriptor = os.open(path, os.O_RDWR)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        os.write(writer, b".")
        signal.sigwait({signal.SIGIO})
        time.sleep(0.5)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        os._exit(0)
    os.read(reader, 1)
    assert files.read_regular(path) == b"image"
    assert os.waitpid(child, 0)[1] == 0


def test_no_pipe_is_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    thread = threading.Thread(
        target=pytest.raises, args=(OSError, files.read_regular, tmp_path / "pipe")
    )
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
