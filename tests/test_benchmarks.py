"""The benchmarks measure what they say, refuse what cannot be compared, and the model predicts what they measured."""

import gzip
import json
import sys

import model
import pytest
import runs
import scaling
from forked import compute
from launch import need_horovod, run
from recipes import ROOT


def test_all_reduce_cost():
    assert model.ring(1, 1000, 1, 1) == model.tree(1, 1000, 1, 1) == 0
    assert model.ring(4, 1000, alpha=0, beta=1) == 1500  # 2 (p - 1)/p n
    assert model.ring(4, 1000, alpha=1, beta=0) == 6
    assert model.tree(8, 1000, alpha=1, beta=1) == 6 * 1001
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
    assert model.step(1.0, 0.5, size, all_reduce, overlap=True) == pytest.approx(1 + 9 * model.MIB * 1e-9)
    assert model.step(1.0, 1e-6, size, all_reduce, overlap=True) == pytest.approx(1 + size * 1e-9, rel=1e-3)


def test_the_page_of_the_model(tmp_path):
    """Measurements that follow the formulas exactly are predicted exactly."""
    alpha, beta, step = 1e-4, 1e-9, 0.02
    size = model.gradient_bytes("mnist", "convnet")
    sizes = [{"bytes": 4**k, "seconds": model.ring(2, 4**k, alpha, beta)} for k in range(1, 14)]
    all_reduce = {"backend": "gloo", "processes": 2, "hardware": {"cores": 2}, "sizes": sizes}
    (tmp_path / "allreduce-gloo-2.json").write_text(json.dumps(all_reduce))
    scaling = {"command": "", "hardware": "", "threads": 1, "versions": {}, "date": "", "datasets": ["mnist"], "runs": [
        {"dataset": "mnist", "model": "convnet", "strategy": strategy, "processes": p, "modes": ["weak"], "batch": 64,
         "steps": 10, "epochs": 2, "global_batch": 64 * p, "images_per_sec": [64 * p / seconds],
         "split": {"forward": 1, "backward": 1}}
        for strategy, p, seconds in (("single", 1, step), ("ddp_launch", 2, step + model.ring(2, size, alpha, beta)))]}
    (tmp_path / "scaling.json").write_text(json.dumps(scaling))
    shown = compute(f"python {ROOT}/benchmarks/model.py --out .", cwd=tmp_path)
    for line in ("| gloo | 2 | 100 | 1.00 |", "| mnist | convnet | 1 | 20.0 | 20.0 | 1.00 |",
                 "| mnist | convnet | 2 | 20.3 | 20.3 | 1.00 |"):
        assert line in shown
    assert (tmp_path / "model.md").read_text() == shown and (tmp_path / "model.svg").exists()


def test_the_published_table():
    """The model reproduces the published times, and says that CIFAR-10 is slower on 16 GPUs than on 8."""
    seconds, *_ = model.published_model()
    for dataset, times in model.PUBLISHED.items():
        for gpus, known in times.items():
            assert seconds(dataset, gpus) == pytest.approx(known, rel=0.01)
    assert seconds("cifar10", 16) > seconds("cifar10", 8) < seconds("cifar10", 4)
    assert min((8, 16, 32), key=lambda p: seconds("mnist", p)) == 32


def test_scaling(tmp_path, monkeypatch, capsys):
    flags = "--datasets mnist --strategies ddp_launch --processes 1 2 --repeats 1 --device cpu --out one"
    monkeypatch.setattr(sys, "argv", ["scaling.py", *flags.split()])
    monkeypatch.setitem(scaling.WORK, "mnist", scaling.WORK["mnist"] | {"steps": 8, "epochs": 2})
    monkeypatch.chdir(tmp_path)
    scaling.main()  # six runs of recipes
    shown = capsys.readouterr()
    assert "| DDP, torchrun | 2 | 64 | 128 |" in shown.out
    assert "scaling: 100%" in shown.err
    result = json.loads((tmp_path / "one" / "scaling.json").read_text())
    assert {"command", "hardware", "versions", "date", "threads"} <= result.keys()
    by_name = {(r["strategy"], r["processes"], *r["modes"]): r for r in result["runs"]}
    assert by_name.keys() == {("single", 1, "weak"), ("single", 1, "strong"), ("independent", 2, "weak"),
                              ("ddp_launch", 2, "weak", "strong")}
    split = by_name["ddp_launch", 2, "weak", "strong"]["split"]
    assert set(split) == set(scaling.PARTS)
    assert min(split.values()) >= 0 and split["forward"] + split["backward"] > 0.002
    assert "DDP, torchrun" in (tmp_path / "one" / "scaling.svg").read_text()


@pytest.mark.parametrize(("command", "says"), [
    ("scaling.py --processes 1 3", "scaling.py: a global batch of 128 does not divide over 3 processes"),
    ("model.py --out nowhere", "model.py: nowhere has no scaling.json and allreduce-gloo-2.json: make benchmarks"),
    ("timeline.py nowhere.json x.svg", "timeline.py: nowhere.json is not a Horovod timeline"),
], ids=lambda value: value.split()[0])
def test_wrong_input(command, says, tmp_path):
    shown = compute(f"python {ROOT}/benchmarks/{command}", cwd=tmp_path, status=2)
    assert shown.startswith(says)
    assert shown.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_wide_spread_is_marked():
    assert runs.marked([100, 101, 102]) == "101"
    assert runs.marked([100, 120, 110]) == "110 (!18%)"


def test_start_up(tmp_path):
    shown = run(f"python {ROOT}/benchmarks/startup.py --strategies ddp_launch --repeats 1 --out .", cwd=tmp_path)
    [first, end], = json.loads((tmp_path / "startup.json").read_text())["runs"][0]["seconds"]
    assert 1 < first < end < 100
    assert f"| DDP, torchrun | 2 | {first:.2f} | {end:.2f} |" in shown


def test_timeline(tmp_path):
    need_horovod("gloo")
    compute(f"horovodrun --gloo -np 2 python {ROOT}/mnist/hvd.py --synthetic 1280 --epochs 1", cwd=tmp_path,
            HOROVOD_TIMELINE=str(tmp_path / "timeline.json"))
    compute(f"python {ROOT}/benchmarks/timeline.py timeline.json timeline.svg", cwd=tmp_path)
    picture = (tmp_path / "timeline.svg").read_text()
    for text in ("GLOO_ALLREDUCE", "9.weight", "0.bias"):
        assert text in picture
    assert "noname" not in picture and "sums" not in picture, "gradients only"


def test_parts_of_a_step(tmp_path):
    """A trace of one step whose parts are known, and of what comes after the last step of an epoch."""
    names = [("ProfilerStep#6", 0, 100), ("ProfilerStep#7", 100, 300), ("aten::index_select", 10, 3),
             ("aten::index_select", 14, 1), ("Optimizer.zero_grad#SGD.zero_grad", 20, 1), ("aten::index_select", 25, 1),
             ("autograd::engine::evaluate_function: A", 50, 10), ("autograd::engine::evaluate_function: B", 61, 9),
             ("Optimizer.step#SGD.step", 71, 20), ("Optimizer.step#SGD.step", 85, 5)]
    events = [{"ph": "X", "name": name, "ts": ts, "dur": dur} for name, ts, dur in names]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    seconds = {"data": 10, "forward": 30, "backward": 20, "communication": 15, "optimizer": 5, "other": 20}
    assert runs.parts(path) == pytest.approx({name: value / 1e6 for name, value in seconds.items()})
