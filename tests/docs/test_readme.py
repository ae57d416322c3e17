"""Every command in README.md and in docs/ runs, section by section, in a copy of the repository.

To make it quick, flags are appended, where they override earlier ones, or environment variables are
set.
"""

import pickle
import re
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cluster import SlurmJob, need_cluster
from forked import compute
from launch import Job, free_port, need, need_horovod, run
from recipes import MINIMAL, RECIPES, ROOT, commands

from benchmarks import jpeg_tree
from cifar10 import cifar
from mnist import digits

README = ROOT / "README.md"
DOCUMENTS = [README, *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = (
    "apt-get|cp|diff|export|horovodrun|ip|kill|make|mkdir|mpirun|pip|py-spy|python|sbatch|scancel|scontrol|"
    "sinfo|source|squeue|srun|ssh|tensorboard|torchrun"
)
COMMAND = re.compile(rf"(\w+=\S+ )*({PROGRAMS}) .+")
# A block of code, a heading, an indented line, or what is between backquotes
PART = re.compile(
    r"^```(\w*)\n(.*?)^```$|^#+ ([^\n]+)$|^ {4}([^\n]+)$|`([^`]+)`", re.MULTILINE | re.DOTALL
)
ERRORS = (
    "When something goes wrong",
    "Error messages",
)  # headings of tables that begin with what is printed
# What is not run here, and why
ELSEWHERE = {
    # tests/slurm/test_slurm.py and test_cluster_faults.py have these, on their cluster of two nodes
    "torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=node1:29500 "
    "cifar10/ddp_launch.py": "two machines",
    "MASTER_ADDR=node1 MASTER_PORT=29500 python cifar10/ddp_spawn.py -n 2 -g 2 -nr "
    "0": "two machines",
    "horovodrun -np 4 -H node1:2,node2:2 python cifar10/hvd.py": "two machines",
    "torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=node1:29500 "
    "minimal/ddp_launch.py": "two machines",
    "MASTER_ADDR=node1 MASTER_PORT=29500 python minimal/ddp_spawn.py -n 2 -g 2 -nr "
    "0": "two machines",
    "horovodrun -np 4 -H node1:2,node2:2 python minimal/hvd.py": "two machines",
    "sbatch --gpus-per-node=2 slurm/ddp_2nodes.sh mnist/ddp_launch.py --epochs 10": (
        "a job that trains for long"
    ),
    # tests/kubernetes/test_manifests.py reads the file with SkyPilot
    "sky launch skypilot.yaml --num-nodes 2": "a cloud",
    "RESTARTS=2 sbatch slurm/ddp_2nodes.sh": "a rank has to fail",
    "PREEMPTIONS=10 EVERY=20 python -m pytest -s tests/slurm/test_cluster_faults.py -k "
    "test_preempted": "ten minutes",
    "sbatch slurm/ddp_elastic.sh cifar10/ddp_launch.py -G 1024 --lr 0.8": "a node has to fail",
    "STAGE=1 sbatch slurm/ddp_2nodes.sh imagenet/ddp_launch.py --data-dir /shared/imagenet": (
        "a smaller model"
    ),
    "tar -cf /shared/env.tar -C .venv .": "7 GB",
    "STAGE_ENV=/shared/env.tar sbatch slurm/ddp_2nodes.sh": "with a small environment",
    "scancel --signal=USR2 JOBID": "a job has to hang",
    "scancel --batch --signal=USR2 JOBID": "a job has to hang",
    "sbatch --partition=gpu --account=me --nodes=4 --gpus-per-node=8 --cpus-per-task=64 "
    "--time=08:00:00 "
    "slurm/ddp_2nodes.sh": "that cluster has neither partition nor account",
    # tests/scripts/test_scripts.py has this
    "torchrun --nproc-per-node=2 --no-python scripts/pin.sh mnist/ddp_launch.py": (
        "with a smaller script"
    ),
    "torchrun --nproc-per-node=2 scripts/doctor.py --recipe ../my_project/train.py": (
        "it has to be there"
    ),
    # tests/scripts/test_scripts.py has this
    "python scripts/usage.py runs/usage &": "it has to be ended",
    "kill %1": "this ends it",
    # tests/scripts/test_prove.py has this
    "python scripts/prove.py torchrun --nproc-per-node=2 ../my_project/train.py": (
        "it has to be there"
    ),
    "python scripts/prove.py torchrun --nproc-per-node=2 examples/regression.py --device cpu": (
        "minutes"
    ),
    # tests/examples/test_your_own.py has these
    "cp mnist/hvd.py examples/regression_hvd.py": "it does this",
    "git merge-file examples/regression_hvd.py mnist/ddp_launch.py "
    "examples/regression.py": "it does this",
    # tests/benchmarks/test_benchmarks.py has these, in a smaller size
    "make benchmarks": "an hour",
    "make gpu": "it measures a GPU",
    'make gpu ARGS="--minutes 12"': "it measures a GPU",
    # tests/scripts/test_fastest.py has this, in a smaller size
    "python scripts/fastest.py mnist/single.py": "minutes",
    "python benchmarks/jpeg_loader.py --data-dir /tmp/tree": "minutes",
    # no test has these
    "make test": "it runs this",
    "make check": "it runs a part of this",
    "scripts/install_horovod.sh": "make test has run it",
    "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1": (
        "tests/helpers/launch.py sets them for all tests"
    ),
    "python -m torch.distributed.launch": "a name in a sentence",
    "horovodrun --min-np": "a name in a sentence",
    'pip install --no-build-isolation --config-settings "--build-option=--cpp_ext --cuda_ext" '
    "git+https://github.com/NVIDIA/apex@25.05": "builds for a GPU, from GitHub",
    "pip download --no-deps --no-binary :all: "
    "horovod==0.28.1": "done by scripts/install_horovod.sh",
    "srun --jobid=JOBID --overlap --nodelist=node2 --pty bash": "a shell for a person",
    "pip install py-spy; py-spy dump --native --pid PID": "typed into that shell",
}
# Flags appended to a script that is not a recipe; add new scripts here
EXTRA_FLAGS = {
    "benchmarks/jpeg_tree.py": "--images 20",
    "tests/helpers/pretended_gpu.py": "",
}


def commands_of(document):
    """(heading, command) of each command in a document, in its order."""
    text, heading, found = re.sub(r"\\\n *", "", document.read_text()), "", []
    for part in PART.finditer(text):
        language, block, new_heading, indented, span = part.groups()
        heading = new_heading or heading
        for line in (block or indented or "").splitlines():
            command = re.sub(r"(^| +)#.*", "", line).strip()
            if command and (language == "sh" or COMMAND.fullmatch(command)):
                found.append((heading, command))
        command = " ".join((span or "").split())
        first_cell = text[text.rfind("\n", 0, part.start()) : part.start()].count("|") == 1
        if COMMAND.fullmatch(command) and not (first_cell and heading in ERRORS):
            found.append((heading, command))
    return found


def to_run():
    """{(document, heading): commands} without the exceptions, and each command once."""
    # test_launch.py and test_minimal.py run them.
    files = [*RECIPES, *MINIMAL.glob("*.py")]
    docstrings = [command for file in files for command in commands(file)]
    found, seen = {}, {*ELSEWHERE, *docstrings}
    for document in DOCUMENTS:
        for heading, command in commands_of(document):
            if command not in seen:
                found.setdefault((document.relative_to(ROOT).as_posix(), heading), []).append(
                    command
                )
            seen.add(command)
    return found


TO_RUN = to_run()


def test_what_is_not_run_here_is_in_a_document():
    assert {*ELSEWHERE} <= {
        command for document in DOCUMENTS for _, command in commands_of(document)
    }
    assert sum(map(len, TO_RUN.values())) > 30


def write_small_data(folder):
    """MNIST and CIFAR-10 in torchvision's files, with 640 and 64 images of noise."""
    noise = np.random.default_rng(0).integers(256, size=(640, 3072), dtype=np.uint8)
    for number, (name, count) in enumerate(zip(digits.FILES, (640, 640, 64, 64), strict=True)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if number % 2:
            content = struct.pack(">2i", 2049, count) + (noise[:count, 0] % 10).tobytes()
        else:
            content = struct.pack(">4i", 2051, count, 28, 28) + noise[:count, :784].tobytes()
        (folder / name).write_bytes(content)
    for name in [*cifar.TRAIN_FILES, *cifar.VAL_FILES]:
        (folder / name).parent.mkdir(exist_ok=True)
        count = 64 if "test" in name else 128
        batch = {"data": noise[:count], "labels": (noise[:count, 0] % 10).tolist()}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))


def world_size(command):
    """How many processes it asks for; a SLURM job has one per node unless it says otherwise."""
    processes = re.search(r"(?:-np |--nproc-per-node=|-g )(\d+)", command)
    return int(processes[1]) if processes else 2 if "2nodes" in command else 1


class Reader:
    """Types commands in a copy of the repository, which has .venv and data/."""

    def __init__(self, folder, request):
        self.folder, self.request, self.long_run = folder, request, None
        shutil.copytree(
            ROOT, folder, ignore=shutil.ignore_patterns(".*", "data", "runs", "__pycache__")
        )
        (folder / ".venv").symlink_to(sys.prefix)
        write_small_data(folder / "data")
        self.environment = {
            "PET_MASTER_PORT": str(free_port()),  # torchrun's
            "TORCHDYNAMO_DISABLE": "1",
        }  # --compile is slow, and test_imagenet.py has it

    def type(self, command):
        """Run a command, and see that it does what it says."""
        if "/data/imagenet" in command and not (self.folder / "tree").exists():
            jpeg_tree.make(self.folder / "tree", images=20)
        command = command.replace("/data/imagenet", "tree").replace("/tmp/", "")
        program = next(word for word in command.split() if "=" not in word)
        script = next(iter(re.findall(r"[\w/]+\.py\b", command)), None)
        if program == "sbatch" and not script:  # the file's own
            script = re.search(
                r"recipe=\$\{1:-(.+)\}",
                (ROOT / re.search(r"slurm/\w+\.sh", command)[0]).read_text(),
            )[1]
            command += f" {script}"
        if program in OWN_WAY:
            OWN_WAY[program](self, command)
        elif (
            not script
            or program in ("cp", "diff")
            or script
            in ("scripts/export.py", "scripts/pack.py", "scripts/take.py", "scripts/unshard.py")
        ):
            self.run(command, status=1 if program == "diff" else 0)  # the files differ
        elif script == "docs/screenshot.py":
            self.screenshot(command)
        elif script.startswith("minimal/"):
            assert "epoch 1: accuracy" in self.run(f"{command} --epochs 1 --device cpu")
        elif script.startswith("benchmarks/"):
            self.run(f"{command} {EXTRA_FLAGS[script]}")
        else:
            self.train(command, program, script)

    def train(self, command, program, script):
        """A recipe or the doctor, for one step, or for two epochs if it has a log folder."""
        if script == "scripts/doctor.py":
            command += " --device cpu -b 16"
        else:
            to_keep = program == "sbatch" or "--log-dir" in command
            in_imagenet = "imagenet/" in script
            flags = {"-b": 4 if in_imagenet else 16}
            if "--cuda-graph" not in command:
                flags["--device"] = "cpu"
            if script.startswith(("mnist/", "cifar10/", "imagenet/")):
                flags["--model"] = "lenet"
            if in_imagenet:
                flags["--image-size"] = 32
            if to_keep:
                flags["--epochs"] = 2
            for flag, value in flags.items():
                if f" {flag} " not in command:
                    command += f" {flag} {value}"
            command += "" if to_keep else " --dry-run"
        if program in ("horovodrun", "mpirun"):
            need_horovod(command)
        if program == "sbatch":
            need_cluster()
            cluster = self.request.getfixturevalue("cluster")
            output = SlurmJob(
                cluster, self.folder, command.removeprefix("sbatch "), SBATCH_GPUS_PER_NODE="1"
            ).finish()
        else:
            output = self.run(command)
        assert len(re.findall(rf"[|:] world size {world_size(command)}\b", output)) == 1, output
        assert re.search(
            r"epoch [\d.]+[/,]|nothing left to do|doctor: all is well|val images: ", output
        ), output

    def run(self, command, status=0):
        """Run scripts in forked processes where that gives the same.

        Test_launch.py tests the launchers.
        """
        forks = (
            re.match(r"(\w+=\S+ )*(python \w|torchrun|horovodrun --gloo)", command)
            and "--compile" not in command
        )
        return (compute if forks else run)(command, self.folder, status, **self.environment)

    def on_cluster(self, command):
        need_cluster()
        return self.request.getfixturevalue("cluster").run(command, self.folder)

    def make(self, command):
        fresh = subprocess.run(
            ["make", "--question", ".venv/.recipes"], cwd=self.folder, capture_output=True
        )
        need(
            fresh.returncode == 0,
            f"make demo: {sys.prefix} was not made by it, or is older than requirements.txt",
        )
        assert "epoch 3/3" in self.run(command)

    def apt_get(self, command):
        need(
            list(Path("/var/lib/apt/lists").glob("*_Packages*")),
            "Debian's lists of packages: apt-get update",
        )
        self.run(f"{command} --simulate")

    def pip(self, command):
        """tests/requirements.txt brought what it installs."""
        installs = command.startswith("pip install")
        self.run(f"{command} --dry-run --no-index" if installs else command)

    def tensorboard(self, command):
        job = Job(f"exec {command} --port 0", self.folder)
        job.wait_for("http://")
        job.signal(signal.SIGINT)
        job.finish()

    def screenshot(self, command):
        """What TensorBoard shows of the runs before, in a browser."""
        need(shutil.which("chromium"), "apt-get install chromium")
        names = ", ".join(sorted(folder.name for folder in (self.folder / "runs").iterdir()))
        assert self.run(command).splitlines() == [
            f"{tag}: {names}"
            for tag in ("train/accuracy", "train/loss", "val/accuracy", "val/loss")
        ]
        assert "ddp-2" in names

    def kill(self, command):
        """Send it to a run in progress."""
        if not self.long_run:
            self.long_run = Job(
                "exec python mnist/single.py --epochs 1000 --device cpu", self.folder
            )
            self.long_run.wait_for("epoch 1/")
        self.run(command.replace("PID", str(self.long_run.process.pid)))
        if "USR2" in command:
            self.long_run.wait_for("Current thread")
        else:
            assert self.long_run.finish() == 0
            self.long_run = None

    def close(self):
        if self.long_run:
            self.long_run.process.terminate()
            self.long_run.finish()


# Programs that need special handling
OWN_WAY = {
    "apt-get": Reader.apt_get,
    "kill": Reader.kill,
    "make": Reader.make,
    "pip": Reader.pip,
    "sinfo": Reader.on_cluster,
    "srun": Reader.on_cluster,
    "tensorboard": Reader.tensorboard,
}


@pytest.mark.parametrize(("document", "heading"), TO_RUN, ids=map(" ".join, TO_RUN))
def test_section(document, heading, tmp_path, request):
    reader, missing = Reader(tmp_path / "copy", request), None
    try:
        for command in TO_RUN[document, heading]:
            try:
                reader.type(command)
            except pytest.skip.Exception as skipped:  # the commands after it may still run
                missing = skipped
    finally:
        reader.close()
    if missing:
        raise missing
