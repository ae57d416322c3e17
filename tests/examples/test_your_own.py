"""docs/your-own.md: its ports and its changes for other strategies work as they stand there."""

import importlib.util
import io
import itertools
import re
import shutil
import subprocess
import tarfile
import textwrap
import types

import pytest
import torch
from forked import compute
from launch import assert_same, checkpoint, evaluations, largest_difference, need, need_horovod
from PIL import Image
from recipes import ROOT, in_float64, keep_checkpoints
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

from common.data import EpochSampler, Seeded
from common.errors import InputError
from common.process.workers import data_loader
from mnist import digits

PAGE = (ROOT / "docs" / "your-own.md").read_text()
# In float64. AdamW divides by gradients near 0, and so magnifies the differences of rounding.
TOLERANCE = 1e-9
ROWS = "### Hugging Face datasets"
WEBDATASET = "### WebDataset"
LABELS = "### A model that computes its loss"


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
    # It says that the lines are those.
    lines = "## A stream" if heading == WEBDATASET else heading
    for block in blocks(lines, "diff"):
        text = change(text, block)
    path.write_text(text)
    (folder / "mine.py").write_text("\n\n".join(blocks(heading, "python")))
    return path


def trained(script, flags, step, folder):
    """The checkpoints of runs on one process and on two, and of the second resumed after `step`."""
    keep_checkpoints(script)
    flags = f"{flags} --checkpoint-every {step}"
    compute(f"{torchrun(1)} {script} {flags} --log-dir one", cwd=folder)
    compute(f"{torchrun(2)} {script} {flags} --log-dir two", cwd=folder)
    resume = f"--resume two/{step}.pt --log-dir resumed"
    output = compute(f"{torchrun(2)} {script} {flags} {resume}", cwd=folder)
    assert f"resumed from two/{step}.pt" in output
    return [checkpoint(folder / name) for name in ("one", "two", "resumed")]


def mine(heading):
    """What the code of a section defines."""
    names = {}
    exec("\n\n".join(blocks(heading, "python")), names)
    return types.SimpleNamespace(**names)


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


def need_package(name):
    need(importlib.util.find_spec(name), f"pip install {name}")


def jpegs(count, numbered):
    """`count` generated images as bytes of a JPEG file, with labels: classes, or 0, 1, 2, ..."""
    images, labels = digits.load("", count, seed=0)[0].tensors
    files = []
    for image in images:
        file = io.BytesIO()
        Image.fromarray(image[0].numpy()).save(file, "JPEG", quality=100)
        files.append(file.getvalue())
    return files, list(range(count)) if numbered else labels.tolist()


def rows(folder, numbered=False):
    """Write a data set of `datasets`, with 64 generated images for training."""
    import datasets

    features = {"image": datasets.Image(decode=False), "label": datasets.Value("int64")}
    both = {}
    for name, count in (("train", 64), ("validation", 16)):
        files, labels = jpegs(count, numbered)
        columns = {"image": [{"bytes": file} for file in files], "label": labels}
        both[name] = datasets.Dataset.from_dict(columns, datasets.Features(features))
    datasets.DatasetDict(both).save_to_disk(folder)


def webdataset_files(folder, in_each, numbered=False):
    """Write 64 generated images into tar files of `in_each`; return the paths."""
    import webdataset

    with webdataset.ShardWriter(f"{folder}/%d.tar", maxcount=in_each, verbose=0) as writer:
        for number, (file, label) in enumerate(zip(*jpegs(64, numbered), strict=True)):
            writer.write({"__key__": f"{number:05}", "jpg": file, "cls": label})
    return sorted(map(str, folder.glob("*.tar")))


def read(dataset_of, world_size, workers, *places):
    """The global batches of 16, [images, labels], from the last of some places (epoch, start) on.

    An epoch has 64 samples. `dataset_of` gives the dataset for a sampler. All ranks must have as
    many batches.
    """
    batch_size = 16 // world_size
    ranks = []
    for rank in range(world_size):
        sampler = EpochSampler(64, batch_size, rank, world_size, seed=1)
        loader = data_loader(dataset_of(sampler), sampler, batch_size, workers)
        for place in places:
            sampler.set_epoch(*place)
            batches = list(loader)
        ranks.append(batches)
    return [
        [torch.stack(parts, dim=1).flatten(0, 1) for parts in zip(*batches, strict=True)]
        for batches in zip(*ranks, strict=True)
    ]


def steps(batches):
    """The labels of each batch, in the order of the numbers."""
    return [sorted(labels.tolist()) for _, labels in batches]


def numbers(batches):
    """All labels of some batches, in the order of the numbers."""
    return sorted(itertools.chain(*steps(batches)))


def torchrun(processes):
    return f"torchrun --standalone --nproc-per-node={processes}"


@pytest.mark.parametrize("heading", ["## Sequences", "## A stream", ROWS])
def test_port(heading, tmp_path):
    """The same weights on one and two processes, and after a resume within an epoch.

    An epoch of the stream is longer than its files, which repeat.
    """
    if heading == ROWS:
        need_package("datasets")
    script = port(heading, tmp_path)
    flags = "--device cpu -G 16 --max-steps 15 --eval-every 6"
    if heading == "## A stream":
        shards(tmp_path)
        flags += " --model lenet --synthetic 80 --epoch-samples 170 --shards 0.tar 1.tar 2.tar"
    if heading == ROWS:
        rows(tmp_path / "rows")
        flags += " --model lenet --data-dir rows"
    one, two, resumed = trained(script, flags, 13, tmp_path)
    epochs = {"## Sequences": 0, "## A stream": 1, ROWS: 3}
    assert one["position"]["epoch"] == epochs[heading]
    assert largest_difference(two["model"], one["model"]) < TOLERANCE
    for part in ("position", "model", "optimizer"):
        assert_same(resumed[part], two[part])


# What the page leaves to its reader: a size, a second data set, and what is carried.
LEFT_OPEN = """
PART = 3


def load_extra(args, device, rank, world_size):
    dataset = TensorDataset(*(part.flip(0)[:70] for part in load(args)[0].tensors))
    sampler = EpochSampler(len(dataset), 16 // world_size, rank, world_size, seed=args.seed + 1)
    loader = TensorLoader(dataset, sampler, sampler.batch_size, device)
    return DataObject(dataset, sampler, loader)


def main():
"""
CARRIED = """
    carried = torch.zeros(3, device=device)
    optimizer.register_step_post_hook(lambda *_: carried.mul_(0.9).add_(rank + position.steps))
    # A checkpoint holds the state of these objects"""


def with_median(text):
    """The text of regression.py with the changes of "A metric that is no sum"."""
    first, *others = blocks("### A metric that is no sum", "diff")
    # The last line of a function is that of training, too.
    head, evaluate, rest = re.split(r"(?=^def evaluate|^def train_to)", text, flags=re.MULTILINE)
    for block in others:
        evaluate = change(evaluate, block)
    return change(head, first) + evaluate + rest


def test_what_a_task_may_need(tmp_path):
    """All changes at once: the same on one and two processes, and after a resume in an epoch."""
    folder = in_float64(tmp_path, "examples")
    heading = "## What a task may need"
    text = with_median((folder / "regression.py").read_text())
    of_labels = blocks(LABELS, "diff")
    for block in blocks(heading, "diff"):
        if block not in of_labels:
            text = change(text, block)
    imports = "import mine\nfrom torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn\n"
    text = text.replace("import numpy as np\n", f"import numpy as np\n{imports}")
    text = text.replace("\n\ndef main():\n", LEFT_OPEN)
    text = text.replace("\n    # A checkpoint holds the state of these objects", CARRIED)
    script = folder / "port.py"
    script.write_text(text)
    (folder / "mine.py").write_text("\n\n".join(blocks(heading, "python")[:3]))
    # 101 rows for validation, so the shares of two ranks are unequal.
    flags = "--device cpu --synthetic 505 -G 16 --max-steps 9 --warmup-epochs 0.1"
    one, two, resumed = trained(script, flags, 6, tmp_path)
    for part in ("model", "ema"):
        assert largest_difference(two[part], one[part]) < TOLERANCE
    of_one, of_two = (evaluations(tmp_path / name)[-1]["val/median"] for name in ("one", "two"))
    assert of_one > 0
    assert of_two == pytest.approx(of_one, rel=TOLERANCE)
    assert not torch.equal(*two["carried"]["of_ranks"])
    for part in ("position", "model", "optimizer", "ema", "carried"):
        assert_same(resumed[part], two[part])


def test_a_state_of_each_rank_needs_as_many_ranks():
    of_each = mine("### A state of each rank").OfEachRank(torch.zeros(3), 0, 1, None)
    with pytest.raises(InputError, match="go on with 2 processes"):
        of_each.load_state_dict({"of_ranks": torch.zeros(2, 3)})


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
rank = dist.get_rank()
world_size = dist.get_world_size()
whole = Decoder()
model = DistributedDataParallel(copy.deepcopy(whole))
tokens = torch.randint(9, (4, 6))
mask = torch.ones_like(tokens)
# The first half has 10 labels, and the second has 3.
labels = tokens.clone()
labels[2:, :5] = -100
labels[3, 4] = 7
whole(input_ids=tokens, attention_mask=mask, labels=labels).loss.backward()
tokens, mask, labels = (part.chunk(world_size)[rank] for part in (tokens, mask, labels))
loss = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
loss.backward()
for ours, expected in zip(model.parameters(), whole.parameters(), strict=True):
    torch.testing.assert_close(ours.grad, expected.grad)
dist.destroy_process_group()
"""


def test_a_model_that_computes_its_loss(tmp_path):
    """On ranks with unequal numbers of labels the gradient is that of one process."""
    script = tmp_path / "port.py"
    (block,) = blocks(LABELS, "diff")
    script.write_text(change(OF_TRANSFORMERS, block))
    compute(f"{torchrun(2)} {script}", cwd=tmp_path)


def test_detection():
    """torchvision's guess of the scales depends on the first images. Set as here, they stay."""
    collate, scales = blocks("### Detection", "python")
    names = {}
    exec(collate, names)
    backbone = resnet_fpn_backbone(backbone_name="resnet18", weights=None)
    model = FasterRCNN(backbone, num_classes=2, min_size=40, max_size=64)
    pool = model.roi_heads.box_roi_pool

    def guessed():
        return pool.scales, vars(pool.map_levels)

    def forward(*sizes):
        target = {"boxes": torch.tensor([[5.0, 5, 25, 25]]), "labels": torch.tensor([1])}
        samples = [(torch.rand(3, *size), target) for size in sizes]
        options = {"batch_size": 2, "workers": 0, "collate_fn": names["collate"]}
        ((images, targets),) = data_loader(samples, range(len(samples)), **options)
        losses = model(images, targets)
        assert all(loss.isfinite() for loss in losses.values())

    high, wide = (64, 40), (40, 64)
    forward(high, high)
    right = guessed()
    pool.scales = None
    forward(wide, wide)
    assert guessed() != right
    exec(scales, {"model": model})
    for sizes in ((wide, wide), (high, wide)):
        assert guessed() == right
        forward(*sizes)
    assert guessed() == right


def test_rows_keep_their_order(tmp_path):
    """Of `datasets`: the same batches, augmented alike, on any ranks and workers, at any start."""
    need_package("datasets")
    rows(tmp_path, numbered=True)
    train_set, val_set = mine(ROWS).load(tmp_path)

    def seeded(sampler):
        return Seeded(train_set, sampler)

    whole = read(seeded, 1, 0, (1, 0))
    assert numbers(whole) == list(range(64))
    for world_size, workers, start in ((1, 2, 32), (2, 0, 32), (2, 2, 0)):
        batches = read(seeded, world_size, workers, (0, 0), (1, start))
        assert_same(batches, whole[start // 16 :])
    # The shift of an image differs between epochs.
    images = {}
    for batches in (whole, read(seeded, 1, 0, (0, 0))):
        for image, label in zip(*map(torch.cat, zip(*batches, strict=True)), strict=True):
            images.setdefault(label.item(), []).append(image)
    assert sum(not torch.equal(*both) for both in images.values()) > 50
    # Those for validation stay as they are, but for what JPEG loses.
    original = digits.load("", 16, seed=0)[0].tensors[0]
    decoded = torch.stack([image for image, _ in val_set])
    assert (decoded.int() - original.int()).abs().float().mean() < 2


def test_other_rows_have_another_fingerprint(tmp_path):
    """By which ranks notice that one has others, or the same in another order."""
    need_package("datasets")
    rows(tmp_path, numbered=True)
    module = mine(ROWS)
    train_set, _ = module.load(tmp_path)
    assert module.load(tmp_path)[0].fingerprint() == train_set.fingerprint()
    others = module.Rows(train_set.rows.shuffle(seed=0), None)
    assert others.fingerprint() != train_set.fingerprint()


@pytest.fixture
def stream_of(tmp_path):
    """A function: a function of a sampler that gives its stream of tar files, of `in_each` each."""
    need_package("webdataset")

    def make(in_each, **options):
        paths = webdataset_files(tmp_path, in_each, numbered=True)
        return lambda sampler: mine(WEBDATASET).Shards(paths, sampler, **options)

    return make


@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (2, 2)])
def test_webdataset_gives_each_sample_once(world_size, workers, stream_of):
    """If ranks and workers have files of the same size.

    A pass depends on its epoch and where it begins, and not on the pass before.
    """
    stream = stream_of(in_each=16)
    batches = read(stream, world_size, workers, (0, 0))
    assert numbers(batches) == list(range(64))
    later = read(stream, world_size, workers, (0, 0), (1, 0))
    assert numbers(later) == list(range(64))
    assert steps(later) != steps(batches)
    assert_same(read(stream, world_size, workers, (1, 0)), later)
    # What is left of an epoch has as many steps, with other samples.
    resumed = read(stream, world_size, workers, (0, 32))
    assert len(resumed) == 2
    assert steps(resumed) != steps(batches)[2:]
    assert_same(read(stream, world_size, workers, (0, 0), (0, 32)), resumed)


def test_webdataset_shuffles_within_its_buffer(stream_of):
    """With a buffer of 10 the first 16 samples are of the first 26, so of two files of 16."""
    for epoch in range(3):
        first, *_ = steps(read(stream_of(in_each=16, buffer=10), 1, 0, (epoch, 0)))
        assert len({number // 16 for number in first}) <= 2
    # With a map-style data set, or a large buffer
    order = list(EpochSampler(64, 16, seed=1))
    assert {number // 16 for number in order[:16]} == {0, 1, 2, 3}
    first, *_ = steps(read(stream_of(in_each=16), 1, 0, (0, 0)))
    assert len({number // 16 for number in first}) > 2


def test_webdataset_has_as_many_steps_on_each_rank(stream_of):
    """Of 24, 24 and 16 samples rank 0 has two files and leaves some out; rank 1 repeats its one."""
    stream = stream_of(in_each=24)
    for epoch in range(3):
        labels = torch.cat([labels for _, labels in read(stream, 2, 1, (epoch, 0))])
        assert len(labels) == 64
        first, second = ({*labels[rank::2].tolist()} for rank in range(2))
        assert len(first) == 32
        assert len(second) in (16, 24)
        assert not first & second


def test_webdataset_says_that_files_are_too_few(stream_of):
    """Three, for two workers of each of two ranks."""
    with pytest.raises(ValueError, match="fewer shards than workers"):
        read(stream_of(in_each=24), 2, 2, (0, 0))


def test_webdataset_in_a_recipe(tmp_path):
    """A run that resumes at the end of an epoch has the same bits.

    The ranks have three and two files.
    """
    need_package("webdataset")
    script = port(WEBDATASET, tmp_path)
    assert len(webdataset_files(tmp_path, in_each=14)) == 5
    keep_checkpoints(script)
    flags = "--device cpu -G 16 --epochs 3 --model lenet --synthetic 80 --checkpoint-every 8"
    flags += " --epoch-samples 64 --shards 0.tar 1.tar 2.tar 3.tar 4.tar"
    start = f"{torchrun(2)} {script} {flags}"
    compute(f"{start} --log-dir whole", cwd=tmp_path)
    compute(f"{start} --resume whole/8.pt --log-dir resumed", cwd=tmp_path)
    whole, resumed = (checkpoint(tmp_path / name) for name in ("whole", "resumed"))
    assert whole["position"]["steps"] == 12
    for part in ("position", "model", "optimizer"):
        assert_same(resumed[part], whole[part])


def body(path):
    """The text of a recipe behind its docstring and imports."""
    text = path.read_text()
    return text[text.index("def parse_args") :]


def head(path):
    """The text of a recipe up to there, without the module beside it."""
    text = path.read_text()
    text = text[: text.index("def parse_args")]
    return re.sub("import digits .*\n", "", text)


def merged(example, recipe, *options):
    """Merge an example with another recipe of mnist/: (conflicts behind the imports, text)."""
    paths = [recipe, ROOT / "mnist" / "ddp_launch.py", example]
    parts = [example.with_name(f"{number}.body") for number in range(3)]
    for path, part in zip(paths, parts, strict=True):
        part.write_text(body(path))
    command = ["git", "merge-file", "-p", *options, *parts]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.returncode, head(recipe) + head(example) + result.stdout


SMALL = "--device cpu -G 16 --max-steps 6 --warmup-epochs 0.5"
# Clipping changes the gradient in each step, and images have different numbers of known pixels.
EXAMPLES = {
    "contrastive": "--synthetic 120 --width 4 --workers 0",
    "language_model": "--synthetic 600 --context 32 --width 16 --layers 1 --dropout 0 --clip 0.1",
    # 101 rows for validation, so the shares of two ranks are unequal.
    "regression": "--synthetic 505",
    "segmentation": "--synthetic 80 --image-size 32 --width 4 --workers 0",
}


def weights(start, script, name, more=""):
    """The model of a small run of an example, or of a script that was made from it."""
    log = script.with_suffix(".log")
    flags = f"{EXAMPLES[name]} {SMALL} {more} --log-dir {log}"
    compute(f"{start} {script} {flags}", cwd=script.parent)
    return checkpoint(log)["model"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_horovod(name, tmp_path):
    """Merged with hvd.py, an example computes what it does on one process."""
    need_horovod("gloo")
    example = in_float64(tmp_path, "examples") / f"{name}.py"
    if name == "regression":
        example.write_text(with_median(example.read_text()))
    expected = weights(torchrun(1), example, name)
    conflicts, text = merged(example, ROOT / "mnist" / "hvd.py", "--theirs")
    assert conflicts == 0
    clipping, reduction, gathering = blocks("### Horovod", "diff")
    if name == "contrastive":
        text = change(text, gathering).replace("dist.all_reduce", "all_reduce")
    if name == "language_model":
        text = change(text, clipping)
    if name == "regression":
        text = text.replace("dist.all_reduce", "all_reduce")
    if name == "segmentation":
        text = change(text, reduction)
    script = example.with_name("with_horovod.py")
    script.write_text(text)
    found = weights("horovodrun --gloo -np 2 python", script, name)
    assert largest_difference(found, expected) < TOLERANCE
    if name == "regression":
        logs = (path.with_suffix(".log") for path in (example, script))
        one, two = (evaluations(log)[-1]["val/median"] for log in logs)
        assert two == pytest.approx(one, rel=TOLERANCE)


def test_spawn_and_fsdp(tmp_path):
    example = in_float64(tmp_path, "examples") / "regression.py"
    expected = weights(torchrun(1), example, "regression")

    conflicts, text = merged(example, ROOT / "mnist" / "ddp_spawn.py")
    assert conflicts == 0
    spawn = example.with_name("with_spawn.py")
    spawn.write_text(text)

    conflicts, text = merged(example, ROOT / "mnist" / "fsdp.py", "--theirs")
    assert conflicts == 0
    for block in blocks("### FSDP", "diff"):
        text = change(text, block)
    fsdp = example.with_name("with_fsdp.py")
    fsdp.write_text(text)

    of_spawn = weights("python", spawn, "regression", "-g 2")
    of_fsdp = weights(torchrun(2), fsdp, "regression")
    assert largest_difference(of_spawn, expected) < TOLERANCE
    assert largest_difference(of_fsdp, expected) < TOLERANCE


def test_amp(tmp_path):
    """It learns as well as in fp32, within the digits of 16 bits."""
    for folder in ("common", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    example = tmp_path / "examples" / "regression.py"
    _, text = merged(example, ROOT / "mnist" / "ddp_amp.py", "--theirs")
    for block in blocks("### Mixed precision", "diff"):
        text = change(text, block)
    script = example.with_name("with_amp.py")
    script.write_text(text)
    flags = "--device cpu --synthetic 5000 --log-dir"
    compute(f"{torchrun(2)} {example} {flags} fp32", cwd=tmp_path)
    compute(f"{torchrun(2)} {script} {flags} bf16 --amp-dtype bf16", cwd=tmp_path)
    compute(f"{torchrun(2)} {script} {flags} fp16 --amp-dtype fp16", cwd=tmp_path)
    errors = {
        dtype: evaluations(tmp_path / dtype)[-1]["val/rmse"] for dtype in ("fp32", "bf16", "fp16")
    }
    assert errors["bf16"] == pytest.approx(errors["fp32"], rel=0.05)
    assert errors["fp16"] == pytest.approx(errors["fp32"], rel=0.05)
