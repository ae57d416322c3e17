"""minimal/: each strategy in one file of plain torch computes, learns and ends as it should."""

import ast
import re
import shutil
import signal
import struct

import numpy as np
import pytest
import torch
from forked import ForkedJob, compute
from launch import Job, checkpoint, free_port, largest_difference, need_horovod, strategies
from recipes import MINIMAL, ROOT, commands, imports

from docs.changes import MARK, changes, comment_above, is_comment

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


def write_mnist(folder, train, test):
    """MNIST's files, with so many images: a bright square, whose place is the label, in noise."""
    noise = np.random.default_rng(0)
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, count in (("train", train), ("t10k", test)):
        labels = noise.integers(10, size=count, dtype=np.uint8)
        images = noise.integers(128, size=(count, 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            row, column = divmod(int(label), 4)
            image[9 * row : 9 * row + 7, 7 * column : 7 * column + 6] = 255
        head = struct.pack(">4i", 2051, count, 28, 28)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        head = struct.pack(">2i", 2049, count)
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(head + labels.tobytes())
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Few images. 3 processes do not divide those to test on."""
    return write_mnist(tmp_path_factory.mktemp("data"), train=320, test=301)


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
    # Several tests at a time.
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
    """The same functions in the same order, few lines, and where to find what is left out."""
    text = path.read_text()
    tree = ast.parse(text)
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert [name for name in names if name not in MORE_FUNCTIONS] == FUNCTIONS
    assert isinstance(tree.body[-1], ast.If), "the launch line comes last"
    assert len(text.splitlines()) <= 130
    recipe = f"mnist/{path.name}"
    assert f"{recipe} has what this leaves out: " in ast.get_docstring(tree)
    assert (ROOT / recipe).exists()
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
    """Commands of the docstrings that make one run, for each file but Apex's."""
    for path in FILES:
        if path.name == "apex_amp.py":
            continue
        lines = commands(path)
        together = [line for line in lines if "-n 2" in line]
        groups = [[line] for line in lines if line not in together]
        for group in [*groups, together] if together else groups:
            yield pytest.param(
                group,
                id=group[-1].replace(" ", "_").replace("/", "."),
                marks=[pytest.mark.check] * (path.name in ("single.py", "ddp_launch.py")),
            )


@pytest.mark.parametrize("group", list(starts()))
def test_docstring_command(group, data, tmp_path):
    """It prints a line for each epoch, once, and nothing else; it saves, and leaves no process.

    Each launcher starts one file, and the others are forked.
    """
    if "horovodrun" in group[0]:
        need_horovod("horovodrun" if "--gloo" in group[0] else "mpi")
    shutil.copytree(MINIMAL, tmp_path / "minimal")
    port = str(free_port())
    started = []
    for line in group:
        line = line.replace("29500", port)
        line = line.replace("torchrun ", f"torchrun --master-port={port} ")
        command = f"{line} --data-dir {data} --batch-size 32"
        is_forked = re.search(r"^torchrun .*(ddp_amp|fsdp)\.py|^horovodrun --gloo ", line)
        start = ForkedJob if is_forked else Job
        started.append(start(command, tmp_path, MASTER_PORT=port))
    status = [job.finish() for job in started]
    output = "".join(job.output() for job in started)
    # Gloo of torch 2.8 says that it has connected, sometimes two ranks in the same line.
    output = re.sub(r"^(.* peer ranks.*)?\n", "", output, flags=re.MULTILINE)
    assert status == [0] * len(group), output
    pattern = "".join(rf"epoch {epoch}: accuracy \d+\.\d\d%\n" for epoch in (1, 2, 3))
    assert re.fullmatch(pattern, output), output
    assert "0.weight" in torch.load(tmp_path / "mnist.pt")


@pytest.mark.parametrize("strategy", ["ddp_launch", "ddp_spawn", "hvd_gloo"])
def test_ctrl_c_leaves_no_process(strategy, data, tmp_path):
    if strategy == "hvd_gloo":
        need_horovod("gloo")
    port = str(free_port())
    command = f"exec {command_of(strategy, 2)} --data-dir {data} --epochs 1000"
    environment = {"MASTER_PORT": port, "PYTHONUNBUFFERED": "1"}
    job = Job(command, tmp_path, **environment)
    job.wait_for("epoch 1:")
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
def one_process(in_float64, data, tmp_path_factory):
    """What single.py computes in float64."""
    command = f"{command_of('single', 1, in_float64)} {ONE} --epochs 2"
    return train(command, data, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("strategy", ["dp", "ddp_launch", "ddp_spawn", "fsdp", "hvd_gloo"])
def test_two_processes_compute_what_one_does(strategy, in_float64, one_process, data, tmp_path):
    """Over two epochs, so that set_epoch counts."""
    batch = ONE if strategy == "dp" else TWO
    command = f"{command_of(strategy, 2, in_float64)} {batch} --epochs 2 --device cpu"
    weights, accuracies = train(command, data, tmp_path)
    assert largest_difference(weights, one_process[0]) < 1e-9
    assert accuracies == one_process[1]


@pytest.mark.parametrize("strategy", ["ddp_launch", "ddp_spawn", "fsdp", "hvd_gloo"])
def test_each_test_image_counts_once(strategy, in_float64, data, tmp_path):
    """301 images on 3 processes, with a rate too small to change a weight: as on one process."""
    flags = "--epochs 1 --lr 1e-30 --device cpu"
    _, expected = train(f"{command_of('single', 1, in_float64)} {flags}", data, tmp_path / "one")
    _, accuracies = train(
        f"{command_of(strategy, 3, in_float64)} {flags}", data, tmp_path / "three"
    )
    assert accuracies == expected


@pytest.mark.parametrize("strategy", ["ddp_launch", "ddp_spawn", "ddp_amp", "fsdp", "hvd_gloo"])
def test_the_accuracy_is_that_of_the_saved_model(strategy, data, tmp_path):
    """Whose BatchNorm has the statistics of rank 0: the others evaluate with them, too."""
    flags = f"{TWO} --epochs 1 --device cpu"
    _, (accuracy,) = train(f"{command_of(strategy, 2)} {flags}", data, tmp_path)
    code = (
        f"import sys; sys.path.insert(0, '{MINIMAL}'); import single, torch; "
        "model = single.convnet(); model.load_state_dict(torch.load('mnist.pt')); "
        f"test_set = single.load('{data}', train=False); "
        "loader = torch.utils.data.DataLoader(test_set, batch_size=1000)\n"
        "with torch.autocast('cpu', torch.bfloat16, enabled='amp' in sys.argv): "
        "print(single.evaluate(model, loader, 'cpu'))"
    )
    (tmp_path / "evaluate.py").write_text(code)
    # bf16 has 8 bits, and rounds otherwise in a batch of another size.
    slack = 0.5 if strategy == "ddp_amp" else 0.005
    precision = "amp" if strategy == "ddp_amp" else "fp32"
    alone = 100 * float(compute(f"python evaluate.py {precision}", tmp_path))
    assert accuracy == pytest.approx(alone, abs=slack)


def test_a_recipe_goes_on_from_the_weights(data, tmp_path):
    """At a rate too small to change them."""
    train(f"{command_of('single', 1)} {ONE} --epochs 1", data, tmp_path)
    flags = "--init-from mnist.pt --epochs 1 --lr 1e-30 --device cpu --log-dir log"
    compute(f"python {ROOT}/mnist/single.py --data-dir {data} {flags}", tmp_path)
    saved = torch.load(tmp_path / "mnist.pt")
    assert torch.equal(checkpoint(tmp_path / "log")["model"]["0.weight"], saved["0.weight"])


@pytest.mark.parametrize("strategy", ["single", "dp", "ddp_launch", "ddp_spawn", "hvd_gloo"])
def test_on_a_pretended_gpu(strategy, data, tmp_path):
    """The weights of the CPU; fully_shard needs a real GPU."""
    batch = ONE if strategy in ("single", "dp") else TWO
    command = f"{command_of(strategy, 2)} {batch} --epochs 1"
    of_gpu, _ = train(command, data, tmp_path / "gpu", PRETENDED_GPUS="2")
    of_cpu, _ = train(f"{command} --device cpu", data, tmp_path / "cpu")
    # DataParallel has BatchNorm's statistics of the first GPU's half.
    names = of_gpu.keys() if strategy != "dp" else []
    parts = [{name: weights[name] for name in names} for weights in (of_gpu, of_cpu)]
    assert not names or largest_difference(*parts) < 1e-3


def test_amp_on_a_pretended_gpu(data, tmp_path):
    command = f"{command_of('ddp_amp', 2)} {TWO}"
    _, accuracies = train(command, data, tmp_path, PRETENDED_GPUS="2")
    assert accuracies[-1] > 90


@pytest.mark.parametrize("processes", [1, 2])
def test_apex_on_a_pretended_gpu(processes, apex, data, tmp_path):
    """It learns what ddp_spawn.py learns in fp32, but for what fp16 rounds."""
    command = f"{command_of('apex_amp', processes)} {TWO}"
    environment = {"PRETENDED_GPUS": str(processes), "PYTHONPATH": apex}
    weights, accuracies = train(command, data, tmp_path, **environment)
    assert weights["0.weight"].dtype == torch.float32
    assert len(accuracies) == 3
    assert accuracies[-1] > 90


def test_real_mnist(real_data, tmp_path):
    """With the defaults, but one epoch of three."""
    command = f"{command_of('single', 1)} --device cpu --epochs 1"
    _, (accuracy,) = train(command, real_data("mnist"), tmp_path)
    assert accuracy > 97.5
