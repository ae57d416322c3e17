"""The benchmarks measure what they say, and the model predicts what they measured."""

import importlib.util
import json
import shlex
import shutil
import signal
import struct
import sys

import accuracy
import model
import peers
import pytest
import runs
import scaling
import torch
from forked import ForkedJob, compute
from launch import Job, need, run
from recipes import ROOT


def test_all_reduce_cost():
    assert model.ring(1, 1000, 1, 1) == 0
    assert model.ring(4, 1000, alpha=0, beta=1) == 1500  # 2 (p - 1)/p n
    assert model.ring(4, 1000, alpha=1, beta=0) == 6
    assert model.half_ring(4, 1000, alpha=1, beta=1) == 3 + 750
    # 1.5 times an all-reduce, and the root.
    assert model.fsdp(4, [1000, 0], alpha=1, beta=1) == 3 * 753 + 2 * 3
    assert sum(model.shard_groups("cifar10", "resnet18")) == model.gradient_bytes(
        "cifar10", "resnet18"
    )
    assert len(model.shard_groups("cifar10", "resnet18")) == 8 + 1


@pytest.mark.parametrize("p", [2, 4, 16])
def test_the_fit_finds_alpha_and_beta(p):
    sizes = [{"bytes": 4**k, "seconds": model.ring(p, 4**k, 3e-5, 2e-10)} for k in range(1, 14)]
    assert model.fit({"processes": p, "sizes": sizes}) == pytest.approx((3e-5, 2e-10))


def test_a_step_hides_what_it_can():
    """Sending overlaps with backward: only the last bucket adds to the step."""

    def all_reduce(size):
        return size * 1e-9

    size = 60 * model.MIB
    assert model.buckets(size) == [n * model.MIB for n in (1, 25, 25, 9)]
    assert model.step(1.0, 0.5, size, all_reduce, overlap=False) == pytest.approx(1 + size * 1e-9)
    assert model.step(1.0, 0.5, size, all_reduce, overlap=True) == pytest.approx(
        1 + 9 * model.MIB * 1e-9
    )
    assert model.step(1.0, 1e-6, size, all_reduce, overlap=True) == pytest.approx(
        1 + size * 1e-9, rel=1e-3
    )


def test_the_page_of_the_model(tmp_path):
    """Measurements that follow the formulas exactly are predicted exactly."""
    alpha, beta, step = 1e-4, 1e-9, 0.02
    size = model.gradient_bytes("mnist", "convnet")
    sizes = [{"bytes": 4**k, "seconds": model.ring(2, 4**k, alpha, beta)} for k in range(1, 14)]
    all_reduce = {"backend": "gloo", "processes": 2, "hardware": {"cores": 2}, "sizes": sizes}
    (tmp_path / "allreduce-gloo-2.json").write_text(json.dumps(all_reduce))
    about = dict.fromkeys(("command", "hardware", "commit", "date"), "") | {
        "threads": 1,
        "versions": {},
    }
    scaling = about | {
        "datasets": ["mnist"],
        "runs": [
            {
                "dataset": "mnist",
                "model": "convnet",
                "strategy": strategy,
                "processes": p,
                "modes": ["weak"],
                "batch": 64,
                "steps": 10,
                "epochs": 2,
                "global_batch": 64 * p,
                "images_per_sec": [64 * p / seconds],
            }
            for strategy, p, seconds in (
                ("single", 1, step),
                ("ddp_launch", 2, step + model.ring(2, size, alpha, beta)),
            )
        ],
    }
    (tmp_path / "scaling.json").write_text(json.dumps(scaling))
    shown = compute(f"python {ROOT}/benchmarks/model.py --out .", cwd=tmp_path)
    for line in (
        "| gloo | 2 | 100 | 1.00 |",
        "| mnist | convnet | 1 | 20.0 | 20.0 | 1.00 |",
        "| mnist | convnet | 2 | 20.3 | 20.3 | 1.00 |",
    ):
        assert line in shown
    assert (tmp_path / "model.md").read_text() == shown


@pytest.fixture
def forked_runs(tmp_path, monkeypatch):
    """What a benchmark starts is forked."""
    monkeypatch.setattr(
        runs, "start", lambda line, threads: ForkedJob(line, tmp_path, OMP_NUM_THREADS=str(threads))
    )
    monkeypatch.setattr(
        runs, "finish", lambda job: pytest.fail(job.output()) if job.finish() else None
    )
    monkeypatch.chdir(tmp_path)


def test_scaling(forked_runs, tmp_path, monkeypatch, capsys):
    flags = (
        "--datasets mnist --strategies ddp_launch --processes 1 2 --repeats 1 --device cpu "
        "--out one"
    )
    monkeypatch.setattr(sys, "argv", ["scaling.py", *flags.split()])
    monkeypatch.setitem(scaling.WORK, "mnist", scaling.WORK["mnist"] | {"steps": 8, "epochs": 2})
    scaling.main()  # four runs of recipes
    shown = capsys.readouterr()
    assert "| DDP, torchrun | 2 | 64 | 128 |" in shown.out
    assert "scaling: 100%" in shown.err
    result = json.loads((tmp_path / "one" / "scaling.json").read_text())
    assert {"command", "hardware", "versions", "date", "threads"} <= result.keys()
    by_name = {(r["strategy"], r["processes"], *r["modes"]): r for r in result["runs"]}
    assert by_name.keys() == {
        ("single", 1, "weak"),
        ("single", 1, "strong"),
        ("independent", 2, "weak"),
        ("ddp_launch", 2, "weak", "strong"),
    }


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (
            "scaling.py --processes 1 3",
            ("scaling.py: a global batch of 128 does not divide over 3 processes"),
        ),
        (
            "model.py --out nowhere",
            ("model.py: nowhere has no scaling.json and allreduce-gloo-2.json: make benchmarks"),
        ),
    ],
    ids=lambda value: value.split()[0],
)
def test_wrong_input(command, says, tmp_path):
    shown = compute(f"python {ROOT}/benchmarks/{command}", cwd=tmp_path, status=2)
    assert shown.startswith(says)
    assert shown.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_wide_spread_is_marked():
    assert runs.marked([100, 101, 102]) == "101"
    assert runs.marked([100, 120, 110]) == "110 (!18%)"


def test_one_gpu(tmp_path):
    """Interrupted, and started again: it measures what is not there yet."""

    def measured_until(line):
        job = Job(
            f"exec python {ROOT}/benchmarks/gpu.py --device cpu --steps 3-5 --out out "
            "--data-dir none",
            tmp_path,
        )
        job.wait_for(line)
        job.signal(signal.SIGINT)
        assert job.finish() != 0
        return job.output(), json.loads((tmp_path / "out" / "gpu.json").read_text())["measured"]

    _, before = measured_until("| 3 no GPU visible:")
    shown, after = measured_until("| 5 mnist/single.py:")
    assert "no GPU visible" not in shown, "it is not measured again"
    assert after["3"] == before["3"]
    assert after["3"]["no GPU visible"]["status"] == 2
    assert "torch sees 0 cuda devices" in after["3"]["no GPU visible"]["says"]
    assert after["4"]["LeNet on cpu"]["epochs"][0]["train"]["loss"] > 0
    assert after["5"]["mnist/single.py"]["steps"] == 40
    page = (tmp_path / "out" / "gpu.md").read_text()
    assert "## 5. Waits per step" in page and " steps/s |" in page


def test_accuracy(forked_runs, tmp_path, monkeypatch, capsys):
    """Two seeds; a run that is done is not repeated, and what is not asked for stays."""
    monkeypatch.setattr(
        accuracy,
        "TRAININGS",
        {
            "lenet": ("mnist", "lenet", 2, 2, [("single.py", 1)], 1),
            "other": ("mnist", "convnet", 1, 1, [("single.py", 1)], 1),
        },
    )
    monkeypatch.setitem(
        accuracy.STARTS, "single.py", ("python {folder}/single.py --synthetic 640 --lr 0.01")
    )
    monkeypatch.setattr(accuracy, "SPEED_UPS", [("single.py", 1)])
    monkeypatch.setattr(
        sys, "argv", ["accuracy.py", "--device", "cpu", "--runs", "all", "--out", "."]
    )
    accuracy.main()
    first = tmp_path / "all" / "lenet-singlepy-1-0" / "results.jsonl"
    written = first.stat().st_mtime_ns
    shutil.rmtree(tmp_path / "all" / "lenet-singlepy-1-1")
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--only", "lenet"])
    accuracy.main()
    assert first.stat().st_mtime_ns == written
    results = json.loads((tmp_path / "accuracy.json").read_text())
    assert [run["seed"] for run in results["lenet"]["runs"]] == [0, 1]
    assert all(run["seconds"] > 0 for run in results["lenet"]["runs"])
    reached = [run["accuracy"] for run in results["lenet"]["runs"]]
    shown = capsys.readouterr().out
    minutes = sum(run["seconds"] for run in results["lenet"]["runs"]) / 2 / 60
    assert (
        f"| single.py | 1 | {sum(reached) / 2:.2%} | {min(reached):.2%} to {max(reached):.2%} | 2 "
        f"| {minutes:.1f} | 1.00 |"
    ) in shown
    assert "## mnist, convnet, 1 epochs" in shown.rsplit("# Accuracy", 1)[1]


@pytest.mark.parametrize(
    "lines",
    [
        ["Train Epoch: 2 [0/600 (0%)]\tLoss: 2.3", "Train Epoch: 2 [300/600 (50%)]\tLoss: 0.3"],
        [
            "[1,0]<stdout>:Train Epoch: 2 [0/300 (0%)]\tLoss: 2.3",
            ("[1,1]<stdout>:Train Epoch: 2 [150/300 (50%)]\tLoss: 0.3"),
        ],
        ["Epoch: [1][ 1/21]\tTime  0.1", "Epoch: [1][11/21]\tTime  0.1", "Test: [ 1/10]\tTime 0.1"],
        ["Epoch: [1]  [ 0/20]  eta: 0:00:00", "Epoch: [1]  [10/20]  eta: 0:00:00", "Test:   [0/3]"],
        [
            "Train: 1 [   0/20 (  5%)]  Loss: 2",
            "Train: 1 [  10/20 ( 55%)]  Loss: 2",
            "Test: [ 0/2]",
        ],
        ["epoch 2/2: loss 0.1 acc 97.00% | val loss 0.1 acc 97.00% | 150 images/s | 1% data wait"],
    ],
)
def test_speed_of_an_example(lines):
    """Half of 600 images in two seconds, in the last epoch."""
    before = lines[0].replace(" 2 [", " 1 [").replace("[1]", "[0]").replace(" 150 ", " 100 ")
    before = before.replace("Train: 1", "Train: 0")
    timed = [(0.5, before), *((1 + 2 * number, line) for number, line in enumerate(lines))]
    assert peers.images_per_sec(timed, 600) == pytest.approx(150, rel=0.06)


@pytest.mark.parametrize(
    ("line", "percent"),
    [
        ("epoch 2/2: loss 0.1 acc 97.00% | val loss 0.1 acc 98.25% | 150 images/s", 98.25),
        ("Test set: Average loss: 0.0, Accuracy: 9825/10000 (98%)", 98.25),
        ("epoch 1: Accuracy: 98.25%", 98.25),
        ("Test:  Acc@1 12.500 Acc@5 50.000", 12.5),
        ("Test: [   1/1]  Time: 0.1 (0.1)  Acc@1:  25.000 ( 12.500)  Acc@5: 50.000 ( 50.0)", 12.5),
    ],
)
def test_accuracy_of_an_example(line, percent):
    """The last one."""
    assert peers.accuracy([line.replace("2", "1"), line, "the end"]) == percent


def test_lines_of_code(tmp_path):
    """Without blank lines, comments and docstrings; a statement can have several lines."""
    path = tmp_path / "script.py"
    path.write_text(
        '''"""Says
what it does."""

import os  # a comment

# Another.
def double(number):
    """Twice the number."""
    return (
        number

        + number
    )


TEXT = """
not a docstring
"""
'''
    )
    assert peers.lines_of_code(path) == 1 + 1 + 4 + 3


def write_mnist(folder, train):
    """MNIST's files, with so many random images for training, and 100 for validation."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for name, count in (("train", train), ("t10k", 100)):
        images = torch.randint(256, (count, 28, 28), generator=generator, dtype=torch.uint8)
        labels = (torch.arange(count) % 10).to(torch.uint8)
        for kind, magic, sizes, values in (
            ("images-idx3", 2051, (count, 28, 28), images),
            ("labels-idx1", 2049, (count,), labels),
        ):
            header = struct.pack(f">{1 + len(sizes)}i", magic, *sizes)
            (raw / f"{name}-{kind}-ubyte").write_bytes(header + values.numpy().tobytes())


def own_environment_as_theirs(folder, *packages):
    """Let `folder`, for --peers, have the environment of the tests, which needs these packages."""
    for package in packages:
        need(importlib.util.find_spec(package) is not None, f"pip install {package}")
    (folder / "venv").symlink_to(sys.prefix)


def test_a_script_of_others(tmp_path, monkeypatch, capsys):
    """One that only prints: its row, ours, and the ratios; and a script that is not there."""
    write_mnist(tmp_path / "data", train=640)
    (tmp_path / "theirs.py").write_text(
        'print("epoch 1: Accuracy: 50.00%")\nprint("100 images/s")\n'
    )
    ours = "python {recipe} -b 64 --epochs {epochs}"
    pairs = {
        "theirs": peers.Pair("theirs.py", "python {script}", "mnist/single.py", ours),
        "none": peers.Pair("none.py", "python {script}", "mnist/single.py", ours),
    }
    monkeypatch.setattr(peers, "PEERS", pairs)
    flags = f"--peers {tmp_path} --data-dir {tmp_path}/data --repeats 1 --device cpu"
    monkeypatch.setattr(sys, "argv", ["peers.py", *flags.split(), "--out", str(tmp_path)])
    peers.main()
    shown = capsys.readouterr()
    assert f"without {tmp_path}/none.py, this is left out: none" in shown.err
    result = json.loads((tmp_path / "peers.json").read_text())
    ((theirs, own),) = result["turns"]["theirs"]
    assert (theirs["accuracy"], theirs["images_per_sec"]) == (50, 100)
    assert own["images_per_sec"] > 0 and own["memory"] > theirs["memory"]
    assert result["lines"] == {"theirs": [2, peers.lines_of_code(ROOT / "mnist/single.py")]}
    assert f"| theirs | 2 | {theirs['seconds']:.1f} | 100 |" in shown.out
    ratio = own["images_per_sec"] / 100
    assert f" | {own['seconds'] / theirs['seconds']:.2f} | {ratio:.2f} |" in shown.out
    # What is measured already is not started again.
    (tmp_path / "theirs.py").write_text('raise SystemExit("started again")')
    peers.main()
    assert json.loads((tmp_path / "peers.json").read_text()) == result


def test_memory(tmp_path):
    """A save and a resume take nothing beside the state; what torch.load reads stays."""
    cases = ["a run that saves", "a run that resumes", "torch.save", "torch.load"]
    only = " ".join(map(shlex.quote, cases))
    run(f"python {ROOT}/benchmarks/memory.py --layers 1 --ranks 1 --out . --only {only}", tmp_path)
    measured = json.loads((tmp_path / "memory.json").read_text())["cases"]
    most = {each["case"]: max(memory for memory, _ in each["of ranks"]) for each in measured}
    # Weights, gradients and momentum are 1.5 of the state.
    assert 1.4 < most["a run that saves"] < 1.7
    assert 1.4 < most["a run that resumes"] < 1.7
    assert most["torch.load"] > 1.8


def test_lightning_and_accelerate(tmp_path, monkeypatch):
    """One on one process, and one on two."""
    own_environment_as_theirs(tmp_path, "lightning", "accelerate")
    write_mnist(tmp_path / "data", train=640)
    flags = f"--peers {tmp_path} --data-dir {tmp_path}/data --repeats 1 --device cpu"
    names = ["Lightning, MNIST, one process", "accelerate, MNIST, two processes"]
    monkeypatch.setattr(
        sys, "argv", ["peers.py", *flags.split(), "--out", str(tmp_path), "--only", *names]
    )
    peers.main()
    turns = json.loads((tmp_path / "peers.json").read_text())["turns"]
    assert list(turns) == names
    for ((theirs, _),) in turns.values():
        assert theirs["images_per_sec"] > 0 and 0 <= theirs["accuracy"] <= 100
