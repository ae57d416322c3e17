"""docs/your-own.md: what it shows works as it stands there."""

import importlib.util
import re
import textwrap
import types

import pytest
import torch
from forked import compute
from launch import assert_same, checkpoint, evaluations, largest_difference, need, need_horovod
from recipes import ROOT, in_float64, keep_checkpoints

from common.data import EpochSampler, Seeded
from common.process.workers import data_loader

PAGE = (ROOT / "docs" / "your-own.md").read_text()
# In float64.
TOLERANCE = 1e-9
TOKENS = "### A varying number of tokens or pixels, or class weights"


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
    while there:
        indented = there[: len(old)]
        if textwrap.dedent("\n".join(indented)).splitlines() == old:
            indent = indented[0][: len(indented[0]) - len(indented[0].lstrip())]
            changed += textwrap.indent(new, indent).splitlines()
            there = there[len(old) :]
        else:
            changed.append(there.pop(0))
    return "\n".join(changed) + "\n"


def port(heading, to, recipe="ddp_launch.py", more=()):
    """Apply a section, and `more` diff blocks, to a copy of a recipe of mnist/; return its path.

    A block that changes nothing is about a line that this recipe does not have.
    """
    folder = in_float64(to, "mnist")
    path = folder / recipe
    text = path.read_text()
    imports = "import mine\nfrom common.process.workers import data_loader\n"
    text = text.replace("\nimport digits ", f"\n{imports}import digits ")
    found = set()
    for block in [*blocks(heading, "diff"), *more]:
        changed = change(text, block)
        if changed != text:
            found.add(block)
        text = changed
    assert found, f"{recipe} has none of the lines"
    if recipe == "ddp_launch.py":
        assert found == {*blocks(heading, "diff"), *more}
    path.write_text(text)
    (folder / "mine.py").write_text("\n\n".join(blocks(heading, "python")))
    return path


def torchrun(processes):
    return f"torchrun --standalone --nproc-per-node={processes}"


def trained(script, flags, step, folder):
    """The checkpoints of runs on one process and on two, and of the second resumed after `step`."""
    flags = f"{flags} --checkpoint-every {step}"
    compute(f"{torchrun(1)} {script} {flags} --log-dir one", cwd=folder)
    compute(f"{torchrun(2)} {script} {flags} --log-dir two", cwd=folder)
    resume = f"--resume two/{step}.pt --log-dir resumed"
    output = compute(f"{torchrun(2)} {script} {flags} {resume}", cwd=folder)
    assert f"resumed from two/{step}.pt" in output
    return [checkpoint(folder / name) for name in ("one", "two", "resumed")]


def defined(code):
    """What some code defines."""
    names = {}
    exec(code, names)
    return types.SimpleNamespace(**names)


def test_what_it_shows_of_regression_is_there():
    text = (ROOT / "examples" / "regression.py").read_text()
    for block in blocks("## Loss and metrics", "python"):
        assert block in text


def test_flags():
    """Those of a run may differ in one that resumes."""
    (block,) = blocks("## Flags", "python")
    parser = defined(f'"""Train."""\nfrom common import flags\n{textwrap.dedent(block)}').parser
    args = parser.parse_args(["--width", "3"])
    assert (args.task, args.width, args.beam_width) == ("regression", 3, 4)
    assert "beam_width" in args.may_change and "width" not in args.may_change


# An endless source.
SAMPLES = """

import torch


def samples():
    random = torch.Generator().manual_seed(0)
    while True:
        image = torch.randint(256, (1, 28, 28), generator=random, dtype=torch.uint8)
        yield image, image[0, 0, 0].item() % 10
"""


@pytest.mark.parametrize("heading", ["## Sequences", "## A stream"])
def test_port(heading, tmp_path):
    """The same weights on one and two processes, and after a resume within an epoch."""
    script = port(heading, tmp_path)
    keep_checkpoints(script)
    flags = "--device cpu -G 16 --max-steps 15 --eval-every 6"
    if heading == "## A stream":
        with open(script.with_name("mine.py"), "a") as file:
            file.write(SAMPLES)
        flags += " --model lenet --synthetic 80"
    one, two, resumed = trained(script, flags, 13, tmp_path)
    assert one["position"]["epoch"] == {"## Sequences": 0, "## A stream": 1}[heading]
    assert largest_difference(two["model"], one["model"]) < TOLERANCE
    for part in ("position", "model", "optimizer"):
        assert_same(resumed[part], two[part])


def test_what_a_task_may_need(tmp_path):
    """All changes at once: the same on one and two processes, and after a resume in an epoch."""
    folder = in_float64(tmp_path, "mnist")
    script = folder / "ddp_launch.py"
    keep_checkpoints(script)
    text = script.read_text()
    imports = (
        "import mine\n"
        "from common.metrics import in_order\n"
        "from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn\n"
    )
    text = text.replace("\nimport digits ", f"\n{imports}import digits ")
    # What the page leaves to its reader: the other data set.
    seeded = "    torch.manual_seed(args.seed)\n"
    text = text.replace(seeded, f"    hard = val\n{seeded}")
    _, second_set = blocks("## The loop", "diff")
    for block in [second_set, *blocks("## What a task may need", "diff")]:
        if block in blocks(TOKENS, "diff"):
            continue
        changed = change(text, block)
        assert changed != text, f"it does not have:\n{block}"
        text = changed
    text = text.replace("schedule.WarmupCosine", "mine.WarmupLinear")
    script.write_text(text)
    (folder / "mine.py").write_text("\n\n".join(blocks("### Another schedule", "python")))
    # 101 images for validation, so the shares of two ranks are unequal.
    flags = "--device cpu --model lenet --synthetic 505 -G 16 --max-steps 9 --warmup-epochs 0.1"
    one, two, resumed = trained(script, flags, 6, tmp_path)
    for part in ("model", "ema"):
        assert largest_difference(two[part], one[part]) < TOLERANCE
    of_one, of_two = (evaluations(tmp_path / name)[-1] for name in ("one", "two"))
    assert of_one["val/median_margin"] > 0
    for name in ("val/median_margin", "val/hard_loss", "train/lr"):
        assert of_two[name] == pytest.approx(of_one[name], rel=TOLERANCE)
    for part in ("position", "model", "optimizer", "ema"):
        assert_same(resumed[part], two[part])


def test_a_run_ends_early(tmp_path):
    """On all ranks after the same evaluation; and when it is resumed, there is nothing to do."""
    script = in_float64(tmp_path, "mnist") / "ddp_launch.py"
    early, _ = blocks("## The loop", "diff")
    script.write_text(change(script.read_text(), early.replace("0.99", "0.2")))
    flags = "--device cpu --model lenet --synthetic 505 -b 8 --epochs 50 --log-dir log"
    compute(f"{torchrun(2)} {script} {flags}", cwd=tmp_path)
    before = checkpoint(tmp_path / "log")
    assert before["position"]["epoch"] < 50 and before["best"]["value"] >= 0.2
    compute(f"{torchrun(2)} {script} {flags} --resume auto", cwd=tmp_path)
    assert_same(checkpoint(tmp_path / "log")["model"], before["model"])


# A model as those of transformers, which compares DDP's gradient with that of one process.
OF_TRANSFORMERS = """
import copy
import types

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))

    def forward(self, input_ids, attention_mask, labels=None):
        logits = self.layers(input_ids)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return types.SimpleNamespace(logits=logits, loss=loss)


torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
dist.init_process_group("gloo")
world = types.SimpleNamespace(rank=dist.get_rank(), size=dist.get_world_size())
whole = Decoder()
model = DistributedDataParallel(copy.deepcopy(whole))
tokens = torch.randint(9, (4, 6))
mask = torch.ones_like(tokens)
# The first half has 10 labels, and the second has 3.
labels = tokens.clone()
labels[2:, :5] = -100
labels[3, 4] = 7
whole(input_ids=tokens, attention_mask=mask, labels=labels).loss.backward()
tokens, mask, labels = (part.chunk(world.size)[world.rank] for part in (tokens, mask, labels))
loss = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
loss.backward()
for ours, expected in zip(model.parameters(), whole.parameters(), strict=True):
    torch.testing.assert_close(ours.grad, expected.grad)
dist.destroy_process_group()
"""


def test_a_varying_number_of_tokens(tmp_path):
    """On ranks with unequal numbers of labels the gradient is that of one process."""
    script = tmp_path / "port.py"
    (block,) = blocks(TOKENS, "diff")
    script.write_text(change(OF_TRANSFORMERS, block))
    compute(f"{torchrun(2)} {script}", cwd=tmp_path)


def test_hugging_face_datasets():
    """The same batches, augmented alike, on any ranks and workers, at any start."""
    need(importlib.util.find_spec("datasets"), "pip install datasets")
    import datasets

    def noisy(rows):
        return {"number": [number + torch.rand(()).item() for number in rows["number"]]}

    rows = datasets.Dataset.from_dict({"number": list(range(64))}).with_transform(noisy)

    def read(world_size, workers, start):
        """The global batches of 16 from `start` on, in the second epoch."""
        batch_size = 16 // world_size
        ranks = []
        for rank in range(world_size):
            sampler = EpochSampler(64, batch_size, rank, world_size, seed=1)
            loader = data_loader(Seeded(rows, sampler), sampler, batch_size, workers)
            sampler.set_epoch(1, start)
            ranks.append(torch.stack([batch["number"] for batch in loader]))
        return torch.stack(ranks, dim=2).flatten(1)

    whole = read(1, 0, 0)
    assert sorted(whole.flatten().int().tolist()) == list(range(64))
    for world_size, workers, start in ((1, 2, 32), (2, 0, 32), (2, 2, 0)):
        assert_same(read(world_size, workers, start), whole[start // 16 :])


CLIPPING = """\
-optimizer.step()
+torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
+optimizer.step()
"""
SMALL = "--device cpu -G 16 --max-steps 6 --warmup-epochs 0.5"


def weights(start, script, more=""):
    """The model of a small run."""
    log = script.with_suffix(".log")
    compute(f"{start} {script} {SMALL} --log-dir {log} {more}", cwd=script.parent)
    return checkpoint(log)["model"]


def test_another_strategy(tmp_path):
    """The lines of a port are those of all recipes: started by mp.spawn, and with FSDP."""
    expected = weights(torchrun(1), port("## Sequences", tmp_path / "ddp"))
    spawn = port("## Sequences", tmp_path / "spawn", "ddp_spawn.py")
    of_fsdp = blocks("### FSDP", "diff")
    fsdp = port("## Sequences", tmp_path / "fsdp", "fsdp.py", of_fsdp)
    # It has nothing of MNIST any more.
    for script in (spawn, fsdp):
        assert script.read_text().count("digits") == 1
    assert largest_difference(weights("python", spawn, "-g 2"), expected) < TOLERANCE
    assert largest_difference(weights(torchrun(2), fsdp), expected) < TOLERANCE


def test_horovod_clips(tmp_path):
    need_horovod("gloo")
    expected = weights(torchrun(1), port("## Sequences", tmp_path / "ddp", more=[CLIPPING]))
    unclipped = weights(torchrun(1), port("## Sequences", tmp_path / "unclipped"))
    of_horovod = blocks("### Horovod", "diff")
    script = port("## Sequences", tmp_path / "hvd", "hvd.py", of_horovod)
    found = weights("horovodrun --gloo -np 2 python", script)
    assert largest_difference(found, expected) < TOLERANCE
    assert largest_difference(unclipped, expected) > 1e-3
