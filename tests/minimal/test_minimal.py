"""minimal/: each strategy in one file of plain torch computes, learns and ends as it should."""

import ast
import re
import signal
import struct

import pytest
import torch
from diffs import MARK, changes, comment_above, is_comment
from forked import ForkedJob, compute
from launch import (
    Job,
    checkpoint,
    free_port,
    largest_difference,
    need_horovod,
    strategies,
    wait_until,
)
from recipes import MINIMAL, ROOT, commands, imports

from minimal import single

FILES = sorted(MINIMAL.glob("*.py"))
SINGLE = MINIMAL / "single.py"
OTHERS = [path for path in FILES if path != SINGLE]
FUNCTIONS = ["parse_args", "load", "convnet", "evaluate", "main"]
# Of files whose processes are started by mp.spawn.
MORE_FUNCTIONS = {"run"}
# Lines that hand on what is explained where it is made.
NEEDS_NO_REASON = r"^def main\(local_rank, args\)|^args = parse_args\(\)"
# Two processes of batch B see what one of batch 2B sees.
ONE, TWO = "--batch-size 32 --lr 0.04", "--batch-size 16 --lr 0.02"


def name_of(path):
    return path.name


# The files of MNIST, with the lengths of their headers and of an item.
PARTS = {"images-idx3-ubyte": (16, 28 * 28), "labels-idx1-ubyte": (8, 1)}


@pytest.fixture(scope="module")
def mnist(real_data, tmp_path_factory):
    """A function that gives a folder with the first images of MNIST.

    It takes the number of those to train on. Two processes cannot halve the 301 to test on.
    """
    whole = real_data("mnist") / "MNIST" / "raw"

    def first(train):
        folder = tmp_path_factory.mktemp("mnist")
        raw = folder / "MNIST" / "raw"
        raw.mkdir(parents=True)
        for name, count in (("train", train), ("t10k", 301)):
            for part, (head, size) in PARTS.items():
                content = (whole / f"{name}-{part}").read_bytes()
                length = struct.pack(">i", count)
                items = content[8 : head + count * size]
                (raw / f"{name}-{part}").write_bytes(content[:4] + length + items)
        return folder

    return first


@pytest.fixture(scope="module")
def few(mnist):
    return mnist(320)


@pytest.fixture(scope="module")
def more(mnist):
    """Enough to learn from in three epochs."""
    return mnist(640)


@pytest.fixture(scope="module")
def in_float64(tmp_path_factory):
    """Copies that compute in float64, without BatchNorm, whose statistics are each rank's own."""
    folder = tmp_path_factory.mktemp("float64")
    first = "\nimport torch\n"
    for path in FILES:
        text = path.read_text()
        assert text.count(first) == 1
        text = text.replace(first, f"{first}torch.set_default_dtype(torch.float64)\n")
        text, norms = re.subn(r"nn\.BatchNorm2d\(\d+\)", "nn.Identity()", text)
        assert norms == 2
        (folder / path.name).write_text(text)
    return folder


def command_of(strategy, processes, folder=MINIMAL):
    """How to start a file of minimal/ on so many processes."""
    if strategy in ("single", "dp"):
        return f"python {folder}/{strategy}.py"
    if strategy == "ddp_amp":
        return command_of("ddp_launch", processes, folder).replace("ddp_launch", "ddp_amp")
    if strategy == "apex_amp":
        return f"python {folder}/apex_amp.py -n 1 -g {processes} -nr 0"
    return strategies(processes, folder)[strategy]


def train(command, data, cwd, **environment):
    """The weights that a command saves, and the accuracies that it prints."""
    if "hvd.py" in command:
        need_horovod(command)
    cwd.mkdir(exist_ok=True)
    # Each test has a port of its own.
    environment["MASTER_PORT"] = str(free_port())
    printed = compute(f"{command} --data-dir {data}", cwd, **environment)
    accuracies = re.findall(r"^epoch \d+: accuracy (\d+\.\d\d)%$", printed, re.MULTILINE)
    return torch.load(cwd / "mnist.pt"), [float(accuracy) for accuracy in accuracies]


@pytest.mark.check
@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_import_of_ours(path):
    packages = {name.partition(".")[0] for name in imports(path)}
    special = {"hvd.py": {"horovod"}, "apex_amp.py": {"apex"}}.get(path.name, set())
    assert packages <= {"argparse", "math", "os", "torch", "torchvision"} | special


@pytest.mark.check
@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_anatomy(path):
    """The same functions in the same order, and a recipe that has what is left out."""
    tree = ast.parse(path.read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert [name for name in names if name not in MORE_FUNCTIONS] == FUNCTIONS
    assert isinstance(tree.body[-1], ast.If), "the launch line comes last"
    assert f"mnist/{path.name}" in ast.get_docstring(tree)
    assert (ROOT / "mnist" / path.name).exists()
    assert commands(path)
    assert all(f"minimal/{path.name}" in command for command in commands(path))


@pytest.mark.check
@pytest.mark.parametrize("path", OTHERS, ids=name_of)
def test_added_lines_give_their_reason(path):
    """In a comment of their group, or in the one above it."""
    lines = path.read_text().splitlines()
    assert not MARK.search(SINGLE.read_text())
    for _, new in changes(path, SINGLE):
        reason_given = False
        for number, line in new:
            if is_comment(line):
                reason_given = reason_given or MARK.search(line)
            elif not re.search(NEEDS_NO_REASON, line.strip()):
                given = reason_given or MARK.search(comment_above(lines, number))
                assert given, f"{path.name}:{number} gives no reason: {line}"


def starts():
    """The commands of the docstrings that make one run, for each file but Apex's."""
    for path in FILES:
        if path.name == "apex_amp.py":
            continue
        # hvd.py's command without --gloo differs only in what Horovod communicates with.
        lines = [line for line in commands(path) if not line.startswith("horovodrun -np")]
        together = [line for line in lines if "-n 2" in line]
        groups = [[line] for line in lines if line not in together]
        for group in [*groups, together] if together else groups:
            yield pytest.param(
                group,
                id=group[-1].replace(" ", "_").replace("/", "."),
                marks=[pytest.mark.check] * (path.name in ("single.py", "ddp_launch.py")),
            )


@pytest.mark.parametrize("group", list(starts()))
def test_docstring_command(group, more, tmp_path):
    """It prints a line at its start and for each epoch, once; it learns, and saves its model.

    Its accuracy is that of the saved model, whose BatchNorm has the statistics of rank 0: the
    others evaluate with them, too.
    """
    if "horovodrun" in group[0]:
        need_horovod("gloo")
    port = str(free_port())
    started = []
    for line in group:
        line = line.replace("29500", port).replace("minimal/", f"{MINIMAL}/")
        command = f"{line} --data-dir {more} --batch-size 16"
        started.append(ForkedJob(command, tmp_path, agent=False, MASTER_PORT=port))
    status = [job.finish() for job in started]
    output = "".join(job.output() for job in started)
    # Gloo of torch 2.8 says that it has connected, and the lines of two ranks can mix.
    output = re.sub(r"^(.* peer ranks.*|\d*)\n", "", output, flags=re.MULTILINE)
    meets = rf"machine [01] of 2: all of them meet at 127.0.0.1:{port}\n"
    output, machines = re.subn(meets, "", output)
    assert machines == (2 if len(group) == 2 else 0)
    assert status == [0] * len(group), output
    pattern = r"\d process(?:es)? on cpu, \d+ steps per epoch\n"
    pattern += "".join(rf"epoch {epoch}: accuracy (\d+\.\d\d)%\n" for epoch in (1, 2, 3))
    printed = re.fullmatch(pattern, output)
    assert printed, output
    accuracy = float(printed[3])
    assert accuracy > 80
    amp = "ddp_amp" in group[0]
    # bf16 has 8 bits, and rounds otherwise in a batch of another size.
    slack = 0.5 if amp else 0.005
    assert accuracy == pytest.approx(saved_accuracy(tmp_path / "mnist.pt", more, amp), abs=slack)


def saved_accuracy(path, data, amp):
    """That of a saved model, in percent."""
    model = single.convnet()
    model.load_state_dict(torch.load(path))
    test_set = single.load(data, train=False)
    loader = torch.utils.data.DataLoader(test_set, batch_size=1000)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        return 100 * single.evaluate(model, loader, "cpu")


@pytest.mark.parametrize(("strategy", "start"), [("ddp_launch", ForkedJob), ("ddp_spawn", Job)])
def test_ctrl_c_leaves_no_process(strategy, start, few, tmp_path):
    command = f"exec {command_of(strategy, 2)} --data-dir {few} --epochs 1000"
    job = start(command, tmp_path, MASTER_PORT=str(free_port()))
    wait_until((tmp_path / "mnist.pt").exists, job)
    job.signal(signal.SIGINT)
    # It fails if a process is left.
    assert job.finish() != 0


@pytest.mark.check
def test_the_diffs_in_the_page_are_those_of_the_files():
    page = (ROOT / "docs" / "minimal.md").read_text()
    single = SINGLE.read_text().splitlines()
    everywhere = {line for path in OTHERS for line in path.read_text().splitlines()}
    blocks = re.findall(r"^```diff\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) > 10
    for line in "".join(blocks).splitlines():
        if not line.startswith("+"):
            assert line[1:] in single, line
        else:
            assert line[1:] in everywhere, line
            assert line[1:] not in single, line


@pytest.fixture(scope="module")
def one_process(in_float64, few, tmp_path_factory):
    """What single.py computes in float64."""
    command = f"{command_of('single', 1, in_float64)} {ONE} --epochs 2 --device cpu"
    return train(command, few, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize(
    "strategy", ["single", "dp", "ddp_launch", "ddp_spawn", "fsdp", "hvd_gloo"]
)
def test_two_processes_compute_what_one_does(strategy, in_float64, one_process, few, tmp_path):
    """On fake GPUs, over two epochs, so that set_epoch counts.

    Each of the 301 test images counts once.
    """
    # fully_shard needs a real GPU.
    device = "cpu" if strategy == "fsdp" else "cuda"
    batch = ONE if strategy in ("single", "dp") else TWO
    command = f"{command_of(strategy, 2, in_float64)} {batch} --epochs 2 --device {device}"
    weights, accuracies = train(command, few, tmp_path, FAKE_GPUS="2")
    assert largest_difference(weights, one_process[0]) < 1e-9
    assert accuracies == one_process[1]


# A download takes a second, and fails where another process downloads to the same folder.
SLOW_DOWNLOAD = """
import time

class MNIST(MNIST):
    def __init__(self, folder, *train, download):
        if not os.path.exists("downloaded"):
            os.mkdir("downloading")
            time.sleep(1)
            os.rename("downloading", "downloaded")
        super().__init__(folder, *train)
"""


@pytest.mark.parametrize("strategy", ["ddp_launch", "ddp_amp", "fsdp", "hvd_gloo"])
def test_machines_with_a_shared_folder_download_once(strategy, few, tmp_path):
    """Each of the two processes is the first one of its machine."""
    for path in FILES:
        text = path.read_text().replace("hvd.local_rank()", "0")
        text = text.replace('int(os.environ["LOCAL_RANK"])', "0")
        last = "from torchvision.datasets import MNIST\n"
        assert text.count(last) == 1
        (tmp_path / path.name).write_text(text.replace(last, f"{last}import os{SLOW_DOWNLOAD}"))
    command = f"{command_of(strategy, 2, tmp_path)} {TWO} --epochs 1 --device cpu"
    _, accuracies = train(command, few, tmp_path)
    assert len(accuracies) == 1


def test_amp_on_a_fake_gpu(more, tmp_path):
    command = f"{command_of('ddp_amp', 2)} {TWO}"
    _, accuracies = train(command, more, tmp_path, FAKE_GPUS="2")
    assert accuracies[-1] > 80


@pytest.mark.parametrize("processes", [1, 2])
def test_apex_on_a_fake_gpu(processes, apex, more, tmp_path):
    """It learns, and its weights are in fp32."""
    command = f"{command_of('apex_amp', processes)} {TWO}"
    environment = {"FAKE_GPUS": str(processes), "PYTHONPATH": apex}
    weights, accuracies = train(command, more, tmp_path, **environment)
    assert weights["0.weight"].dtype == torch.float32
    assert len(accuracies) == 3
    assert accuracies[-1] > 80


def test_a_recipe_goes_on_from_the_weights(few, tmp_path):
    """At a rate too small to change them."""
    saved = single.convnet().state_dict()
    torch.save(saved, tmp_path / "mnist.pt")
    flags = "--init-from mnist.pt --epochs 1 --lr 1e-30 --device cpu --log-dir log"
    compute(f"python {ROOT}/mnist/single.py --data-dir {few} {flags}", tmp_path)
    assert torch.equal(checkpoint(tmp_path / "log")["model"]["0.weight"], saved["0.weight"])
