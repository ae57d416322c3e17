"""Machines and environments that differ from ours: it works, or one line says why not."""

import os
import re
import shutil
import signal
import subprocess

import numpy as np
import pytest
import torch
from forked import ForkedJob, compute, refused
from launch import Job, free_port, need, need_horovod, run
from PIL import Image
from recipes import ROOT
from torchvision.datasets import ImageFolder

from common.errors import InputError
from imagenet import jpegs

SINGLE = f"python {ROOT}/mnist/single.py --synthetic 320 --epochs 1 --device cpu --model lenet"
# What a file system may refuse, in C: preloaded, it answers in place of the C library.
FSYNC = """
int fsync(int fd) {
    struct stat found;
    fstat(fd, &found);
    if (S_ISDIR(found.st_mode)) { errno = ERROR; return -1; }
    return 0;
}
"""
FLOCK_AND_LINK = """
int flock(int fd, int operation) { errno = ENOSYS; return -1; }
int link(const char *from, const char *to) { errno = EPERM; return -1; }
int linkat(int a, const char *from, int b, const char *to, int flags) { errno = EPERM; return -1; }
"""
RENAME_OVER_A_FILE = """
int rename(const char *from, const char *to) {
    if (access(to, F_OK) == 0) { errno = EEXIST; return -1; }
    return renameat(AT_FDCWD, from, AT_FDCWD, to);
}
"""
HEADERS = "".join(
    f"#include <{name}.h>\n" for name in ("errno", "fcntl", "stdio", "sys/stat", "unistd")
)


def preloaded(code, folder):
    """Compile C functions to a library for LD_PRELOAD."""
    need(shutil.which("gcc"), "apt-get install gcc")
    (folder / "refuses.c").write_text(HEADERS + code)
    command = ["gcc", "-shared", "-fPIC", "-w", "refuses.c", "-o", "refuses.so"]
    subprocess.run(command, cwd=folder, check=True)
    return str(folder / "refuses.so")


@pytest.mark.parametrize("error", ["EINVAL", "EOPNOTSUPP"])
def test_a_file_system_that_cannot_sync_folders(error, tmp_path):
    """CIFS and some FUSE: borg 1287, libgit2 5356, gocryptfs 587."""
    library = preloaded(FSYNC.replace("ERROR", error), tmp_path)
    run(f"{SINGLE} --log-dir log", tmp_path, LD_PRELOAD=library)
    assert (tmp_path / "log" / "last.pt").exists()


def test_a_file_system_without_locks_and_hard_links(tmp_path):
    library = preloaded(FLOCK_AND_LINK, tmp_path)
    run(f"{SINGLE} --log-dir log", tmp_path, LD_PRELOAD=library)
    again = f"{SINGLE.replace('--epochs 1', '--epochs 2')} --log-dir log --resume auto"
    run(again, tmp_path, LD_PRELOAD=library)
    assert (tmp_path / "log" / "previous.pt").exists()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (FSYNC.replace("ERROR", "EIO"), "Input/output error"),
        (RENAME_OVER_A_FILE, "File exists"),
    ],
)
def test_a_file_system_that_cannot_save(code, reason, tmp_path):
    library = preloaded(code, tmp_path)
    output = run(f"{SINGLE} --log-dir log", tmp_path, status=2, LD_PRELOAD=library)
    assert output == (
        f"single.py: cannot write to log ({reason}): choose another --log-dir or --checkpoint-dir\n"
    )


@pytest.fixture
def tree(tmp_path):
    """Two classes of four small images, for training and validation; return the folder."""
    random = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            folder = tmp_path / "tree" / split / label
            folder.mkdir(parents=True)
            for number in range(4):
                pixels = random.integers(0, 256, (40, 40, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "tree"


def test_hidden_folders_are_no_classes_and_no_images(tree):
    shown = tree / "train" / "cat"
    for hidden in (shown / ".ipynb_checkpoints", tree / "train" / ".thumbnails"):
        hidden.mkdir()
        shutil.copy(shown / "0.png", hidden)
    train, val = jpegs.image_tree(tree)
    assert len(train) == len(val) == 8
    assert train.classes == ["cat", "dog"]


def test_a_tree_within_a_hidden_folder(tree):
    moved = tree.rename(tree.parent / ".data")
    train, _ = jpegs.image_tree(moved)
    assert len(train) == 8


def test_grey_images_of_16_bits(tmp_path):
    """vision 2218, pytorch 20524: they are scaled, not cut off."""
    grey = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    Image.fromarray(grey).save(tmp_path / "deep.png")
    found = np.asarray(jpegs.open_image(tmp_path / "deep.png"))
    assert (found == (grey >> 8)[:, :, None]).all()
    assert found.shape == (64, 64, 3)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_of_32_bits_are_refused_by_name(mode, tmp_path):
    Image.new(mode, (8, 8)).save(tmp_path / "wide.tiff")
    with pytest.raises(InputError, match=rf"wide.tiff has pixels of 32 bits \(mode {mode}\)"):
        jpegs.open_image(tmp_path / "wide.tiff")


def test_why_an_image_cannot_be_read(tmp_path, monkeypatch):
    path = tmp_path / "photo.png"
    Image.new("RGB", (40, 40)).save(path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match=r"cannot be decoded .*: delete it"):
        jpegs.open_image(path)
    path.unlink()
    path.symlink_to("nowhere.png")
    with pytest.raises(InputError, match=r"photo.png: No such file or directory$"):
        jpegs.open_image(path)
    path.unlink()
    path.write_bytes(content)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(InputError, match=r"has too many pixels: Image size \(1600 pixels\)"):
        jpegs.open_image(path)


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_an_image_that_is_gone_ends_the_run_with_one_line(loader_workers, tree, tmp_path):
    path = tree / "train" / "dog" / "1.png"
    path.unlink()
    path.symlink_to("nowhere.png")
    flags = "--arch lenet --image-size 32 -b 4 --epochs 1 --device cpu --dry-run"
    command = f"python {ROOT}/imagenet/single.py --data-dir {tree} {flags} -j {loader_workers}"
    output = compute(f"{command} -b 8", tmp_path, status=2)
    last = output.splitlines()[-1]
    assert last == f"single.py: {path}: No such file or directory"
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("environment", "recipe", "says"),
    [
        ({"WORLD_SIZE": "4"}, "single", "or unset WORLD_SIZE"),
        ({"PMI_SIZE": "2"}, "single", r"a launcher started 2 of these \(PMI_SIZE\)"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "single", r"started 2 of these \(SLURM_STEP_NUM_TASKS\)"),
        ({"WORLD_SIZE": "many"}, "single", "WORLD_SIZE=many in the environment is not a number"),
        ({"LOCAL_RANK": "0"}, "ddp_launch", "LOCAL_WORLD_SIZE is not set: start it with a launch"),
        ({}, "ddp_launch", "LOCAL_RANK is not set: start it with a launcher"),
    ],
)
def test_environments(environment, recipe, says, tmp_path):
    """Before any data set is downloaded, which would print another line here."""
    variables = " ".join(f"{name}={value}" for name, value in environment.items())
    line = refused(f"{variables} python {ROOT}/mnist/{recipe}.py --data-dir none", tmp_path)
    assert re.search(says, line)


def test_an_empty_rank_of_slurm(tmp_path):
    assert "epoch 1/" in compute(f"PMIX_RANK= {SINGLE} --dry-run", tmp_path)


def test_an_address_that_another_tool_left(tmp_path):
    """mp.spawn on one machine meets on this machine."""
    spawn = SINGLE.replace("single.py", "ddp_spawn.py")
    environment = "MASTER_ADDR=nowhere.invalid MASTER_PORT=1"
    assert "world size 2" in compute(f"{environment} {spawn} -g 2 --dry-run", tmp_path)


@pytest.mark.parametrize("start", ["python -P {}/cifar10/single.py", "python -m cifar10.single"])
def test_other_ways_to_start_a_script(start, tmp_path):
    """Its neighbour cifar.py is found without the folder of the script in sys.path."""
    flags = "--synthetic 320 --device cpu --model lenet --dry-run"
    folder = ROOT if " -m " in start else tmp_path
    assert "epoch 1/" in run(f"{start.format(ROOT)} {flags}", folder)


@pytest.mark.parametrize("output", ["> /dev/full", ">&- 2>&-", "| head -n 1"])
def test_output_that_goes_nowhere(output, tmp_path):
    """Training goes on: fabric 1583, tqdm 1196."""
    run(f"set -o pipefail; {SINGLE} --log-dir log {output}", tmp_path)
    saved = torch.load(tmp_path / "log" / "last.pt", weights_only=True)
    assert saved["position"]["epoch"] == 1


def test_a_name_that_is_not_utf8(tmp_path):
    """A Latin-1 byte in the name of the folder, which TensorBoard refuses."""
    output = run(f"{SINGLE} --log-dir $'caf\\xe9'", tmp_path, status=2)
    assert output == "single.py: --log-dir caf\\udce9: TensorBoard needs a name in UTF-8\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", ["mnist/single.py", "mnist/hvd.py"])
def test_ctrl_c_as_process_1(script, tmp_path):
    """In a container: moby 12022."""
    need(os.geteuid() == 0 and shutil.which("unshare"), "root, to make a namespace of processes")
    if "hvd" in script:
        need_horovod("mpi")
    flags = "--synthetic 3200 --epochs 1000 --model lenet --device cpu"
    job = Job(f"exec unshare --pid --fork python {ROOT}/{script} {flags}", tmp_path)
    job.wait_for("epoch 1/")
    (process_1,) = (process for process, words in job.command_lines() if words[0] == "python")
    process_1.send_signal(signal.SIGINT)
    assert job.finish() == 128 + signal.SIGINT


def as_nobody(folder, function, *arguments):
    """function(*arguments) as another user, in `folder`; return what it raises, as text."""
    need(os.geteuid() == 0, "root, to become another user")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        os.setgid(65534)
        os.setuid(65534)
        try:
            function(*arguments)
        except Exception as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as said:
        return said.read()


@pytest.mark.parametrize("hidden", ["train/cat", "train/cat/more", "val"])
def test_a_folder_that_may_not_be_listed(hidden, tree):
    """Left out, its images would be missing on one machine, perhaps."""
    (tree / "train" / "cat" / "more").mkdir()
    shutil.copy(tree / "train" / "cat" / "0.png", tree / "train" / "cat" / "more")
    assert as_nobody(tree, jpegs.image_tree, ".") == ""
    (tree / hidden).chmod(0)
    says = as_nobody(tree, jpegs.image_tree, ".")
    assert says == f"InputError: {hidden}: Permission denied"


def test_an_image_that_may_not_be_read(tree):
    folder = tree / "train" / "cat"
    (folder / "0.png").chmod(0)
    assert as_nobody(folder, jpegs.open_image, "0.png") == "InputError: 0.png: Permission denied"


def test_the_order_of_images_is_that_of_torchvision(tree):
    for name in ("b/9.png", "b/10.png", "a/1.PNG", "b.png"):
        (tree / "train" / "dog" / name).parent.mkdir(exist_ok=True)
        shutil.copy(tree / "train" / "dog" / "0.png", tree / "train" / "dog" / name)
    assert jpegs.image_tree(tree)[0].samples == ImageFolder(tree / "train").samples


def test_machines_with_different_images(tree, tmp_path):
    """One of them lacks a file: their batches would not be parts of one."""
    for machine in ("first", "second"):
        shutil.copytree(tree, tmp_path / machine / "tree")
    (tmp_path / "second" / "tree" / "train" / "cat" / "1.png").rename(
        tmp_path / "second" / "tree" / "train" / "cat" / "other.png"
    )
    flags = "--data-dir tree --arch lenet --image-size 32 -b 2 -j 0 --device cpu --log-dir log"
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    jobs = [
        ForkedJob(
            f"python {ROOT}/imagenet/ddp_spawn.py {flags} -n 2 -g 1 -nr {number}",
            cwd=tmp_path / machine,
            **where,
        )
        for number, machine in enumerate(("first", "second"))
    ]
    assert [job.finish() for job in jobs] == [2, 2]
    first = jobs[0].output()
    assert first.startswith("ddp_spawn.py: the data set is not the same on all ranks")
    assert len(first.splitlines()) == 1
    assert not (tmp_path / "first" / "log").exists()
