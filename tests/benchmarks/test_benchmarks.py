"""The benchmarks measure what they say, and the model predicts what they measured."""

import gzip
import importlib.util
import json
import re
import shutil
import signal
import struct
import subprocess
import sys

import accuracy
import host_time
import interrupted
import model
import network
import peers
import pytest
import readme
import runs
import scaling
import sharding
import torch
from cluster import need_cluster
from forked import ForkedJob, compute
from launch import Job, need, need_horovod, run
from PIL import Image
from recipes import ROOT, commands


def test_all_reduce_cost():
    assert model.ring(1, 1000, 1, 1) == model.tree(1, 1000, 1, 1) == 0
    assert model.ring(4, 1000, alpha=0, beta=1) == 1500  # 2 (p - 1)/p n
    assert model.ring(4, 1000, alpha=1, beta=0) == 6
    assert model.tree(8, 1000, alpha=1, beta=1) == 6 * 1001
    assert model.half_ring(4, 1000, alpha=1, beta=1) == 3 + 750
    # 1.5 times an all-reduce, and the root.
    assert model.fsdp(4, [1000, 0], alpha=1, beta=1) == 3 * 753 + 2 * 3
    assert sum(model.shard_groups("cifar10", "resnet18")) == model.gradient_bytes(
        "cifar10", "resnet18"
    )
    assert len(model.shard_groups("cifar10", "resnet18")) == 8 + 1
    assert model.ring(1024, 100, 1e-5, 1e-9) > model.tree(1024, 100, 1e-5, 1e-9)
    assert model.ring(1024, 10**9, 1e-5, 1e-9) < model.tree(1024, 10**9, 1e-5, 1e-9)


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
                "split": {"forward": 1, "backward": 1},
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
    assert (tmp_path / "model.md").read_text() == shown and (tmp_path / "model.svg").exists()


def test_the_published_table():
    """The model reproduces the published times, also that 16 GPUs are slower than 8."""
    seconds, *_ = model.published_model()
    for dataset, times in model.PUBLISHED.items():
        for gpus, known in times.items():
            assert seconds(dataset, gpus) == pytest.approx(known, rel=0.01)
    assert seconds("cifar10", 16) > seconds("cifar10", 8) < seconds("cifar10", 4)
    assert min((8, 16, 32), key=lambda p: seconds("mnist", p)) == 32


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
    scaling.main()  # six runs of recipes
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
    split = by_name["ddp_launch", 2, "weak", "strong"]["split"]
    assert set(split) == set(scaling.PARTS)
    assert min(split.values()) >= 0 and split["forward"] + split["backward"] > 0
    assert "DDP, torchrun" in (tmp_path / "one" / "scaling.svg").read_text()


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
        ("timeline.py nowhere.json x.svg", "timeline.py: nowhere.json is not a Horovod timeline"),
    ],
    ids=lambda value: value.split()[0],
)
def test_wrong_input(command, says, tmp_path):
    shown = compute(f"python {ROOT}/benchmarks/{command}", cwd=tmp_path, status=2)
    assert shown.startswith(says)
    assert shown.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_sharding(tmp_path, monkeypatch, capsys):
    flags = f"--device cpu --models lenet --repeats 1 --out {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["sharding.py", *flags.split()])
    monkeypatch.setattr(sharding, "MODELS", {"lenet": ("mnist", 16, "")})
    sharding.main()
    ((ddp, fsdp),) = json.loads((tmp_path / "sharding.json").read_text())["turns"]["lenet"]
    assert all(seconds > 0 and 0.1 < memory < 2 for seconds, memory in (ddp, fsdp))
    assert f"| lenet | FSDP | {1e3 * fsdp[0]:,.0f} | {fsdp[1]:.2f} | " in capsys.readouterr().out


def test_a_wide_spread_is_marked():
    assert runs.marked([100, 101, 102]) == "101"
    assert runs.marked([100, 120, 110]) == "110 (!18%)"


def test_start_up(tmp_path):
    shown = run(
        f"python {ROOT}/benchmarks/startup.py --strategies ddp_launch --repeats 1 --out .",
        cwd=tmp_path,
    )
    ([first, end],) = json.loads((tmp_path / "startup.json").read_text())["runs"][0]["seconds"]
    assert 0 < first < end
    assert f"| DDP, torchrun | 2 | {first:.2f} | {end:.2f} |" in shown


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
    monkeypatch.setattr(accuracy, "PUBLISHED", [("single.py", 1)])
    sizes = [{"bytes": size, "seconds": 1e-9 * size} for size in (4, 2**24)]
    (tmp_path / "allreduce-gloo-2.json").write_text(
        json.dumps({"backend": "gloo", "processes": 2, "sizes": sizes})
    )
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
    assert [(run["seed"], len(run["epochs"])) for run in results["lenet"]["runs"]] == [
        (0, 2),
        (1, 2),
    ]
    reached = [run["epochs"][-1]["val"]["accuracy"] for run in results["lenet"]["runs"]]
    shown = capsys.readouterr().out
    assert (
        f"| single.py | 1 | {sum(reached) / 2:.2%} | {min(reached):.2%} to {max(reached):.2%} | 2 |"
    ) in shown
    assert "## mnist, convnet, 1 epochs" in shown.rsplit("# Accuracy", 1)[1]
    assert results["lenet"]["predicted"]["1"] == pytest.approx(
        accuracy.minutes(results["lenet"], "single.py", 1)
    )
    assert "| published, GPUs | 32 | - | - | - | 0.9 | 8.97 | - |" in shown
    assert "lenet" in (tmp_path / "accuracy.svg").read_text()
    monkeypatch.setattr(accuracy, "EACH", [("single.py", 1)])
    assert (f"| mnist | lenet | 2 | {sum(reached) / 2:.2%} |") in "\n".join(
        readme.accuracy_lines(results)
    )


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
    row = f"| theirs | mnist/single.py | {own['seconds'] / theirs['seconds']:.2f} | {ratio:.2f} |"
    # What is measured already is not started again.
    (tmp_path / "theirs.py").write_text('raise SystemExit("started again")')
    peers.main()
    assert json.loads((tmp_path / "peers.json").read_text()) == result
    # Written into the README between its marks, again and again.
    monkeypatch.setattr(runs, "RESULTS", tmp_path)
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text(f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n")
    for _ in range(2):
        readme.main()
        text = (tmp_path / "README.md").read_text()
        assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
        assert text.count(row) == 1


def test_lightning_and_accelerate(tmp_path, monkeypatch):
    """Both on two processes."""
    own_environment_as_theirs(tmp_path, "lightning", "accelerate")
    write_mnist(tmp_path / "data", train=640)
    flags = f"--peers {tmp_path} --data-dir {tmp_path}/data --repeats 1 --device cpu"
    names = ["Lightning, MNIST, two processes", "accelerate, MNIST, two processes"]
    monkeypatch.setattr(
        sys, "argv", ["peers.py", *flags.split(), "--out", str(tmp_path), "--only", *names]
    )
    peers.main()
    turns = json.loads((tmp_path / "peers.json").read_text())["turns"]
    assert list(turns) == names
    for ((theirs, _),) in turns.values():
        assert theirs["images_per_sec"] > 0 and 0 <= theirs["accuracy"] <= 100


@pytest.mark.parametrize("who", ["our mnist/single.py", "Lightning", "accelerate"])
def test_interrupted(who, tmp_path, monkeypatch, capsys):
    """20 steps in two epochs, a checkpoint every 4, and a signal after step 14."""
    packages = () if who.startswith("our") else (who.lower(),)
    own_environment_as_theirs(tmp_path, *packages)
    write_mnist(tmp_path / "data", train=640)
    monkeypatch.setattr(interrupted, "TRAINERS", {who: interrupted.TRAINERS[who]})
    flags = f"--peers {tmp_path} --data-dir {tmp_path}/data --checkpoint-every 4 --out {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["interrupted.py", *flags.split()])
    interrupted.main()
    measured = json.loads((tmp_path / "interrupted.json").read_text())["trainers"][who]
    assert measured["steps"] == 20 and measured["repeatable"]
    killed = measured["signals"]["SIGKILL"]
    told = measured["signals"]["SIGTERM"]
    for figures in (killed, told):
        assert figures["last_before"] >= 14 and figures["last_after"] == 20
        assert figures["repeated"] == figures["last_before"] + 1 - figures["first_after"]
    assert killed["status"] == -signal.SIGKILL and killed["repeated"] > 0
    if who.startswith("our"):
        assert told["repeated"] == told["status"] == 0
        assert killed["within_epoch"] and killed["same_weights"] and told["same_weights"]
    assert f"| {who} | SIGKILL | -9 | {killed['last_before']} |" in capsys.readouterr().out


@pytest.mark.parametrize("launcher", ["torchrun", "horovodrun", "mpirun"])
def test_waiting(launcher):
    """The command of its docstring: `alone` is 1, and each other way has its row."""
    if launcher != "torchrun":
        need_horovod(launcher)
    (command,) = [line for line in commands(ROOT / "benchmarks" / "waiting.py") if launcher in line]
    shown = compute(f"{command} --seconds 1 -b 8", cwd=ROOT)
    rows = re.findall(r"\| (.+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", shown)
    assert rows[0][0] == "alone" and rows[0][2:] == ("1.00", "1.00")
    own = "DDP, as in ddp_launch.py" if launcher == "torchrun" else "Horovod, as in hvd.py"
    assert own in [name for name, *_ in rows]
    slowest = float(re.search(r"The slowest of 2 steps alone takes ([\d.]+) times", shown)[1])
    assert slowest >= 1


def test_host_time(tmp_path):
    shown = run(f"python {ROOT}/benchmarks/host_time.py --repeats 2 --epoch 30", cwd=tmp_path)
    figures = dict(re.findall(r"^\| `(.+)` \| ([\d.]+) \|$", shown, re.M))
    beside = [float(us) for text, us in figures.items() if not text.startswith(host_time.MODEL)]
    whole, said = map(int, re.search(r"takes (\d+) us, (\d+) us beside", shown).groups())
    assert sum(beside) == pytest.approx(said, abs=1 + 0.05 * len(beside))
    assert sum(map(float, figures.values())) == pytest.approx(whole, abs=1 + 0.05 * len(figures))
    assert float(figures["loss.backward()"]) > float(figures["stop.listen()"]) > 0


def test_cifar10_as_jpegs(tmp_path, monkeypatch):
    red = torch.tensor([255, 0, 0], dtype=torch.uint8).view(1, 3, 1, 1).expand(2, 3, 32, 32)
    sets = [
        torch.utils.data.TensorDataset(red[: len(labels)], torch.tensor(labels))
        for labels in ([0, 7], [7])
    ]
    monkeypatch.setattr(accuracy.cifar, "load", lambda *_: sets)
    for _ in range(2):
        accuracy.cifar10_as_jpegs(tmp_path, tmp_path / "tree")
        found = sorted(
            str(path.relative_to(tmp_path / "tree")) for path in tmp_path.rglob("*.JPEG")
        )
        assert found == ["train/0/0.JPEG", "train/7/1.JPEG", "val/7/0.JPEG"]
    assert Image.open(tmp_path / "tree" / "val/7/0.JPEG").getpixel((16, 16)) == pytest.approx(
        (255, 0, 0), abs=3
    )


def test_network(tmp_path, monkeypatch, capsys):
    """On a link of 5 ms an all-reduce takes 10 ms, and a step at least that much longer."""
    need_cluster()
    need_horovod("gloo")
    for name, value in network.SETTINGS.items():
        monkeypatch.setenv(name, value)  # and so takes back what main sets
    monkeypatch.setattr(
        network, "WORK", {"mnist": {"model": "lenet", "batch": 16, "steps": 20, "epochs": 2}}
    )
    monkeypatch.setitem(network.LINKS, "5 ms", (5e-3, 0))
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "network.py",
            "--links",
            "5 ms",
            "--processes",
            "2",
            "--repeats",
            "1",
            "--out",
            str(tmp_path),
        ],
    )
    network.main()
    for run_ in json.loads((tmp_path / "network.json").read_text())["runs"]:
        assert run_["alpha"] > 0.004
        assert run_["measured"] > 0.01
        size, latency = model.gradient_bytes("mnist", "lenet"), 2 * run_["alpha"]
        waits = latency / 4 if run_["strategy"] == "hvd_gloo" else 0
        assert run_["predicted"] == pytest.approx(
            run_["alone"] + latency + size * run_["beta"] + waits
        )
    assert "| 5 ms | Horovod, Gloo | mnist | 2 |" in capsys.readouterr().out
    assert (
        network.MACHINES[0]
        not in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
    )


def test_launches(tmp_path):
    """The counts of MNIST's ConvNet; test_gpu.py holds those of CIFAR-10."""
    run(f"python {ROOT}/benchmarks/launches.py --recipes mnist/single.py --out .", cwd=tmp_path)
    launches, between, at = json.loads((tmp_path / "launches.json").read_text())["counts"][
        "mnist/single.py"
    ]
    assert 30 < launches < 45
    assert (between, at) == (0, 1)


def test_timeline(tmp_path):
    need_horovod("gloo")
    compute(
        f"horovodrun --gloo -np 2 python {ROOT}/mnist/hvd.py --synthetic 1280 --epochs 1",
        cwd=tmp_path,
        HOROVOD_TIMELINE=str(tmp_path / "timeline.json"),
    )
    compute(f"python {ROOT}/benchmarks/timeline.py timeline.json timeline.svg", cwd=tmp_path)
    picture = (tmp_path / "timeline.svg").read_text()
    for text in ("GLOO_ALLREDUCE", "9.weight", "0.bias"):
        assert text in picture
    assert "noname" not in picture and "sums" not in picture, "gradients only"


def test_parts_of_a_step(tmp_path):
    """A trace of one step whose parts are known, and of what comes after an epoch's last step."""
    names = [
        ("ProfilerStep#6", 0, 100),
        ("ProfilerStep#7", 100, 300),
        ("Optimizer.zero_grad#SGD.zero_grad", 20, 1),
        ("autograd::engine::evaluate_function: A", 50, 10),
        ("autograd::engine::evaluate_function: B", 61, 9),
        ("Optimizer.step#SGD.step", 71, 20),
        ("Optimizer.step#SGD.step", 85, 5),
    ]
    events = [{"ph": "X", "name": name, "ts": ts, "dur": dur} for name, ts, dur in names]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    seconds = {
        "data": 20,
        "forward": 30,
        "backward": 20,
        "communication": 15,
        "optimizer": 5,
        "other": 10,
    }
    assert runs.parts(path) == pytest.approx({name: value / 1e6 for name, value in seconds.items()})
