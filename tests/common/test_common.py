"""The tools of common/, alone: any sampler, any batch, any metric, and the state of a run."""

import collections
import os
import random
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from recipes import ROOT
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, random_split

from common import checkpoint, devices, flags
from common.data import EpochSampler, Seeded, TensorLoader, to_device
from common.errors import InputError, RunError
from common.metrics import Best, Sums, require_finite
from common.position import Position
from common.schedule import WarmupCosine
from common.stop import StopSignal
from common.watchdog import Watchdog
from common.workers import data_loader

pytestmark = pytest.mark.check
CPU = torch.device("cpu")


class Noise(Dataset):
    """Each sample draws from torch, numpy and random."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(1).item(), np.random.rand(), random.random()])


def test_a_sampler_is_torchs():
    sampler = EpochSampler(10, 2)
    assert sorted(sampler) == list(range(10))
    loader = DataLoader(torch.arange(10), batch_size=2, sampler=sampler)
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(10))
    assert len(loader) == 5


def test_ranks_share_an_epoch_and_the_rest_of_it():
    whole = EpochSampler(103, 12, seed=4)
    whole.set_epoch(3, start=24)
    ranks = [EpochSampler(103, 4, rank, 3, seed=4) for rank in range(3)]
    for sampler in ranks:
        sampler.set_epoch(3, start=24)
    expected = np.array(list(whole)).reshape(-1, 12)
    parts = [np.array(list(sampler)).reshape(-1, 4) for sampler in ranks]
    for step, batch in enumerate(expected):
        assert sorted(batch) == sorted(np.concatenate([part[step] for part in parts]))


def test_too_few_samples_raise():
    with pytest.raises(InputError, match="do not fill one batch"):
        EpochSampler(10, 64)


@pytest.mark.parametrize("part", [0, 1])
def test_subsets_are_loaded_from_memory(part):
    dataset = TensorDataset(torch.arange(10), torch.arange(10) * 2)
    subsets = [Subset(dataset, [7, 3, 1]), random_split(dataset, [4, 6])[0]]
    loader = TensorLoader(subsets[part], range(len(subsets[part])), 2, CPU)
    batches = list(loader)
    assert len(batches) == len(loader) == 2
    values, doubled = (torch.cat(column) for column in zip(*batches, strict=True))
    assert values.tolist() == [subsets[part][i][0] for i in range(len(values))]
    assert values.dtype == torch.int64
    assert torch.equal(doubled, values * 2)


def test_any_batch_moves_as_it_is():
    Pair = collections.namedtuple("Pair", "tokens rest")
    batch = {"pair": Pair(torch.tensor([1, 2]), [torch.ones(1), "name"]), "count": 3}
    moved = to_device(batch, torch.device("meta"))
    assert moved["pair"].tokens.dtype == torch.int64
    assert moved["pair"].tokens.is_meta
    assert moved["pair"].rest[0].is_meta
    assert moved["pair"].rest[1] == "name"
    assert moved["count"] == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_draws_depend_on_seed_epoch_and_index(workers):
    """The same with and without workers, another in each epoch; the caller's states come back."""
    sampler = EpochSampler(12, 3, seed=5)
    seeded = Seeded(Noise(), sampler)
    loader = data_loader(seeded, sampler, 3, workers)
    seen = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        rows = torch.cat(list(loader))
        after = torch.rand(1).item(), np.random.rand(), random.random()
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        assert after == (torch.rand(1).item(), np.random.rand(), random.random())
        seen.append(rows[rows[:, 0].argsort()])
        assert torch.equal(seen[-1], torch.stack([seeded[index] for index in range(12)]))
    assert not (seen[0][:, 1:] == seen[1][:, 1:]).any()


def test_a_validation_set_draws_the_same_each_time():
    seeded = Seeded(Noise())
    first, again = ([seeded[index].tolist() for index in range(12)] for _ in range(2))
    assert first == again
    with pytest.raises(TypeError, match="an EpochSampler, or none"):
        Seeded(Noise(), range(12))


def test_sums_of_any_shape_go_on_after_a_resume():
    sums = Sums(CPU, "loss", "count", confusion=(2, 2))
    sums.add(loss=torch.tensor(1.5), count=3, confusion=torch.tensor([[1, 0], [2, 4]]))
    total = sums.total(lambda values: values.mul_(2), stop=True)
    assert (total["loss"], total["count"], total["stop"]) == (3, 6, 2)
    assert total["confusion"].tolist() == [[2, 0], [4, 8]]
    resumed = Sums(CPU, "loss", "count", confusion=(2, 2))
    resumed.load_state_dict(sums.state_dict())
    resumed.add(loss=1, count=1)
    # What was summed before the resume is that of all ranks: it is not multiplied by them.
    total = resumed.total(lambda values: values.mul_(2))
    assert (total["loss"], total["count"], total["stop"]) == (5, 8, 0)
    assert total["confusion"].tolist() == [[2, 0], [4, 8]]


def test_best_is_the_highest_or_the_lowest():
    highest, lowest = Best(), Best(lowest=True)
    assert [highest.update(value) for value in (0.1, 0.3, 0.2)] == [True, True, False]
    assert [lowest.update(value) for value in (0.3, 0.1, 0.2)] == [True, True, False]


def test_a_loss_that_is_not_finite_raises():
    require_finite(1.0)
    with pytest.raises(RunError, match="not finite"):
        require_finite(float("nan"))


def test_each_group_keeps_its_own_rate():
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    groups = [{"params": [weights[0]], "lr": 0.1}, {"params": [weights[1]], "lr": 0.001}]
    optimizer = torch.optim.SGD(groups)
    rates = WarmupCosine(optimizer, epochs=10, warmup_epochs=2)
    for done in (0, 1, 5, 9.5):
        rates.set(done)
        backbone, head = (group["lr"] for group in optimizer.param_groups)
        assert backbone == pytest.approx(100 * head)


def test_evaluation_is_due_once():
    position = Position()
    for _ in range(4):
        assert not position.evaluation_due(4, None)
        position.advance(8)
    assert position.evaluation_due(4, None)
    position.end_interval(epoch_over=False)
    assert not position.evaluation_due(4, None)
    assert (position.epoch, position.samples) == (0, 32)


def test_a_storm_of_signals_does_not_hang():
    code = (
        "import os, signal, threading, time\n"
        "from common.stop import StopSignal\n"
        "stop = StopSignal()\n"
        "stop.listen()\n"
        "for _ in range(20000):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "print(stop.requested)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "True\n", done.stderr


def test_a_stop_is_requested_by_both_signals():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    for number in before:
        stop = StopSignal()
        stop.listen()
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_cancelled_watchdog_does_not_end_the_process():
    code = (
        "import time\n"
        "from common.watchdog import Watchdog\n"
        "watchdog = Watchdog(1)\n"
        "assert list(watchdog([1, 2])) == [1, 2]\n"
        "{}\n"
        "time.sleep(3)\n"
    )
    ends = {}
    for line in ("watchdog.cancel()", "pass"):
        command = [sys.executable, "-c", code.format(line)]
        ends[line] = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300).returncode
    assert ends["watchdog.cancel()"] == 0
    assert ends["pass"] != 0


HANGS = {
    "the first batch": "for _ in watchdog(slow()):\n    pass\n",
    "a step after a save": (
        "for batch in watchdog([1, 2]):\n    time.sleep(3 * (batch == 2))\n    watchdog.cancel()\n"
    ),
}


@pytest.mark.parametrize("what", HANGS)
def test_the_watchdog_ends_what_hangs(what):
    code = (
        "import time\n"
        "from common.watchdog import Watchdog\n"
        "def slow():\n"
        "    time.sleep(3)\n"
        "    yield 1\n"
        "watchdog = Watchdog(1)\n"
        f"{HANGS[what]}"
        "watchdog.cancel()\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "Timeout (0:00:01)!" in done.stderr


def test_the_watchdog_gives_the_batches():
    watchdog = Watchdog(1000)
    assert list(watchdog(range(3))) == [0, 1, 2]
    watchdog.cancel()


def state_of(model):
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1, 0.9)}


def test_a_checkpoint_is_loaded_and_compared_flag_by_flag(tmp_path):
    model, position = torch.nn.Linear(2, 2), Position()
    position.advance(7)
    config = {"hidden": 64, "lr": 0.1}
    checkpoint.save(tmp_path, state_of(model) | {"position": position}, config)
    other, there = torch.nn.Linear(2, 2), Position()
    state = state_of(other) | {"position": there}
    found = checkpoint.resume("auto", tmp_path, state, {"hidden": 64, "lr": 0.2, "new": 1})
    assert found.path == tmp_path / "last.pt"
    assert torch.equal(model.weight, other.weight)
    assert there.samples == 7
    with pytest.raises(InputError, match=r"hidden 64 \(and this run 32\)"):
        checkpoint.resume("auto", tmp_path, state, {"hidden": 32})


def test_last_pt_is_never_absent(tmp_path, monkeypatch):
    """Before each file-system call of a save that replaces it, last.pt is there and good."""
    model = torch.nn.Linear(2, 2)
    checkpoint.save(tmp_path, state_of(model), {})
    calls = []

    def watched(function):
        def wrapper(*args, **kwargs):
            calls.append(function.__name__)
            checkpoint.read(tmp_path / "last.pt")
            return function(*args, **kwargs)

        return wrapper

    for name in ("link", "replace", "fsync", "open"):
        monkeypatch.setattr(checkpoint.os, name, watched(getattr(os, name)))
    checkpoint.save(tmp_path, state_of(model), {}, is_best=True)
    assert {"link", "replace", "fsync"} <= set(calls)
    for name in checkpoint.NAMES:
        checkpoint.read(tmp_path / name)


@pytest.mark.parametrize("kind", ["state_dict", "safetensors", "checkpoint", "wrapped"])
def test_init_from(kind, tmp_path):
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    path = tmp_path / {"safetensors": "w.safetensors", "checkpoint": "last.pt"}.get(kind, "w.pt")
    if kind == "safetensors":
        save_file = pytest.importorskip("safetensors.torch").save_file
        save_file(model.state_dict(), path)
    elif kind == "checkpoint":
        checkpoint.save(tmp_path, state_of(model), {})
    elif kind == "wrapped":
        torch.save({f"module.{name}": w for name, w in model.state_dict().items()}, path)
    else:
        torch.save(model.state_dict(), path)
    (line,) = checkpoint.init_from(str(path), other)
    assert "2 of 2 loaded" in line
    assert torch.equal(model.weight, other.weight)


def test_init_from_names_what_does_not_fit(tmp_path):
    torch.save(torch.nn.Linear(3, 2).state_dict(), tmp_path / "w.pt")
    other = torch.nn.Linear(4, 2)
    with pytest.raises(InputError, match=r"weight \(\[2, 3\] in the file\)"):
        checkpoint.init_from(str(tmp_path / "w.pt"), other)
    (line,) = checkpoint.init_from(str(tmp_path / "w.pt"), other, partial=True)
    assert "1 of 2 loaded; left out: weight" in line


def test_resume_auto_looks_only_for_its_own_files(tmp_path):
    """Another file in a new folder does not keep a run from its start."""
    torch.save({"weights": 1}, tmp_path / "teacher.pt")
    model = torch.nn.Linear(2, 2)
    found = checkpoint.resume("auto", tmp_path, state_of(model), {})
    assert found.path is None
    checkpoint.claim(tmp_path, tmp_path, found)


def test_an_older_checkpoint_goes_on_in_a_new_folder(tmp_path):
    """In its own it would overwrite a newer one, and the message says so."""
    (tmp_path / "old").mkdir()
    model = torch.nn.Linear(2, 2)
    for _ in range(2):
        checkpoint.save(tmp_path / "old", state_of(model) | {"position": Position()}, {})
    found = checkpoint.resume(str(tmp_path / "old" / "previous.pt"), None, state_of(model), {})
    model.weight.data += 1
    checkpoint.save(tmp_path / "old", state_of(model) | {"position": Position()}, {})
    with pytest.raises(InputError, match="choose another --log-dir"):
        checkpoint.claim(tmp_path / "old", tmp_path / "old", found)
    checkpoint.claim(tmp_path / "new", tmp_path / "new", found)


def test_a_flag_may_have_an_underscore(monkeypatch):
    parser = flags.Parser("A script.")
    parser.add_argument("--my_flag", type=int)
    monkeypatch.setattr(sys, "argv", ["script", "--my_flag", "3"])
    assert parser.parse_args().my_flag == 3


def test_channels_last_hands_on_all_inputs():
    class Masked(torch.nn.Module):
        def forward(self, images, mask=None, *, scale=1):
            assert images.is_contiguous(memory_format=torch.channels_last)
            return images * mask * scale

    model = Masked()
    devices.use_channels_last(model)
    images = torch.ones(2, 3, 4, 4)
    assert model(images, torch.full((4, 4), 2.0), scale=3).unique().tolist() == [6]


def test_one_device_by_name(monkeypatch):
    """cuda:1 is the second of two, and each process has its own."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert devices.pick("cuda:1") == torch.device("cuda", 1)
    assert devices.pick("auto", local_rank=1, local_world_size=2) == torch.device("cuda", 1)
    with pytest.raises(InputError, match="torch sees 2 cuda devices, and 3 are needed"):
        devices.pick("cuda:2")
    with pytest.raises(InputError, match="each process has a device of its own"):
        devices.pick("cuda:1", local_rank=0, local_world_size=2)


def test_a_process_that_sees_only_its_own_device(monkeypatch):
    """SLURM's --gpu-bind=single: mace 435, ignite 3259, DeepSpeed 3165."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(InputError, match="torch sees 1 cuda devices, and 2 are needed"):
        devices.pick("auto", local_rank=1, local_world_size=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert devices.pick("auto", local_rank=1, local_world_size=2) == torch.device("cuda", 0)


def test_an_error_after_a_stop_request_is_printed():
    """Also by a rank that is not the first."""
    code = (
        "import os, signal\n"
        "from common import launch\n"
        "from common.errors import InputError\n"
        "from common.stop import StopSignal\n"
        "with launch.plain_exits():\n"
        "    stop = StopSignal()\n"
        "    stop.listen()\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    raise InputError('no such file')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "RANK": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["-c: rank 1: no such file"]


def test_a_process_outlives_the_thread_that_started_it():
    """Without a launcher, as in a script that starts trainings from a pool of threads."""
    child = "from common import parent; parent.die_with_parent(); import time; time.sleep(2)"
    code = (
        "import subprocess, sys, threading\n"
        "started = []\n"
        "def start():\n"
        f"    started.append(subprocess.Popen([sys.executable, '-c', {child!r}]))\n"
        "    started[0].poll()\n"
        "    import time; time.sleep(0.1)\n"
        "thread = threading.Thread(target=start)\n"
        "thread.start()\n"
        "thread.join()\n"
        "sys.exit(started[0].wait())\n"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, cwd=ROOT, timeout=300).returncode == 0
