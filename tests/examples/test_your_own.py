"""docs/your-own.md: its ports and its changes for other strategies work as they stand there."""

import io
import re
import shutil
import subprocess
import tarfile
import textwrap

import pytest
import torch
from forked import compute
from launch import assert_same, checkpoint, evaluations, largest_difference, need_horovod
from recipes import ROOT, STEP, in_float64

from mnist import digits

PAGE = (ROOT / "docs" / "your-own.md").read_text()
# In float64. AdamW divides by gradients near 0, and so magnifies the differences of rounding.
TOLERANCE = 1e-9


def section(heading):
    """The text below a heading, up to the next of its level or above."""
    level = heading.split()[0]
    start = PAGE.index(f"\n{heading}\n")
    end = re.search(rf"\n#{{2,{len(level)}}} ", PAGE[start + len(heading) :])
    return PAGE[start:][: len(heading) + end.start()]


def blocks(heading, language):
    pattern = rf"^```{language}\n(.*?)^```"
    return re.findall(pattern, section(heading), flags=re.MULTILINE | re.DOTALL)


def change(text, block):
    """Replace the lines of a diff block wherever they occur, at any indentation."""
    lines = block.splitlines()
    old = [line[1:] for line in lines if line[0] in " -"]
    new = "\n".join(line[1:] for line in lines if line[0] in " +")
    there = text.splitlines()
    changed = []
    found = 0
    while there:
        indented = there[: len(old)]
        if textwrap.dedent("\n".join(indented)).splitlines() == old:
            indent = indented[0][: len(indented[0]) - len(indented[0].lstrip())]
            changed += textwrap.indent(new, indent).splitlines()
            there = there[len(old) :]
            found += 1
        else:
            changed.append(there.pop(0))
    assert found, f"it does not have:\n{block}"
    return "\n".join(changed) + "\n"


def port(heading, to):
    """Apply a section to a copy of mnist/ddp_launch.py, in float64; return its path."""
    folder = in_float64(to, "mnist")
    path = folder / "ddp_launch.py"
    text = path.read_text()
    for block in blocks(heading, "diff"):
        text = change(text, block)
    path.write_text(text)
    (folder / "mine.py").write_text("\n\n".join(blocks(heading, "python")))
    return path


def shards(folder):
    """Write 80 generated images into three tar files."""
    train_set, _ = digits.load("", 80, seed=0)
    for number, part in enumerate(torch.arange(80).split(30)):
        with tarfile.open(folder / f"{number}.tar", "w") as tar:
            for index in part.tolist():
                image, label = train_set[index]
                content = image.numpy().tobytes()
                entry = tarfile.TarInfo(f"{index:05}.{label}.raw")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))


def torchrun(processes):
    return f"torchrun --standalone --nproc-per-node={processes}"


@pytest.mark.parametrize("heading", ["## Sequences", "## A stream"])
def test_port(heading, tmp_path):
    """The same weights on one and two processes, and after a kill within an epoch.

    An epoch of the stream is longer than its files, which repeat.
    """
    script = port(heading, tmp_path)
    flags = "--device cpu -G 16 --max-steps 14 --eval-every 6 --checkpoint-every 2 --log-interval 2"
    if heading == "## A stream":
        shards(tmp_path)
        flags += " --model lenet --synthetic 80 --epoch-samples 170 --shards 0.tar 1.tar 2.tar"
    for processes in (1, 2):
        start = f"{torchrun(processes)} {script} {flags}"
        compute(f"{start} --log-dir {processes}", cwd=tmp_path)
    one, two = (checkpoint(tmp_path / name) for name in "12")
    assert one["position"]["epoch"] == (1 if heading == "## A stream" else 0)
    assert largest_difference(two["model"], one["model"]) < TOLERANCE
    kill = "            if position.steps == 13:\n                import os\n\n"
    kill += "                os.kill(os.getpid(), 9)\n"
    killed = script.with_name("killed.py")
    killed.write_text(script.read_text().replace(STEP, kill + STEP))
    compute(f"{torchrun(2)} {killed} {flags} --log-dir part", cwd=tmp_path, status=9)
    assert checkpoint(tmp_path / "part")["position"]["steps"] == 12
    output = compute(f"{start} --log-dir part --resume auto", cwd=tmp_path)
    assert "resumed from part/last.pt" in output
    for part in ("position", "model", "optimizer"):
        assert_same(checkpoint(tmp_path / "part")[part], two[part])


def body(path):
    """The text of a recipe behind its docstring and imports."""
    text = path.read_text()
    return text[text.index("def parse_args") :]


def head(path):
    """The text of a recipe up to there, without the module beside it."""
    text = path.read_text()
    return text[: text.index("def parse_args")].replace("import digits  # beside this file\n", "")


def merged(example, recipe, *options):
    """Merge an example with another recipe of mnist/: (conflicts behind the imports, text)."""
    paths = [recipe, ROOT / "mnist" / "ddp_launch.py", example]
    parts = [example.with_name(f"{number}.body") for number in range(3)]
    for path, part in zip(paths, parts, strict=True):
        part.write_text(body(path))
    command = ["git", "merge-file", "-p", *options, *parts]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.returncode, head(recipe) + head(example) + result.stdout


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A function: (the folder of the examples in float64, the weights of one after one process)."""
    folders = []
    weights = {}

    def run(name, flags):
        if not folders:
            folders.append(in_float64(tmp_path_factory.mktemp("examples"), "examples"))
        (folder,) = folders
        if name not in weights:
            log = folder / f"{name}-log"
            compute(f"{torchrun(1)} {folder / name}.py {flags} --log-dir {log}", cwd=folder)
            weights[name] = checkpoint(log)["model"]
        return folder, weights[name]

    return run


SMALL = "--device cpu -G 16 --epochs 2 --warmup-epochs 0.5"
# Clipping changes the gradient in each step, and images have different numbers of known pixels.
EXAMPLES = {
    "finetune": "--synthetic 80 --image-size 32 --workers 0",
    "language_model": "--synthetic 600 --context 32 --width 16 --layers 1 --dropout 0 --clip 0.1",
    "regression": "--synthetic 120",
    "segmentation": "--synthetic 80 --image-size 32 --width 4 --workers 0",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_horovod(name, single, tmp_path):
    """Merged with hvd.py, an example computes what it does on one process."""
    need_horovod("gloo")
    flags = f"{EXAMPLES[name]} {SMALL}"
    folder, expected = single(name, flags)
    conflicts, text = merged(folder / f"{name}.py", ROOT / "mnist" / "hvd.py")
    assert conflicts == 0
    clipping, reduction = blocks("### Horovod", "diff")
    if name == "language_model":
        text = change(text, clipping)
    if name == "segmentation":
        text = change(text, reduction)
    script = folder / f"{name}_hvd.py"
    script.write_text(text)
    start = f"horovodrun --gloo -np 2 python {script} {flags}"
    compute(f"{start} --log-dir {tmp_path / 'log'}", cwd=tmp_path)
    assert largest_difference(checkpoint(tmp_path / "log")["model"], expected) < TOLERANCE


def test_spawn(single, tmp_path):
    flags = f"{EXAMPLES['regression']} {SMALL}"
    folder, expected = single("regression", flags)
    conflicts, text = merged(folder / "regression.py", ROOT / "mnist" / "ddp_spawn.py")
    assert conflicts == 0
    script = folder / "regression_spawn.py"
    script.write_text(text)
    compute(f"python {script} -g 2 {flags} --log-dir {tmp_path / 'log'}", cwd=tmp_path)
    assert largest_difference(checkpoint(tmp_path / "log")["model"], expected) < TOLERANCE


def test_fsdp(single, tmp_path):
    flags = f"{EXAMPLES['regression']} {SMALL}"
    folder, expected = single("regression", flags)
    conflicts, text = merged(folder / "regression.py", ROOT / "mnist" / "fsdp.py", "--theirs")
    assert conflicts == 0
    for block in blocks("### FSDP", "diff"):
        text = change(text, block)
    script = folder / "regression_fsdp.py"
    script.write_text(text)
    compute(f"{torchrun(2)} {script} {flags} --log-dir {tmp_path / 'log'}", cwd=tmp_path)
    assert largest_difference(checkpoint(tmp_path / "log")["model"], expected) < TOLERANCE


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_amp(dtype, tmp_path):
    """It learns as well as in fp32, within the digits of 16 bits."""
    for folder in ("common", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    example = tmp_path / "examples" / "regression.py"
    _, text = merged(example, ROOT / "mnist" / "ddp_amp.py", "--theirs")
    for block in blocks("### Mixed precision", "diff"):
        text = change(text, block)
    script = example.with_name("regression_amp.py")
    script.write_text(text)
    flags = "--device cpu --synthetic 5000 --log-dir"
    compute(f"{torchrun(2)} {example} {flags} whole", cwd=tmp_path)
    compute(f"{torchrun(2)} {script} {flags} half --amp-dtype {dtype}", cwd=tmp_path)
    whole, half = (evaluations(tmp_path / name)[-1]["val/rmse"] for name in ("whole", "half"))
    assert half == pytest.approx(whole, rel=0.05)
