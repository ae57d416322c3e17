"""The image of the Containerfile as `podman run` starts it: signals, users, and its limits."""

import os
import pty
import re
import subprocess
import uuid

import pytest
from launch import PATIENCE, checkpoint
from PIL import Image
from pods import LIMITS, PODMAN, podman

LONG = "mnist/single.py --synthetic 640 --arch lenet --device cpu --epochs 100000 --log-interval 1"
SHORT = "mnist/single.py --synthetic 640 --arch lenet --device cpu --epochs 1"


class Run:
    """podman run -it, with a terminal of its own."""

    def __init__(self, image, arguments, *flags):
        self.name = f"recipes-{uuid.uuid4().hex[:12]}"
        self.terminal, side = pty.openpty()
        self.process = subprocess.Popen(
            [
                *(*PODMAN, "run", "-it", f"--name={self.name}"),
                *(*LIMITS, *flags, image, *arguments.split()),
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


def test_any_user_and_a_read_only_root(image, tmp_path):
    """It writes to the mounted folder, and needs no more than /tmp beside."""
    tmp_path.chmod(0o777)
    podman(
        "run",
        "--rm",
        "--user=12345",
        "--read-only",
        "--read-only-tmpfs=false",
        "--tmpfs=/tmp",
        "--network=none",
        f"--volume={tmp_path}:/recipes/runs",
        *LIMITS,
        image("recipes"),
        *f"python {SHORT} --log-dir runs/1".split(),
    )
    assert checkpoint(tmp_path / "1")["position"]["epoch"] == 1
    assert (tmp_path / "1" / "last.pt").stat().st_uid == 12345


def test_not_root_by_default(image):
    assert podman("run", "--rm", *LIMITS, image("recipes"), "id", "-u").strip() == "1000"


def test_ctrl_c(image):
    with Run(image("recipes"), f"python {LONG}") as run:
        run.wait_for("epoch 2/")
        os.write(run.terminal, b"\x03")
        status, shown = run.finish()
    assert status == 130
    assert "Traceback" not in shown


@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_signals_that_save(name, image):
    """Process 1 passes them on, and the run ends as outside."""
    with Run(image("recipes"), f"python {LONG} --log-dir /tmp/1") as run:
        run.wait_for("epoch 2/")
        podman("kill", f"--signal={name}", run.name)
        status, shown = run.finish()
    assert status == 0
    assert shown.count("stopped after a signal") == 1


def test_small_shared_memory(image, tmp_path):
    """ImageNet's loader workers with 64 MB: one line says what to change, as the doctor does."""
    Image.new("RGB", (256, 256)).save(tmp_path / "image.jpg")
    for number in range(1200):
        folder = tmp_path / "tree" / ("val" if number < 100 else "train") / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        os.link(tmp_path / "image.jpg", folder / f"{number}.jpg")
    # A batch of 512 images of 3 x 224 x 224 bytes is 73 MiB.
    flags = "--data-dir /tree --workers 4 --batch-size 512 --device cpu --arch resnet18"
    options = ["--rm", "--network=none", f"--volume={tmp_path}/tree:/tree:ro", *LIMITS]
    cure = "give a container more (docker run --shm-size=8g; in Kubernetes an emptyDir"
    shown = podman(
        *["run", *options, image("recipes"), "python", "imagenet/single.py", "--dry-run"],
        *flags.split(),
        status=1,
    )
    assert cure.replace("a container", "the container") in shown
    shown = podman(
        *["run", *options, image("recipes"), "python", "scripts/doctor.py", "--dataset=imagenet"],
        *flags.split(),
        status=1,
    )
    assert cure in shown


def test_the_doctor_in_a_pod(image):
    """It names a quota of CPUs, a memory limit that is near, and a name without an address."""
    options = ["run", "--rm", "--network=none", *LIMITS]
    doctor = ["python", "scripts/doctor.py", "--dataset=mnist", "--synthetic=640"]
    # Python and torch take 340 to 390 MiB, and what is in /dev/shm counts too.
    limits = ["--cpus=1", "--memory=2000m", "--shm-size=2g"]
    fill = f"head -c 1500M /dev/zero > /dev/shm/filler && {' '.join(doctor)}"
    shown = podman(*options, *limits, image("recipes"), "sh", "-c", fill)
    assert "share a quota of 1 CPUs" in shown
    assert re.search(r"needs \d+ MiB before there is a model, and its memory limit is 2000", shown)
    name = "--env=PET_RDZV_ENDPOINT=ddp-0.ddp:29500"
    shown = podman(*options, name, image("recipes"), *doctor, status=1)
    assert "PET_RDZV_ENDPOINT is ddp-0.ddp:29500, and the name ddp-0.ddp does not resolve" in shown
