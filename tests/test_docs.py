"""The documents are right: links resolve, tables agree with the code, and code blocks run."""

import itertools
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from forked import compute
from launch import checkpoint, need_horovod
from recipes import ROOT

from cifar10 import cifar
from common import models, schedule
from common.data import EpochSampler
from docs import changes, draw

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md")])


def path_of(page):
    return str(page.relative_to(ROOT))


def prose(page):
    """The text of a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def links(page):
    """(file, anchor) of each link and image of a page that stays in the repository."""
    text = re.sub(r"`[^`\n]*`", "", prose(page))  # brackets in code are no links
    found = re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", text)
    targets = [target for pair in found for target in pair if target and not re.match(r"[a-z]+:", target)]
    for file, _, anchor in (target.partition("#") for target in targets):
        yield ((page.parent / file).resolve() if file else page), anchor


def anchors(page):
    """The anchors that GitHub gives to the headings of a page."""
    slugs = []
    for heading in re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        slugs.append(f"{slug}-{slugs.count(slug)}" if slug in slugs else slug)
    return slugs


def table(page, first):
    """The rows of the table in a page of docs/ whose head begins with the cell `first`, as lists of cells."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {first} |"))
    end = next(n for n in range(start, len(lines)) if not lines[n].startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start + 2:end]]


@pytest.mark.check
@pytest.mark.parametrize("page", PAGES, ids=path_of)
def test_links_lead_somewhere(page):
    for file, anchor in links(page):
        assert file.exists(), f"{file} is not there"
        if file.suffix == ".md":
            assert not anchor or anchor in anchors(file), f"{path_of(file)} has no heading #{anchor}"
        elif anchor:
            assert int(anchor.removeprefix("L")) <= len(file.read_text().splitlines())


@pytest.mark.check
def test_each_page_is_reached_from_the_readme():
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        reached.add(page)
        ahead += {file for file, _ in links(page) if file.suffix == ".md" and file.exists()} - reached
    assert [path_of(page) for page in sorted({*ROOT.glob("docs/*.md")} - reached)] == []


@pytest.mark.check
def test_changes_are_those_of_the_recipes():
    assert changes.PAGE.read_text() == changes.page(), "python docs/changes.py"


@pytest.mark.check
def test_the_diff_in_the_readme_is_that_of_the_recipes():
    """It shows each reason above its line, so that no line is too long for the page."""
    block, = re.findall(r"^```diff\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    single, ddp = ([line.strip().partition("  # dist: ")[::2] for line in path.read_text().splitlines()]
                   for path in (ROOT / "mnist" / "single.py", ROOT / "mnist" / "ddp_launch.py"))
    lines = [line for line in block.splitlines() if line]
    assert {line[1:] for line in lines if line[0] == "-"} <= {code for code, _ in single}
    assert {line[1:] for line in lines if line[0] == "+"} <= {code for code, _ in ddp}
    for reason, line in itertools.pairwise(line for line in lines if line[0] != "-"):
        assert not reason.startswith(" # ") or (line[1:], reason.removeprefix(" # ")) in ddp


@pytest.mark.check
def test_drawings_are_those_of_the_script():
    assert {path.stem: path.read_text() for path in draw.FOLDER.iterdir()} == {
        name: drawing() for name, drawing in draw.DRAWINGS.items()}, "python docs/draw.py"


def test_example_of_batch_sizes():
    """Each row is what the sampler and the schedule of the recipes give for that many processes."""
    rows = table("batch-size.md", "processes")
    assert [row[0] for row in rows] == ["1", "2", "4", "8"]
    for row in rows:
        world_size, batch, global_batch, steps = map(int, row[:4])
        assert (batch, global_batch) == (32, 32 * world_size)
        for rank in range(world_size):
            assert len(EpochSampler(1024, batch, seed=0, rank=rank, world_size=world_size)) == steps * batch
        for scaling, rate in zip(("linear", "sqrt", "none"), row[4:], strict=True):
            args = SimpleNamespace(scale_lr=scaling, global_batch_size=None)
            assert f"{0.02 * schedule.lr_factor(args, world_size):.3g}" == rate


def test_commands_of_batch_sizes(tmp_path):
    """The two commands under the example take as many steps, and print the batch and rate, as its table says."""
    page = (ROOT / "docs/batch-size.md").read_text().replace("\\\n", "")
    commands = re.search(r"^```\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[1]
    rows = table("batch-size.md", "processes")
    for command, (_, batch, global_batch, steps, rate, *_) in zip(
            commands.splitlines(), (rows[0], rows[-1]), strict=True):
        printed = compute(f"{command} --log-dir {tmp_path / steps} --checkpoint-every {steps}", cwd=ROOT)
        assert f"batch {batch} per process, {global_batch} global | lr {rate}\n" in printed
        within = torch.load(tmp_path / steps / "previous.pt", weights_only=True)  # saved after the last step
        assert (within["epoch"], within["samples"]) == (0, int(steps) * int(global_batch))


def test_sizes_of_the_gradients():
    from torchvision.models import resnet50

    sizes = {"MNIST's convnet": models.MODELS["convnet"](1, 28), "ImageNet's resnet50": resnet50(),
             "CIFAR-10's resnet18": cifar.MODELS["resnet18"](3, 32)}
    for name, parameters, size, sent in table("allreduce.md", "model"):
        count = sum(weights.numel() for weights in sizes[name].parameters())
        assert parameters == f"{count:,}"
        assert size == f"{4 * count / 1e6:.2f} MB"
        assert sent == f"{4 * count * 2 * 7 / 8 / 1e6:.2f} MB"


HOROVOD = """
import sys, torch, horovod.torch as hvd
hvd.init()
pair = torch.tensor([[60000, 1e-8], [60000, 1e-8]])[hvd.rank()]
sent, kind = hvd.Compression.fp16.compress(pair)
average = hvd.Compression.fp16.decompress(hvd.allreduce(sent, op=hvd.Average, name="average"), kind)
assert average.tolist() == [float("inf"), 0], average
for g, h in [([3, 0], [0, 4]), ([3, 4], [3, 4]), ([1, 0], [1, 2])] if "adasum" in sys.argv else []:
    g, h = torch.tensor(g).float(), torch.tensor(h).float()
    expected = (1 - g @ h / (2 * g @ g)) * g + (1 - g @ h / (2 * h @ h)) * h
    torch.testing.assert_close(hvd.allreduce((g, h)[hvd.rank()], op=hvd.Adasum, name=f"{g}{h}"), expected)
"""


@pytest.mark.parametrize("launcher", ["horovodrun --gloo -np 2", "mpirun --oversubscribe --bind-to none -np 2"])
def test_what_horovod_does_to_gradients(launcher, tmp_path):
    """In fp16 a sum overflows before it is divided, and small values are 0; Adasum is what the page says."""
    need_horovod(launcher)
    (tmp_path / "check.py").write_text(HOROVOD)
    compute(f"{launcher} python check.py {'adasum' if 'mpi' in launcher else ''}", cwd=tmp_path)


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


CLIPPING = "ddp_launch.py", "hvd.py", "ddp_amp.py", "apex_amp.py"  # in the order of docs/your-own.md


def port(name, to):
    """Apply docs/your-own.md to a copy of mnist/`name` in the folder `to`."""
    page, text = (ROOT / "docs" / "your-own.md").read_text(), (ROOT / "mnist" / name).read_text()
    everywhere, _, clipping = page.partition("## Clipping gradients")
    clipping = blocks(clipping, "diff")
    only_amp = clipping[len(CLIPPING):] if name == "ddp_amp.py" else []
    own = "ddp_launch.py" if name == "fsdp.py" else name
    for block in [*blocks(everywhere, "diff"), clipping[CLIPPING.index(own)], *only_amp]:
        lines = block.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] in marks) for marks in (" -", " +"))
        found = re.findall(re.escape(old).replace(r"\.\.\.", ".*"), text)  # ... stands for the rest of a line
        assert len(found) == 1, f"mnist/{name} does not have exactly once:\n{old}"
        text = text.replace(found[0], new)
    (to / "train.py").write_text(text)
    (to / "mine.py").write_text("\n\n".join(blocks(page, "python")))
    shutil.copytree(ROOT / "common", to / "common", ignore=shutil.ignore_patterns("__pycache__"))


@pytest.mark.parametrize("name", [*CLIPPING, "fsdp.py"])
def test_your_own(name, tmp_path):
    """It learns, and a run resumed within an epoch ends with exactly the weights of one that was never stopped."""
    port(name, tmp_path)
    if name == "apex_amp.py":  # which needs a GPU
        compile((tmp_path / "train.py").read_text(), "train.py", "exec")
        return
    if name == "hvd.py":
        need_horovod("gloo")
    start = "horovodrun --gloo -np 2 python" if name == "hvd.py" else "torchrun --standalone --nproc-per-node=2"
    assert "--synthetic" not in compute("python train.py --help", tmp_path)
    doctor = compute(f"{start} {ROOT}/scripts/doctor.py --recipe train.py --data load", tmp_path)
    assert "doctor: all is well" in doctor
    assert compute(f"{start} train.py --log-dir whole --checkpoint-every 40", tmp_path).startswith("mine: ")
    whole = checkpoint(tmp_path / "whole")
    assert whole["history"][-1]["val"]["accuracy"] > 0.98
    line = "        run.step(metrics)"
    stop = f"        if (run.epoch, run.samples) == (1, 3900): __import__('signal').raise_signal(15)\n{line}"
    (tmp_path / "stop.py").write_text((tmp_path / "train.py").read_text().replace(line, stop))
    compute(f"{start} stop.py --log-dir again --checkpoint-every 40", tmp_path)
    resumed = compute(f"{start} train.py --log-dir again --resume auto", tmp_path)
    assert "at epoch 2, sample 4000 " in resumed
    again = checkpoint(tmp_path / "again")
    assert all(torch.equal(weights, again["model"][key]) for key, weights in whole["model"].items())


ONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
       "MASTER_PORT": "0"}  # as torchrun for one process, without its output
FACTOR = """
import math

class Factor:
    def __init__(self):
        self.shape = math.cos

    def __call__(self, step):
        return self.shape(step / 100)
"""


def test_schedulers_state(tmp_path):
    """OneCycleLR counts steps and sets the rate: another batch or rate is refused, as is a state that no run reads."""
    port("ddp_launch.py", tmp_path)
    start = "python train.py --device cpu --epochs 1"
    compute(f"{start} -b 500 --checkpoint-every 5 --log-dir log", tmp_path, **ONE)
    resumed = f"{start} --resume log/previous.pt --dry-run"
    line, = compute(f"{resumed} -b 250", tmp_path, status=2, **ONE).splitlines()
    assert "scheduler" in line and "'global_batch': 500" in line and "'global_batch': 250" in line
    line, = compute(f"{resumed} -b 500 --lr 0.01", tmp_path, status=2, **ONE).splitlines()
    assert "'lr': 0.001" in line and "'lr': 0.01" in line
    assert "resumed from" in compute(f"{resumed} -b 500", tmp_path, **ONE)
    text = (tmp_path / "train.py").read_text().replace("import MyModel", "import Factor, MyModel")
    (tmp_path / "mine.py").write_text(FACTOR + (tmp_path / "mine.py").read_text())
    (tmp_path / "train.py").write_text(re.sub(r"OneCycleLR\(.*\)", "LambdaLR(optimizer, Factor())", text))
    assert "math.cos" in compute(f"{start} -b 500 --log-dir unreadable", tmp_path, status=1, **ONE)
    assert not (tmp_path / "unreadable" / "last.pt").exists()
