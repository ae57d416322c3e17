"""scripts/check.py: right scripts pass, and each mistake in a wrong one has its row."""

import re
import shlex
import struct
from dataclasses import dataclass

import numpy as np
import pytest
from forked import ForkedJob, refused
from launch import everything, need_horovod, run
from recipes import DATASETS, MINIMAL, RECIPES, ROOT, name_of, small

from scripts import check, findings

TORCHRUN = "torchrun --standalone --nproc-per-node=2 {}"
FLAGS = "--device cpu --epochs 3 --batch-size 32 --data-dir {}"


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder with MNIST's files: 640 bright columns to train on, and 131 to test on."""
    raw = tmp_path_factory.mktemp("columns") / "MNIST" / "raw"
    raw.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name, count in (("train", 640), ("t10k", 131)):
        labels = random.integers(0, 10, count).astype(np.uint8)
        columns = random.integers(0, 120, (count, 28, 28)).astype(np.uint8)
        for image, label in zip(columns, labels, strict=True):
            image[4:24, 2 + 2 * label : 5 + 2 * label] += 100
        head = struct.pack(">IIII", 2051, count, 28, 28)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(head + columns.tobytes())
        head = struct.pack(">II", 2049, count)
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(head + labels.tobytes())
    return raw.parents[1]


@pytest.fixture
def checked(tmp_path, monkeypatch, capsys):
    """A function that checks a command, and returns its status and the rows: [(verdict, what)]."""

    def start(command, more, output, limit):
        job = ForkedJob(shlex.join(command), tmp_path, agent=False, **{**more, "PYTHONPATH": ""})
        status = job.finish()
        output.write(job.output())
        return status

    def of(command, *flags):
        monkeypatch.setattr(check, "start", start)
        monkeypatch.setattr("sys.argv", ["check.py", *flags, *shlex.split(command)])
        status = check.main()
        said = capsys.readouterr().out
        return status, re.findall(r"^\| ([a-z ]+) \| (.+?) \| .*\|$", said, re.M)[1:]

    return of


def wrong_of(rows):
    return [what for verdict, what in rows if verdict == "wrong"]


def launched(path):
    """The command that starts a script, which has the name of its strategy."""
    if path.stem == "hvd":
        need_horovod("gloo")
    launchers = {
        "single": "python {}",
        "dp": "python {}",
        "ddp_spawn": "python {} -g 2",
        "hvd": "horovodrun --gloo -np 2 python {}",
    }
    return launchers.get(path.stem, TORCHRUN).format(path)


# Apex is nowhere but on GitHub; its recipes are ddp_launch.py but for a few lines.
WITHOUT_APEX = [path for path in RECIPES if path.stem != "apex_amp"]
MINIMAL_ONES = [MINIMAL / path.name for path in WITHOUT_APEX if path.parent == DATASETS[0]]


@pytest.mark.parametrize("path", MINIMAL_ONES, ids=name_of)
def test_minimal_is_right(path, checked, images):
    status, rows = checked(f"{launched(path)} {FLAGS.format(images)}")
    assert status == 0, rows
    of_shares = "steps on shares match steps on the batches of all ranks"
    on_several = path.stem not in ("single", "dp")
    assert any(what.startswith(of_shares) for _, what in rows) == on_several, rows
    evaluated = "an evaluation reads each sample once, and its figures cover all ranks"
    assert ("ok", evaluated) in rows


@pytest.mark.parametrize("path", WITHOUT_APEX, ids=name_of)
def test_recipes_are_right(path, checked):
    """Their data is in memory, and in no DataLoader: the rows about samples are not seen."""
    flags = f"--synthetic 64 -b 8 --epochs 2 --device cpu {small(path.parent.name)}"
    status, rows = checked(f"{launched(path)} {flags}", "--no-comparison")
    assert status == 0, rows


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.py")), ids=lambda path: path.stem)
def test_examples_are_right(path, checked):
    flags = "--synthetic 320 -b 8 --epochs 2 --device cpu"
    status, rows = checked(f"{TORCHRUN.format(path)} {flags}", "--no-comparison")
    assert status == 0, rows


@dataclass
class Mistake:
    """What is written in place of which line of a script, and the row that says so."""

    line: str
    replacement: str
    says: str
    verdict: str = "wrong"


LOGITS = "            logits = ddp_model(images.to(device))\n"
LOSS = "            loss = F.cross_entropy(logits, labels.to(device))\n"
BACKWARD = "            loss.backward()\n            optimizer.step()\n"
BUFFERS = "    for buffer in model.buffers():\n        dist.broadcast(buffer, src=0)\n"
MODEL = "    model = convnet().to(device)\n"
# Seen in a run as it is. Those of a script do not hide each other.
WATCHED = {
    "data and files": (
        "ddp_launch",
        Mistake(
            "        sampler.set_epoch(epoch)\n", "", r"loader 1: two passes have the same order"
        ),
        Mistake(
            "    share = range(rank, len(test_set), world_size)\n",
            "    share = DistributedSampler(test_set, shuffle=False)\n",
            r"the evaluation on loader 2 reads 1 samples twice, and they count twice",
        ),
        Mistake("        if rank == 0:\n", "        if True:\n", r"2 ranks write mnist\.pt"),
        Mistake(
            BACKWARD,
            "            loss.backward()\n"
            "            print(loss.item())\n"
            "            optimizer.step()\n",
            r"waits for the GPU in each step: ddp_launch\.py:\d+",
            "look",
        ),
        Mistake(
            MODEL,
            MODEL + "    model.append(nn.Dropout(0.1))\n",
            r"all ranks draw the same dropout",
        ),
    ),
    "evaluation": (
        "ddp_launch",
        Mistake("    model.eval()\n", "", r"evaluates with BatchNorm in training mode"),
        Mistake("    dist.all_reduce(correct)\n", "", r"each rank evaluates a share of loader 2"),
        Mistake(
            "DataLoader(test_set, batch_size=1000, sampler=share)",
            "DataLoader(test_set, batch_size=10, sampler=share, drop_last=True)",
            r"the evaluation on loader 2 leaves out 11 of 131 samples",
        ),
        Mistake(
            "torch.save(model.state_dict(), ",
            "torch.save(ddp_model.state_dict(), ",
            r"saves names with the wrapper's prefix",
            "look",
        ),
    ),
    "modes": (
        "ddp_launch",
        Mistake(
            "        model.train()\n",
            "        if epoch == 0:\n            model.train()\n",
            r"continues to train in evaluation mode after an evaluation",
        ),
        Mistake(BUFFERS, "", r"each rank evaluates with its own BatchNorm statistics"),
        Mistake(
            MODEL,
            MODEL
            + "    loaded = model.load_state_dict({'other': model[0].weight}, strict=False)\n",
            r"load_state_dict\(strict=False\) left \d+ of \d+ tensors as they were",
        ),
    ),
    "gradients": (
        "ddp_launch",
        Mistake(
            LOGITS,
            LOGITS.replace("ddp_model", "model"),
            r"the ranks hold different weights after step 1: .* were not averaged",
        ),
        Mistake("args.lr * world_size", "args.lr * (1 + rank)", r"the ranks train with different"),
        Mistake(
            BACKWARD,
            "            loss.backward()\n"
            "            nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
            "            optimizer.step()\n",
            r"each rank clips by its own norm",
        ),
    ),
    "no gradient": (
        "ddp_launch",
        Mistake(
            "sampler = DistributedSampler(train_set, world_size, rank, drop_last=True)",
            "sampler = DistributedSampler(train_set, 1, 0)",
            r"each rank reads all 640 samples in each pass over loader 1",
        ),
        Mistake(MODEL, MODEL + "    torch.manual_seed(rank)\n", r"each rank's model gets the same"),
        Mistake(
            "            optimizer.zero_grad()\n            loss.backward()\n",
            "            loss.backward()\n            optimizer.zero_grad()\n",
            r"no weight of optimizer 1 ever got a gradient: zero_grad",
        ),
    ),
    "scaled steps": (
        "ddp_launch",
        Mistake(
            "            loss.backward()\n",
            "            scaler.scale(loss).backward()\n",
            r"steps with scaled gradients",
        ),
        Mistake(MODEL, MODEL + "    scaler = torch.amp.GradScaler('cpu')\n", ""),
        Mistake("            optimizer.zero_grad()\n", "", r"a gradient still contains earlier"),
        Mistake(
            "    train_set = load(args.data_dir, train=True)\n",
            "    train_set = load(args.data_dir, train=True)\n"
            "    torch.manual_seed(rank)\n"
            "    order = torch.randperm(len(train_set)).tolist()\n"
            "    train_set = torch.utils.data.Subset(train_set, order)\n",
            r"the ranks share the indices of loader 1, but not its samples",
        ),
    ),
    "layers in a list": (
        "ddp_launch",
        Mistake(
            MODEL,
            "    class Scaled(nn.Sequential):\n"
            "        def forward(self, x):\n"
            "            return super().forward(self.layers[0](x))\n" + MODEL + ""
            "    model = Scaled(*model)\n"
            "    model.layers = [nn.Conv2d(1, 1, 1)]\n",
            r"used in a model, but in no optimizer .*: Conv2d.bias, Conv2d.weight",
        ),
    ),
    "scaled gradients": (
        "ddp_launch",
        Mistake(
            BACKWARD,
            "            scaler.scale(loss).backward()\n"
            "            nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
            "            scaler.step(optimizer)\n"
            "            scaler.update()\n",
            r"clips scaled gradients",
        ),
        Mistake(MODEL, MODEL + "    scaler = torch.amp.GradScaler('cpu')\n", ""),
    ),
    "optimizer before fully_shard": (
        "fsdp",
        Mistake(
            "    # fsdp: forward and backward gather",
            "    optimizer = torch.optim.SGD(list(model.parameters()), args.lr)\n"
            "    # fsdp: forward and backward gather",
            r"no weight of optimizer 1 ever got a gradient: they belong to no model",
        ),
        Mistake(
            "    optimizer = torch.optim.SGD(model.parameters(), "
            "args.lr * world_size, momentum=0.9)\n",
            "",
            "",
        ),
    ),
    "shards of other weights": (
        "fsdp",
        Mistake(
            "    torch.manual_seed(0)\n",
            "    torch.manual_seed(rank)\n",
            r"the ranks shard models with different weights",
        ),
    ),
    "Horovod": (
        "hvd",
        Mistake(
            "    hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n",
            "",
            r"the ranks hold different weights before step 1: .*rank 0's were not broadcast",
        ),
        Mistake("    torch.manual_seed(0)\n", "    torch.manual_seed(rank)\n", ""),
    ),
    "workers": (
        "ddp_launch",
        Mistake(
            "    train_set = load(args.data_dir, train=True)\n",
            "    train_set = Noisy(load(args.data_dir, train=True))\n",
            r"a data set draws the same random numbers in two passes",
        ),
        Mistake(
            "def main():\n",
            "class Noisy(torch.utils.data.Dataset):\n"
            "    def __init__(self, images):\n"
            "        self.images = images\n"
            "    def __len__(self):\n"
            "        return len(self.images)\n"
            "    def __getitem__(self, index):\n"
            "        image, label = self.images[index]\n"
            "        return image + 0.1 * torch.randn_like(image), label\n"
            "def seeded(worker):\n"
            "    torch.manual_seed(worker)\n"
            "def main():\n",
            r"the data sets of two ranks draw the same random numbers",
        ),
        Mistake(
            "sampler=sampler, drop_last=True)",
            "sampler=sampler, drop_last=True, num_workers=1, worker_init_fn=seeded)",
            "",
        ),
    ),
}


def with_mistakes(tmp_path, base, mistakes):
    text = (MINIMAL / f"{base}.py").read_text()
    for mistake in mistakes:
        assert text.count(mistake.line) == 1, mistake.line
        text = text.replace(mistake.line, mistake.replacement)
    script = tmp_path / f"{base}.py"
    script.write_text(text)
    return script


@pytest.mark.parametrize("name", WATCHED)
def test_a_mistake_that_is_seen(name, checked, images, tmp_path):
    base, *mistakes = WATCHED[name]
    script = with_mistakes(tmp_path, base, mistakes)
    status, rows = checked(f"{launched(script)} {FLAGS.format(images)}", "--no-comparison")
    assert status == 1, rows
    for mistake in mistakes:
        said = [what for verdict, what in rows if verdict == mistake.verdict]
        assert not mistake.says or any(re.match(mistake.says, what) for what in said), rows
    assert len(wrong_of(rows)) == sum(
        bool(mistake.says) and mistake.verdict == "wrong" for mistake in mistakes
    )


# Seen by comparing runs.
COMPARED = {
    "a loss divided by the count of its rank": (
        "ddp_launch",
        Mistake(
            LOSS,
            "            own = labels.to(device)\n"
            "            loss = F.cross_entropy(logits, own, ignore_index=3)\n",
            r"training on shares of a batch differs from training on it: \de-0[123] of the first ",
        ),
    ),
    "a sum of gradients": (
        "hvd",
        Mistake("op=hvd.Average", "op=hvd.Sum", r"the gradient is the sum of 2 ranks, .* too"),
    ),
    "accumulation that is not divided": (
        "ddp_launch",
        Mistake(
            "enumerate(train_loader, 1)",
            "enumerate(train_loader)",
            r"the gradient of a step is the sum of 2 batches",
            "look",
        ),
        Mistake(
            "            optimizer.zero_grad()\n" + BACKWARD,
            "            loss.backward()\n"
            "            if step % 2:\n"
            "                optimizer.step()\n"
            "                optimizer.zero_grad()\n",
            "",
        ),
    ),
    "a mean of batches": (
        "ddp_launch",
        Mistake("batch_size=1000", "batch_size=50", ""),
        Mistake(
            "        correct += (logits.argmax(1) == labels.to(device)).sum()\n",
            "        correct += F.cross_entropy(logits, labels.to(device))\n",
            r"a figure of the evaluation depends on how its samples are put into batches",
        ),
        Mistake(
            "correct.item() / len(loader.dataset)",
            "correct.item() / len(loader) / dist.get_world_size()",
            "",
        ),
    ),
}


@pytest.mark.parametrize("name", COMPARED)
def test_a_mistake_that_is_compared(name, checked, images, tmp_path):
    base, *mistakes = COMPARED[name]
    script = with_mistakes(tmp_path, base, mistakes)
    status, rows = checked(f"{launched(script)} {FLAGS.format(images)}")
    sought = next(mistake for mistake in mistakes if mistake.says)
    assert any(v == sought.verdict and re.match(sought.says, what) for v, what in rows), rows
    assert status == (sought.verdict == "wrong")
    assert len(wrong_of(rows)) == (sought.verdict == "wrong")


def test_saved_files_are_put_back(checked, images, tmp_path):
    """With the folders that are new, and without what was in others."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "old.pt").write_text("of yesterday")
    (tmp_path / "kept" / "notes").write_text("of yesterday")
    save = "            torch.save(model.state_dict(), "
    saves = (
        "            for folder in ('kept', 'new/one'):\n"
        "                os.makedirs(folder, exist_ok=True)\n"
        "                torch.save(model.state_dict(), f'{folder}/old.pt')\n"
        "            torch.save({}, 'kept/part')\n"
        "            os.replace('kept/part', 'kept/renamed.pt')\n"
    )
    script = with_mistakes(tmp_path, "ddp_launch", [Mistake(save, saves + save, "")])
    before = everything(tmp_path)
    status, rows = checked(f"{launched(script)} {FLAGS.format(images)}", "--no-comparison")
    assert status == 0, rows
    assert everything(tmp_path) == before


def test_long_passes_are_cut(checked, images, tmp_path):
    """640 images, one by one: each pass ends after 50, and its samples are known all the same."""
    mistake = Mistake("        sampler.set_epoch(epoch)\n", "", r"loader 1: two passes")
    script = with_mistakes(tmp_path, "ddp_launch", [mistake])
    printed = "            optimizer.step()\n            print('stepped')\n"
    script.write_text(script.read_text().replace("            optimizer.step()\n", printed))
    flags = "--device cpu --epochs 9 --batch-size 1 --data-dir"
    status, rows = checked(f"{launched(script)} {flags} {images}", "--no-comparison")
    assert status == 1
    assert len(wrong_of(rows)) == 1, rows


@pytest.mark.parametrize(
    "command, expected",
    [
        ("torchrun --nproc-per-node=4 train.py --top-n 5", "--nproc-per-node=1 train.py --top"),
        ("torchrun --nproc_per_node 4 -m my.train -n 4", "--nproc_per_node 1 -m my.train -n 4"),
        ("torchrun -m my.train -n 4", None),
        ("python -m torch.distributed.run --nproc=4 train.py", "run --nproc=1 train.py"),
        ("mpirun -np 4 python train.py -np 4", "mpirun -np 1 python train.py -np 4"),
        ("python train.py -n 4", None),
        ("torchrun --nproc-per-node=gpu train.py -n 4", None),
    ],
)
def test_the_command_for_one_process(command, expected):
    """Only what stands before the script's name is the launcher's."""
    words = check.on_one_process(shlex.split(command))
    assert (expected in shlex.join(words)) if expected else (words is None)


def test_the_lines_of_minimal():
    assert all(findings.line_of(*place) for place in findings.RIGHT.values())


def test_what_is_refused(tmp_path):
    command = f"python {ROOT}/scripts/check.py"
    assert "give the command" in refused(command, tmp_path)
    (tmp_path / "empty.py").write_text("")
    assert "no optimizer step" in refused(f"{command} python empty.py", tmp_path)


def test_with_real_processes(images, tmp_path):
    """torchrun, whose ranks read the hooks as Python starts."""
    command = f"python {ROOT}/scripts/check.py {TORCHRUN.format(MINIMAL / 'ddp_launch.py')}"
    said = run(f"{command} {FLAGS.format(images)}", tmp_path)
    assert "| ok | steps on shares match steps on the batches of all ranks: " in said
    assert "wrong" not in said
    assert not (tmp_path / "mnist.pt").exists()
