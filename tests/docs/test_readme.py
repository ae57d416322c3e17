"""Each command of README.md and docs/ runs, in a copy of the repository.

Ranks are forked, with flags appended that make a run short. tests/recipes/test_launch.py starts the
launchers themselves.
"""

import pickle
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from forked import ForkedJob, compute
from launch import need, need_horovod, run
from recipes import MINIMAL, RECIPES, ROOT, commands

from benchmarks import jpeg_tree
from cifar10 import cifar
from mnist import digits

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = (
    "apt-get|cp|diff|export|horovodrun|ip|kill|make|mkdir|mpirun|pip|py-spy|python|sbatch|scancel|"
    "scontrol|sinfo|source|squeue|srun|ssh|tensorboard|torchrun"
)
COMMAND = re.compile(rf"(\w+=\S+ )*({PROGRAMS}) .+")
# A block of code, a heading, an indented line, or what is between backquotes
PART = re.compile(
    r"^```(\w*)\n(.*?)^```$|^#+ ([^\n]+)$|^ {4}([^\n]+)$|`([^`]+)`", re.MULTILINE | re.DOTALL
)
# The heading of tables that begin with what is printed
ERRORS = "Error messages"
# What is in a command that is not run here, and why
NOT_HERE = {
    "node1": "two machines: tests/slurm/",
    "scancel": "a job has to hang: tests/slurm/",
    "tar -cf /shared/env.tar": "7 GB; tests/slurm/ packs a small environment",
    "--partition=gpu": "the cluster of the tests has no such partition",
    "srun --jobid": "a shell for a person",
    "py-spy dump": "typed into that shell",
    "sky launch": "a cloud; tests/kubernetes/ reads the file",
    "PREEMPTIONS=": "ten minutes",
    "scripts/usage.py": "tests/scripts/test_scripts.py",
    "kill %1": "it ends scripts/usage.py",
    "scripts/check.py": "tests/scripts/test_check.py",
    "scripts/prove.py": "tests/scripts/test_prove.py",
    "scripts/fastest.py": "tests/scripts/test_fastest.py",
    "scripts/doctor.py --recipe": "tests/scripts/test_doctor.py",
    "regression_hvd.py": "git leaves conflicts in it, which a person resolves",
    "make benchmarks": "an hour",
    "make gpu": "it measures a GPU",
    "make test": "it runs this",
    "make check": "it runs a part of this",
    "scripts/install_horovod.sh": "make test runs it",
    "OMPI_ALLOW_RUN_AS_ROOT": "tests/helpers/launch.py sets it for all tests",
    "torch.distributed.launch": "a name in a sentence",
    "horovodrun --min-np": "a name in a sentence",
    "tensorboard --logdir": "a server, for a browser",
    "NVIDIA/apex": "it builds for a GPU, from GitHub",
    "pip download": "scripts/install_horovod.sh does it",
}
# Flags for a script, or for the scripts of a folder. A later flag overrides an earlier one.
SHORTER = {
    "minimal/": "--epochs 1 --device cpu",
    "mnist/": "--model lenet -b 16",
    "cifar10/": "--model lenet -b 16",
    "imagenet/": "--model lenet -b 4 --image-size 32",
    "examples/": "-b 16",
    "../my_project/": "-b 16",
    "scripts/doctor.py": "-b 16 --device cpu",
}
RECIPE = re.compile(r"(mnist|cifar10|imagenet|examples|\.\./my_project)/")


def commands_of(document):
    """The commands in a document, in its order."""
    text, heading, found = re.sub(r"\\\n *", "", document.read_text()), "", []
    for part in PART.finditer(text):
        language, block, new_heading, indented, span = part.groups()
        heading = new_heading or heading
        for line in (block or indented or "").splitlines():
            command = re.sub(r"(^| +)#.*", "", line).strip()
            if command and (language == "sh" or COMMAND.fullmatch(command)):
                found.append(command)
        command = " ".join((span or "").split())
        first_cell = text[text.rfind("\n", 0, part.start()) : part.start()].count("|") == 1
        if COMMAND.fullmatch(command) and not (first_cell and heading == ERRORS):
            found.append(command)
    return found


def to_run():
    """{command: the first document that has it}, without those that other tests run."""
    # test_launch.py and test_minimal.py
    elsewhere = {line for file in [*RECIPES, *MINIMAL.glob("*.py")] for line in commands(file)}
    found = {}
    for document in DOCUMENTS:
        for command in commands_of(document):
            if command not in elsewhere and not any(part in command for part in NOT_HERE):
                found.setdefault(command, document.relative_to(ROOT).as_posix())
    return found


TO_RUN = to_run()


def program_of(command):
    return next(word for word in command.split() if "=" not in word)


def those_of(*programs):
    return [command for command in TO_RUN if program_of(command) in programs]


# Each kind has a test below.
SPECIAL = those_of("apt-get", "kill", "make", "pip", "sbatch", "sinfo", "srun")
OTHERS = [command for command in TO_RUN if command not in SPECIAL]


def write_small_data(folder):
    """MNIST and CIFAR-10 in torchvision's files, with few images of noise."""
    noise = np.random.default_rng(0).integers(256, size=(128, 3072), dtype=np.uint8)
    for number, (name, count) in enumerate(zip(digits.FILES, (128, 128, 64, 64), strict=True)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if number % 2:
            content = struct.pack(">2i", 2049, count) + (noise[:count, 0] % 10).tobytes()
        else:
            content = struct.pack(">4i", 2051, count, 28, 28) + noise[:count, :784].tobytes()
        (folder / name).write_bytes(content)
    for name in [*cifar.TRAIN_FILES, *cifar.VAL_FILES]:
        (folder / name).parent.mkdir(exist_ok=True)
        batch = {"data": noise[:64], "labels": (noise[:64, 0] % 10).tolist()}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The repository, with its .venv, small data sets and photos."""
    folder = tmp_path_factory.mktemp("copy") / "repository"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "data", "runs"))
    (folder / ".venv").symlink_to(sys.prefix)
    write_small_data(folder / "data")
    jpeg_tree.make(folder / "photos", images=20)
    return folder


@pytest.fixture
def repository(copy, tmp_path):
    """A folder that links to all of the copy, for the runs of one test."""
    folder = tmp_path / "repository"
    folder.mkdir()
    for path in copy.iterdir():
        (folder / path.name).symlink_to(path)
    return folder


def shortened(command):
    """Append flags with which it takes a second."""
    script = re.search(r"(?:fake_gpu\.py )?([\w/.]+\.py)", command)[1]
    flags = [flags for start, flags in SHORTER.items() if script.startswith(start)]
    if " -G " in command:
        flags.append("-G 32")
    if RECIPE.match(script):
        if not re.search("fake_gpu|--cuda-graph", command):
            flags.append("--device cpu")
        if "--log-dir" not in command:
            flags.append("--dry-run")
        elif "--epochs" not in command:
            flags.append(f"--epochs {2 if '--resume' in command else 1}")
    return " ".join([command, *flags])


def compute_short(command, folder):
    """Run the script of a command in forked processes: in two, if it starts more."""
    command = re.sub(r"/(data|shared)/imagenet\b", "photos", command).replace("/tmp/", "")
    command = re.sub(r"--nproc-per-node=\d+", "--nproc-per-node=2", command)
    # Python's own options, and those of the launchers, which test_mpi.py and test_launch.py try.
    command = command.replace("python -X importtime", "python")
    launcher = r"\b(mpirun|horovodrun) .*?-np \d+ .*?python "
    command = re.sub(launcher, "horovodrun --gloo -np 2 python ", command)
    if "horovodrun" in command:
        need_horovod("gloo")
    # --compile is slow, and tests/imagenet/ has it.
    compute(shortened(command), folder, TORCHDYNAMO_DISABLE="1")


def type_command(command, folder):
    if program_of(command) in ("python", "torchrun", "horovodrun", "mpirun"):
        compute_short(command, folder)
    else:
        files_differ = program_of(command) == "diff"
        run(command, folder, status=int(files_differ))


@pytest.mark.parametrize("document", dict.fromkeys(TO_RUN[command] for command in OTHERS))
def test_commands(document, repository):
    missing = None
    for command in OTHERS:
        if TO_RUN[command] == document:
            try:
                type_command(command, repository)
            except pytest.skip.Exception as skipped:  # the commands after it may still run
                missing = skipped
    if missing:
        raise missing


@pytest.mark.parametrize("command", those_of("make"))
def test_make(command, repository):
    """make demo runs as a user types it, and prints what README.md shows."""
    question = ["make", "--question", ".venv/.recipes"]
    fresh = subprocess.run(question, cwd=repository, capture_output=True).returncode == 0
    need(fresh, f"{command}: {sys.prefix} was not made by it, or requirements.txt is newer")
    printed = run(command, repository).splitlines()
    readme = (ROOT / "README.md").read_text()
    shown = re.search(r"^It prints:\n\n```text\n(.*?)^```", readme, re.M | re.S)[1]
    # On a slow machine there are also lines within an epoch, and these images are not MNIST's. A
    # make within `make test` names its folder.
    others = ("step ", "warning: ", "make[")
    first_words = [line.split()[0] for line in printed if not line.startswith(others)]
    assert first_words == [line.split()[0] for line in shown.splitlines()], printed


def test_what_is_typed_on_a_cluster(cluster, repository):
    """SLURM takes each batch script, and its recipe runs. tests/slurm/ runs jobs."""
    for command in those_of("sinfo", "srun"):
        cluster.run(command, repository)
    for command in those_of("sbatch"):
        cluster.run(command.replace("sbatch", "sbatch --test-only"), repository)
        file, recipe = re.search(r"(slurm/\w+\.sh) ?(.*)", command).groups()
        default = re.search(r"recipe=\$\{1:-(.+)\}", (ROOT / file).read_text())[1]
        compute_short(f"torchrun --nproc-per-node=2 {recipe or default}", repository)


@pytest.mark.parametrize("command", those_of("kill"))
def test_kill(command, repository):
    flags = "--epochs 100000 --model lenet --device cpu"
    job = ForkedJob(f"python mnist/single.py {flags}", repository)
    job.wait_for("epoch 1/")
    run(command.replace("PID", str(job.process.pid)), repository)
    if "USR2" in command:
        job.wait_for("Current thread")
        job.kill()
    else:
        assert job.finish() == 0
        assert "stopped after a signal" in job.output()


def packages_of(words):
    """The packages of all commands that begin with `words`."""
    return " ".join(line.removeprefix(words) for line in TO_RUN if line.startswith(words))


def test_pip(repository):
    """What the documents install is what requirements.txt and tests/requirements.txt brought."""
    for command in those_of("pip"):
        if not command.startswith("pip install "):
            run(command, repository)
    run(f"pip install --dry-run --no-index {packages_of('pip install ')}", repository)


def test_apt_get(repository):
    lists = list(Path("/var/lib/apt/lists").glob("*_Packages*"))
    need(lists, "Debian's lists of packages: apt-get update")
    run(f"apt-get install --simulate {packages_of('apt-get install ')}", repository)
