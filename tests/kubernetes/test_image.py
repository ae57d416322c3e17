"""The image of the Containerfile as `podman run` starts it: signals, users, and its limits."""

import os
import pty
import re
import subprocess
import uuid

from forked import compute
from launch import PATIENCE, checkpoint
from PIL import Image
from pods import LIMITS, PODMAN, podman
from recipes import ROOT

ENDLESS = "--synthetic 640 --arch lenet --device cpu --epochs 100000 --log-interval 1"


class Run:
    """podman run -it, with a terminal of its own."""

    def __init__(self, image, arguments, *flags):
        self.name = f"recipes-{uuid.uuid4().hex[:12]}"
        self.terminal, side = pty.openpty()
        self.process = subprocess.Popen(
            [
                *(*PODMAN, "run", "-it", f"--name={self.name}"),
                *(*LIMITS, *flags, image, *arguments),
            ],
            stdin=side,
            stdout=side,
            stderr=side,
            start_new_session=True,
        )
        os.close(side)
        self.shown = ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        podman("rm", "--force", "--time=0", self.name)
        os.close(self.terminal)

    def read(self):
        """Add what has been printed; False at the end."""
        try:
            self.shown += os.read(self.terminal, 4096).decode(errors="replace")
        except OSError:
            return False
        return True

    def wait_for(self, text):
        while not re.search(text, self.shown):
            assert self.read(), f"no {text}:\n{self.shown}"

    def finish(self):
        """The exit status, and all that was printed."""
        while self.read():
            pass
        return self.process.wait(PATIENCE), self.shown


def test_any_user_a_read_only_root_and_ctrl_c(image, tmp_path):
    """It writes to the mounted folder, needs no more than /tmp beside, and Ctrl-C reaches it."""
    tmp_path.chmod(0o777)
    flags = [
        "--user=12345",
        "--read-only",
        "--read-only-tmpfs=false",
        "--tmpfs=/tmp",
        "--network=none",
        f"--volume={tmp_path}:/recipes/runs",
    ]
    command = f"python mnist/single.py {ENDLESS} --log-dir runs/1"
    with Run(image("recipes"), command.split(), *flags) as run:
        run.wait_for("epoch 2/")
        os.write(run.terminal, b"\x03")
        status, shown = run.finish()
    assert status == 130
    assert "Traceback" not in shown
    assert checkpoint(tmp_path / "1")["position"]["epoch"] >= 1
    assert (tmp_path / "1" / "last.pt").stat().st_uid == 12345


# What a signal does to a recipe is tested elsewhere: here, that it arrives.
SAYS_SIGNALS = """
import os, signal, sys, time

def say(number, frame):
    print(signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        sys.exit(3)

signal.signal(signal.SIGUSR1, say)
signal.signal(signal.SIGTERM, say)
print("user", os.getuid(), "below process", os.getppid(), flush=True)
while True:
    time.sleep(1)
"""


def test_process_1(image):
    """It is not root by default, passes signals on, and ends as the recipe does."""
    with Run(image("recipes"), ["python", "-c", SAYS_SIGNALS]) as run:
        run.wait_for("user 1000 below process 1")
        podman("kill", "--signal=USR1", run.name)
        run.wait_for("SIGUSR1")
        podman("kill", "--signal=TERM", run.name)
        status, shown = run.finish()
    assert "SIGTERM" in shown
    assert status == 3


# Commands at the limits of one container, in processes forked from one with torch.
AT_LIMITS = """
import multiprocessing, os, runpy, shlex, sys
import torch

os.dup2(1, 2)

def run(command):
    sys.argv = shlex.split(command)
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=runpy.run_path, args=(sys.argv[0], None, "__main__"))
    process.start()
    process.join()
    print("status", process.exitcode, flush=True)

# A batch of 512 images of 3 x 224 x 224 bytes is 73 MiB.
flags = "--data-dir /tree --workers 2 --batch-size 512 --device cpu --arch resnet18"
run(f"imagenet/single.py --dry-run {flags}")
run(f"scripts/doctor.py --dataset=imagenet {flags}")
filler = b"x" * (1500 << 20)
run("scripts/doctor.py --dataset=mnist --synthetic=640")
"""


def test_limits_of_a_container(image, tmp_path):
    """Its 64 MB of shared memory, a quota of CPUs, and a memory limit that is near."""
    Image.new("RGB", (256, 256)).save(tmp_path / "image.jpg")
    for number in range(1200):
        folder = tmp_path / "tree" / ("val" if number < 100 else "train") / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        os.link(tmp_path / "image.jpg", folder / f"{number}.jpg")
    shown = podman(
        *["run", "--rm", "--network=none", "--cpus=1", "--memory=2000m", "--memory-swap=2000m"],
        *[f"--volume={tmp_path}/tree:/tree:ro", *LIMITS, image("recipes")],
        *["python", "-c", AT_LIMITS],
    )
    print(shown)
    recipe, doctor, doctor_again = re.split(r"^status (?:\d+)\n", shown, flags=re.MULTILINE)[:3]
    assert re.findall(r"^status (\d+)$", shown, re.MULTILINE) == ["1", "1", "0"]
    cure = "container more (docker run --shm-size=8g; in Kubernetes an emptyDir"
    assert f"give the {cure}" in recipe
    assert f"give a {cure}" in doctor
    assert "share a quota of 1 CPUs" in doctor_again
    near = r"needs \d+ MiB even without a model, and its memory limit is 2000"
    assert re.search(near, doctor_again)


def test_a_name_without_an_address(tmp_path):
    """The doctor names the host where the pods are to meet, if it does not resolve."""
    meeting = {"PET_RDZV_ENDPOINT": "ddp-0.invalid:29500"}
    shown = compute(f"python {ROOT}/scripts/doctor.py --dataset none", tmp_path, 1, **meeting)
    assert "the name ddp-0.invalid does not resolve" in shown
