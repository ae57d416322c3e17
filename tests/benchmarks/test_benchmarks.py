"""The benchmarks measure what they say, and the model predicts what they measured.

Most tests follow measured figures into a table. What the benchmarks start has tests of its own.
"""

import argparse
import gzip
import json
import re
import shutil
import sys

import accuracy
import gpu
import model
import peers
import pytest
import runs
import scaling
from forked import compute
from recipes import ROOT

from cifar10 import cifar
from common.errors import InputError, RunError

ABOUT = {
    **dict.fromkeys(("command", "commit", "date"), ""),
    "hardware": "2 cores",
    "threads": 1,
    "versions": {},
}


@pytest.mark.parametrize("name", runs.PAGES)
def test_the_pages_are_those_of_the_figures(name):
    page = runs.RESULTS / f"{name}.md"
    assert page.read_text() == runs.page_of(runs.RESULTS, name), "python benchmarks/runs.py"


def test_figures_in_lines(tmp_path):
    """A line for how they were measured, and one for each run."""
    measured = [ABOUT | {"runs": [{"a": 1}, {"a": 2}]}, ABOUT | {"runs": []}]
    runs.write(tmp_path, "name", measured, "a page")
    assert len((tmp_path / "name.jsonl").read_text().splitlines()) == 4
    assert runs.read(tmp_path / "name.jsonl") == measured
    assert (tmp_path / "name.md").read_text() == "a page"


def test_a_command_that_fails():
    with pytest.raises(RunError, match=r"^sh -c 'echo no; exit 3' ended with status 3 \(no\)$"):
        runs.run("sh -c 'echo no; exit 3'")


def test_all_reduce_cost():
    assert model.ring(1, 1000, 1, 1) == 0
    assert model.ring(4, 1000, alpha=0, beta=1) == 1500  # 2 (p - 1)/p n
    assert model.ring(4, 1000, alpha=1, beta=0) == 6
    # 1.5 times an all-reduce, and the root.
    assert model.fsdp(4, [1000, 0], alpha=1, beta=1) == 3 * 753 + 2 * 3
    groups = model.shard_groups("cifar10", "resnet18")
    assert sum(groups) == 4 * sum(w.numel() for w in cifar.build("resnet18").parameters())
    assert len(groups) == 8 + 1


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
    everything = 1 + size * 1e-9
    last_bucket = 1 + 9 * model.MIB * 1e-9
    assert model.step(1.0, size, all_reduce, overlap=False) == pytest.approx(everything)
    assert model.step(1.0, size, all_reduce, overlap=True) == pytest.approx(last_bucket)
    # There is nothing to hide behind.
    none = model.step(1e-6, size, all_reduce, overlap=True)
    assert none == pytest.approx(1e-6 + size * 1e-9, rel=1e-3)


def run_of(strategy, processes, images_per_sec):
    """What scaling.py writes of a run of MNIST's convnet."""
    return {
        "dataset": "mnist",
        "model": "convnet",
        "strategy": strategy,
        "processes": processes,
        "batch": 64,
        "images_per_sec": images_per_sec,
    }


def test_the_page_of_scaling():
    """One process has 100 images/s, two that do not communicate 190, and DDP's two 171."""
    measured = [
        run_of("single", 1, [100, 110, 90]),
        run_of("independent", 2, [190, 209, 171]),
        run_of("ddp_launch", 2, [171, 171, 171]),
    ]
    page = scaling.page([ABOUT | {"runs": measured}])
    assert "| one process | 1 | 100 (!20%) | 1.00 | - | 640.0 |" in page
    assert "| independent processes | 2 | 190 (!20%) | 0.95 | 1.00 | 673.7 |" in page
    # The median of 171 / 200, 171 / 220 and 171 / 180
    assert "| DDP | 2 | 171 | 0.85 | 0.90 | 748.5 |" in page


def test_what_scaling_measures(monkeypatch):
    asked = argparse.Namespace(
        datasets=["mnist"], device="cpu", processes=[1, 2, 4], strategies=["ddp_launch", "hvd_gloo"]
    )
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    found = [(setting["strategy"], setting["processes"]) for setting in scaling.settings(asked)]
    assert found == [
        ("single", 1),
        ("independent", 2),
        ("ddp_launch", 2),
        ("hvd_gloo", 2),
        ("ddp_launch", 4),
    ]


@pytest.mark.parametrize(("strategy", "processes"), [("single", 1), ("independent", 2)])
def test_a_run_is_started_and_measured(strategy, processes):
    """In processes of their own, as in all benchmarks that compare recipes."""
    setting = run_of(strategy, processes, []) | {"model": "lenet", "steps": 8, "epochs": 2}
    assert scaling.images_per_sec(setting, threads=1, device="cpu") > 0


def test_the_page_of_the_model():
    """Measurements that follow the formulas exactly are predicted exactly."""
    alpha, beta, step = 1e-4, 1e-9, 0.02
    size = sum(model.shard_groups("mnist", "convnet"))
    sizes = [{"bytes": 4**k, "seconds": model.ring(2, 4**k, alpha, beta)} for k in range(1, 14)]
    all_reduce = {"backend": "gloo", "processes": 2, "sizes": sizes}
    measured = [
        run_of("single", 1, [64 / step]),
        run_of("ddp_launch", 2, [128 / (step + model.ring(2, size, alpha, beta))]),
    ]
    trained = [ABOUT | {"runs": measured}]
    page = model.page([ABOUT | {"runs": [all_reduce]}], trained)
    assert "| gloo | 2 | 100 | 1.00 |" in page
    assert "| mnist | convnet | 2 | 20.3 | 20.3 | 1.00 |" in page
    all_reduce["processes"] = 4
    with pytest.raises(InputError, match="lack torchrun with two processes"):
        model.page([ABOUT | {"runs": [all_reduce]}], trained)
    all_reduce["sizes"] = sizes[:5]
    with pytest.raises(InputError, match="lack messages from 16 MiB"):
        model.page([ABOUT | {"runs": [all_reduce]}], trained)


def test_no_figures(tmp_path):
    with pytest.raises(InputError, match=r"allreduce\.jsonl: there is no such file"):
        runs.page_of(tmp_path, "model")


def test_gpu(tmp_path, monkeypatch):
    """A failure is a result, too; a second start measures what is not there yet."""
    flags = "--synthetic 320 -b 16 --epochs 2 --model lenet --profile"
    first = ("fails", "sh -c 'echo no GPU; exit 2'", 60)
    second = ("trains", f"python mnist/single.py {flags}", 120)
    third = ("hangs", "sleep 1000", 0.2)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--out", str(tmp_path)])
    monkeypatch.setattr(gpu, "measurements", lambda args: [first])
    gpu.main()
    (before,) = runs.read(tmp_path / "gpu.jsonl")
    monkeypatch.setattr(gpu, "measurements", lambda args: [first, second, third])
    gpu.main()
    (after,) = runs.read(tmp_path / "gpu.jsonl")
    assert after["runs"][0] == before["runs"][0]
    page = (tmp_path / "gpu.md").read_text()
    assert re.search(r"^\| fails \| \d+ s \| status 2: no GPU \|$", page, re.MULTILINE)
    figures = r"[\d,]+ images/s, loss [\d.]+, val acc [\d.]+%, [\d.]+ s of training, 0.0 kernels"
    assert re.search(rf"^\| trains \| \d+ s \| {figures}", page, re.MULTILINE)
    assert re.search(r"^\| hangs \| 0 s \| status -9: ", page, re.MULTILINE)
    assert len(list(tmp_path.glob("trains-trace*"))) == 1


def test_the_trace_of_a_gpu(tmp_path):
    """Ten steps of two kernels each, and one wait in all."""
    events = [{"cat": "kernel", "name": "gemm", "dur": 50.0}] * 20
    events += [{"cat": "cuda_runtime", "name": "cudaStreamSynchronize", "dur": 7}]
    events += [{"cat": "cpu_op", "name": "aten::mm", "dur": 9}, {"ph": "M"}]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    assert gpu.of_trace(path) == {"kernels": 2, "ms of kernels": 0.1, "waits": 0.1}


def test_accuracy(tmp_path, monkeypatch, capsys):
    """A run that is done is not repeated, and what is not asked for stays in the page."""
    one = [("single.py", 1)]
    trainings = {
        "lenet": ("mnist", "lenet", 2, 2, one, 0),
        "other": ("mnist", "convnet", 2, 1, one, 1),
    }
    monkeypatch.setattr(accuracy, "TRAININGS", trainings)
    monkeypatch.setattr(accuracy, "EACH", one)
    monkeypatch.setattr(accuracy, "SPEED_UPS", ())
    monkeypatch.chdir(tmp_path)
    started = []

    def train(line, threads):
        """Write what a recipe would: seed 0 reaches 90%, seed 1 92%, in a minute."""
        started.append(line)
        words = line.split()
        seed = int(words[words.index("--seed") + 1])
        folder = tmp_path / words[words.index("--log-dir") + 1]
        folder.mkdir(parents=True)
        reached = {"val/accuracy": 0.9 + 0.02 * seed, "perf/seconds": 30}
        lines = [json.dumps({"event": "evaluation", "step": n} | reached) for n in (1, 2)]
        (folder / "results.jsonl").write_text("\n".join(lines) + "\n")

    monkeypatch.setattr(runs, "run", train)
    monkeypatch.setattr(sys, "argv", ["accuracy.py", "--runs", "all", "--out", "."])
    accuracy.main()
    assert len(started) == 3
    shutil.rmtree(tmp_path / "all" / "lenet-singlepy-1-1")
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--only", "lenet"])
    accuracy.main()
    assert len(started) == 4
    page = capsys.readouterr().out.rpartition("# Accuracy")[2]
    assert "| mnist, lenet, 2 epochs | 91.00% (90.00% to 92.00%) |" in page
    assert "| mnist, convnet, 2 epochs | 90.00% |" in page
    timed = accuracy.cell(
        {"runs": [{"recipe": "single.py", "processes": 1, "accuracy": 0.5, "seconds": 30}]},
        ("single.py", 1),
        60,
    )
    assert timed == "50.00%, 0.5 min, speed-up 2.00"


@pytest.mark.parametrize(
    "lines",
    [
        ["Train Epoch: 2 [0/600 (0%)]\tLoss: 2.3", "Train Epoch: 2 [300/600 (50%)]\tLoss: 0.3"],
        [
            "[1,0]<stdout>:Train Epoch: 2 [0/300 (0%)]\tLoss: 2.3",
            "[1,1]<stdout>:Train Epoch: 2 [150/300 (50%)]\tLoss: 0.3",
        ],
        ["Epoch: [1][ 1/21]\tTime  0.1", "Epoch: [1][11/21]\tTime  0.1", "Test: [ 1/10]\tTime 0.1"],
        ["Epoch: [1]  [ 0/20]  eta: 0:00:00", "Epoch: [1]  [10/20]  eta: 0:00:00", "Test:   [0/3]"],
        [
            "Train: 1 [   0/20 (  5%)]  Loss: 2",
            "Train: 1 [  10/20 ( 55%)]  Loss: 2",
            "Test: [ 0/2]",
        ],
        ["epoch 2/2: train loss 0.1 acc 97.00% | val loss 0.1 acc 97.00% | 150 samples/s"],
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
        ("epoch 2/2: train loss 0.1 acc 97.00% | val loss 0.1 acc 98.25%", 98.25),
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


@pytest.mark.parametrize("name", [name for name, pair in peers.PEERS.items() if pair.changes])
def test_our_recipe_with_the_model_of_others(name, tmp_path):
    """The lines that differ are in the recipe. (It raises RunError where one is not.)"""
    pair = peers.PEERS[name]
    copy = peers.own_copy(tmp_path, pair.recipe, pair.changes, tmp_path / "main.py")
    compile(copy.read_text(), copy, "exec")
    assert "from main import Net\n" in copy.read_text()


def test_a_script_of_others(tmp_path):
    (tmp_path / "theirs.py").write_text(
        'print("100 images/s")\nprint("epoch 1: Accuracy: 50.00%")\n'
    )
    line = f"{sys.executable} theirs.py"
    theirs = peers.measure(line, tmp_path, threads=1, variables={}, images=0)
    assert (theirs["accuracy"], theirs["images_per_sec"]) == (50, 100)
    assert theirs["seconds"] > 0 and theirs["memory"] > 0


def test_the_page_of_peers():
    """Our recipe has 1.5 times the time, twice the images/s and three times the memory."""
    theirs = {
        "seconds": [2, 4],
        "images_per_sec": [100] * 2,
        "memory": [1] * 2,
        "accuracy": [9] * 2,
    }
    ours = theirs | {"seconds": [3, 6], "images_per_sec": [200] * 2, "memory": [3] * 2}
    name = "pytorch/examples, MNIST, one process"
    run = {"pair": name, "lines": [2, 90], "theirs": theirs, "ours": ours}
    one = ABOUT | {"commits": {}, "venv": {}, "epochs": 1, "repeats": 2, "runs": [run]}
    assert (
        f"| {name} | mnist/single.py | 2, 90 | 3.0 (!67%), 4.5 (!67%) | 100, 200 | 1.00, 3.00 | "
        "9.00%, 9.00% | 1.50 | 2.00 | 3.00 |"
    ) in peers.page([one])


@pytest.mark.parametrize(
    "settings",
    [{"commit": "1", "epochs": 1}, {"commit": "1", "epochs": 2}, {"commit": "2", "epochs": 1}],
)
def test_a_pair_that_is_measured_already(settings, tmp_path):
    """It is not measured again, if nothing has changed."""
    earlier = dict.fromkeys(peers.SAME, "") | {"commit": "1", "epochs": 1}
    runs.write(tmp_path, "peers", [earlier | {"runs": [{"pair": "a pair"}]}], "")
    found = peers.known(tmp_path / "peers.jsonl", earlier | settings)
    unchanged = settings == {"commit": "1", "epochs": 1}
    assert found == ([{"pair": "a pair"}] if unchanged else [])


def test_memory(tmp_path):
    """A save and a resume take nothing beside the state."""
    for case in ("a run that saves", "a run that resumes"):
        shown = compute(
            f"torchrun --nproc-per-node=1 {ROOT}/benchmarks/memory.py --layers 1 --case '{case}' "
            "--folder .",
            tmp_path,
        )
        (most,) = re.findall(r"^case: 0 ([\d.]+) ", shown, re.MULTILINE)
        # Weights, gradients and momentum are 1.5 of the state.
        assert 1.4 < float(most) < 1.7, case
