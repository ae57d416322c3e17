"""A run that was killed and resumed ends with exactly the weights of an undisturbed one."""

import random
import re
import shutil
import signal

import psutil
import pytest
from forked import ForkedJob, compute
from launch import (
    Job,
    assert_same,
    checkpoint,
    evaluations,
    free_port,
    largest_difference,
    need_horovod,
    place,
    random_seed,
    strategies,
    wait_until,
)
from recipes import ROOT, STEP, changed_copy, in_float64, small, waiting_copy

from common import checkpoint as checkpoints

# Each strategy with one of the data sets. (FSDP: test_fsdp.py.)
RUNS = {
    "single": "mnist",
    "ddp_spawn": "cifar10",
    "ddp_launch": "imagenet",
    "hvd_gloo": "cifar10",
}
EPOCHS, STEPS = 3, 6  # global batches of 64
# Steps from one checkpoint to the next.
EVERY = 3


def start(strategy, folder):
    """The command for a strategy's recipe in `folder`, on two processes unless it is `single`."""
    if strategy.startswith("hvd"):
        need_horovod(strategy)
    return {"single": f"python {folder}/single.py", **strategies(2, folder)}[strategy]


def newest(folder):
    """The newest checkpoint of a folder that a run is writing to, or None."""
    for name in ("last.pt", "previous.pt"):
        try:
            return checkpoints.read(folder / name)[0]
        except FileNotFoundError:
            pass
    return None


def kill(job, reached):
    """SIGKILL to a job and all its processes as soon as `reached()`."""
    wait_until(reached, job)
    job.kill()
    assert job.finish() != 0


TWO_EPOCHS = "--synthetic 256 --epochs 2 --model lenet --device cpu"  # 4 steps in each


@pytest.fixture(scope="module")
def two_epochs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_epochs")
    compute(f"python {ROOT}/mnist/single.py {TWO_EPOCHS} --log-dir {folder}", cwd=folder)
    return folder


def assert_same_run(a, b):
    """The same bits, and the same figures: an epoch that was interrupted has those of a whole one.

    `a` and `b` are log folders. The sum of the losses is added in parts, and so may differ in its
    last bits.
    """
    saved, other = checkpoint(a), checkpoint(b)
    for part in ("position", "model", "optimizer", "best"):
        assert_same(saved[part], other[part])
    figures = evaluations(a), evaluations(b)
    assert len(figures[0]) == len(figures[1])
    for one, two in zip(*figures, strict=True):
        for name in ("epoch", "step", "train/accuracy", "val/accuracy"):
            assert one[name] == two[name]
        for name in ("train/loss", "val/loss"):
            assert one[name] == pytest.approx(two[name], rel=1e-12, abs=0)


@pytest.mark.parametrize("strategy", RUNS)
def test_killed_and_warned(strategy, tmp_path):
    """SIGKILL at a random step, and later SIGUSR1: --resume auto takes the run up each time.

    SIGUSR1 to one rank stops all after the same step, with a checkpoint and status 0.
    """
    dataset, name = RUNS[strategy], f"{strategy.removesuffix('_gloo')}.py"
    batch = 64 if strategy == "single" else 32
    flags = (
        f"-b {batch} --lr 0.005 --synthetic {64 * STEPS} --epochs {EPOCHS} --wd 5e-4 "
        f"--model convnet --device cpu --checkpoint-every {EVERY} {small(dataset)} --resume auto "
        "--log-interval 1"
    )
    whole, part = tmp_path / "whole", tmp_path / "part"
    command = f"{start(strategy, ROOT / dataset)} {flags}"
    assert "starting from the beginning" in compute(f"{command} --log-dir whole", tmp_path)
    # Within the last epoch.
    waits_at = (EPOCHS - 1) * STEPS + 2
    copy = waiting_copy(tmp_path, f"{dataset}/{name}", waits_at)
    disturbed = f"{start(strategy, copy)} {flags} --log-dir part"
    # A checkpoint with as many steps comes before the run waits.
    target = random.Random(random_seed()).randint(1, waits_at - EVERY)

    def reached():
        saved = newest(part)
        return saved and saved["position"]["steps"] >= target

    kill(ForkedJob(disturbed, tmp_path), reached)
    job = ForkedJob(disturbed, tmp_path)
    job.wait_for("waits")
    told = psutil.Process(job.process.pid)
    if strategy in ("ddp_launch", "hvd_gloo"):
        # Their launchers do not pass it on. SLURM tells the ranks.
        told = told.children()[0]
    told.send_signal(signal.SIGUSR1)
    assert job.finish() == 0, job.output()
    assert job.output().count("resumed from part/") == 1
    assert job.output().count("stopped after a signal") == 1
    assert "Traceback" not in job.output()
    assert checkpoint(part)["position"]["steps"] == waits_at + 1
    output = compute(f"{command} --log-dir part", tmp_path)
    assert output.count("resumed from part/last.pt") == 1
    assert "skipped" not in output
    assert place(checkpoint(whole)) == (EPOCHS, 0)
    assert_same_run(whole, part)


def test_killed_with_the_default_model(tmp_path):
    """SIGKILL to a real launcher and its ranks in the last of three steps, and --resume auto.

    The checkpoint of the default model has 89 MB.
    """
    need_horovod()
    flags = "--synthetic 48 -b 8 --epochs 1 --device cpu --checkpoint-every 2"
    copy = waiting_copy(tmp_path, "cifar10/hvd.py", steps=2)
    job = Job(f"horovodrun -np 2 python {copy}/hvd.py {flags} --log-dir part", tmp_path)
    kill(job, lambda: "waits" in job.output())
    assert place(checkpoint(tmp_path / "part")) == (0, 32)
    command = f"horovodrun --gloo -np 2 python {ROOT}/cifar10/hvd.py {flags}"
    assert "resumed from" in compute(f"{command} --log-dir part --resume auto", tmp_path)
    compute(f"{command} --log-dir whole", tmp_path)
    whole, resumed = checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "part")
    assert largest_difference(resumed["model"], whole["model"]) < 1e-6
    assert place(resumed) == place(whole) == (1, 0)


def test_killed_before_the_first_checkpoint(tmp_path):
    """It starts over: a job that a scheduler restarts cannot choose another folder."""
    copy = waiting_copy(tmp_path, "mnist/single.py", steps=2)
    flags = f"{TWO_EPOCHS} --log-dir log --resume auto"
    job = ForkedJob(f"python {copy}/single.py {flags}", tmp_path)
    kill(job, lambda: "waits" in job.output())
    assert (tmp_path / "log" / "results.jsonl").exists()
    assert not list((tmp_path / "log").glob("*.pt"))
    compute(f"python {ROOT}/mnist/single.py {flags}", tmp_path)
    assert place(checkpoint(tmp_path / "log")) == (2, 0)


@pytest.mark.parametrize(("first", "then"), [("--channels-last", ""), ("", "--channels-last")])
def test_resumed_with_another_memory_format(first, then, tmp_path):
    """Momentum is loaded in the memory format of the weights.

    Fused SGD would update others with it.
    """
    folder = in_float64(tmp_path, "mnist")
    command = f"python {folder}/single.py --synthetic 128 --model lenet --device cpu"
    compute(f"{command} {first} --epochs 1 --log-dir first", tmp_path)
    for flags, name in ((first, "same"), (then, "other")):
        resume = f"--epochs 2 --resume first/last.pt --log-dir {name}"
        compute(f"{command} {flags} {resume}", tmp_path)
    same, other = (checkpoint(tmp_path / name)["model"] for name in ("same", "other"))
    assert 0 < largest_difference(same, other) < 1e-6


def test_last_checkpoint_damaged(two_epochs, tmp_path):
    """The previous one is used, and is still there when the next one is saved."""
    shutil.copytree(two_epochs, tmp_path / "log")
    last = tmp_path / "log" / "last.pt"
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 1
    last.write_bytes(content)
    output = compute(
        f"python {ROOT}/mnist/single.py {TWO_EPOCHS} --log-dir log --resume auto", tmp_path
    )
    assert output.count("skipped log/last.pt") == 1
    assert "resumed from log/previous.pt at epoch 2" in output
    assert_same_run(tmp_path / "log", two_epochs)
    previous, _ = checkpoints.read(last.with_name("previous.pt"))
    assert previous["position"]["epoch"] == 1
    assert last.with_name("last.pt.damaged").read_bytes() == content


# What python and torchrun end with.
STATUS = {"single": 0, "ddp_launch": 1}


@pytest.mark.parametrize("strategy", STATUS)
def test_told_to_stop_at_any_moment(strategy, tmp_path):
    """SIGTERM to the launcher alone: no step is lost, and --resume auto takes the run up."""
    flags = (
        "--synthetic 1280 --epochs 3 --model lenet --device cpu --log-interval 2 "
        "--log-seconds 0 --resume auto"
    )
    command = f"{start(strategy, ROOT / 'mnist')} {flags}"
    compute(f"{command} --log-dir whole", tmp_path)
    # It never comes to its end by itself.
    steps = checkpoint(tmp_path / "whole")["position"]["steps"]
    copy = waiting_copy(tmp_path, f"mnist/{strategy}.py", steps - 2)
    job = ForkedJob(f"{start(strategy, copy)} {flags} --log-dir part", tmp_path)
    # A rank listens after its first step, which may have printed a line.
    lines = random.Random(random_seed()).randint(2, steps // 2 - 3)
    wait_until(lambda: len(re.findall("^step ", job.output(), re.MULTILINE)) >= lines, job)
    job.process.terminate()
    assert job.finish() == STATUS[strategy], job.output()
    stop = re.search(r"stopped after a signal at epoch (\d+), sample (\d+)", job.output())
    assert stop, job.output()
    epoch, samples = place(checkpoint(tmp_path / "part"))
    assert (epoch + 1, samples) == tuple(map(int, stop.groups()))
    assert "resumed from" in compute(f"{command} --log-dir part", tmp_path)
    assert_same_run(tmp_path / "whole", tmp_path / "part")


def test_killed_in_an_evaluation(two_epochs, tmp_path):
    """The training before it is saved: the run goes on with this evaluation."""
    line = "    for images, labels in run.batches(val.loader):\n"
    copy = changed_copy(
        tmp_path, "mnist/single.py", line, line + "        __import__('signal').raise_signal(9)\n"
    )
    flags = f"{TWO_EPOCHS} --log-dir part"
    compute(f"python {copy}/single.py {flags}", tmp_path, -signal.SIGKILL)
    assert place(checkpoint(tmp_path / "part")) == (0, 256)
    compute(f"python {ROOT}/mnist/single.py {flags} --resume auto", cwd=tmp_path)
    assert_same_run(two_epochs, tmp_path / "part")


def test_4_2_1_and_3_processes_within_an_epoch(tmp_path):
    """Stopped at random samples: they use each sample once, and end where one process ends."""
    line = (
        "            import os, signal\n"
        "            sampler = train.sampler\n"
        "            k = (run.position.samples - sampler.start) // sampler.world_size\n"
        "            with open(f'used-{world.rank}', 'a') as file:\n"
        "                print(*list(sampler)[k : k + sampler.batch_size], file=file)\n"
        "            if run.position.samples == int(os.environ['STOP_AT']):\n"
        "                signal.raise_signal(signal.SIGTERM)\n"
    )
    in_float64(
        tmp_path, "mnist", "ddp_launch.py", STEP, line + STEP
    )  # 50 steps in float32 let rounding grow to 1e-3
    flags = (
        "--synthetic 600 --epochs 1 --model lenet --global-batch-size 24 --device cpu "
        "--log-interval 1"
    )
    compute(f"python mnist/single.py {flags} --log-dir whole", tmp_path)
    draw = random.Random(random_seed())
    # Not in the first step after a start, in which SIGTERM ends a rank at once.
    stops = [1 + 2 * step for step in sorted(draw.sample(range(12), 3))]
    for size, step in zip((4, 2, 1, 3), [*stops, 25], strict=True):
        compute(
            f"torchrun --nproc-per-node={size} mnist/ddp_launch.py {flags} --log-dir part "
            "--resume auto",
            tmp_path,
            STOP_AT=str(24 * step),
        )
        assert place(checkpoint(tmp_path / "part"))[1] == (24 * (step + 1) if step < 25 else 0)
    used = [int(index) for path in tmp_path.glob("used-*") for index in path.read_text().split()]
    assert sorted(used) == list(range(600))
    whole, saved = checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "part")
    assert largest_difference(saved["model"], whole["model"]) < 1e-5


@pytest.mark.parametrize(("epoch", "sample", "interval"), [(0, 192, 1), (1, 192, 1), (0, 192, 3)])
def test_warned_at_the_end_of_an_epoch(epoch, sample, interval, two_epochs, tmp_path):
    """In the step that begins at `sample` of `epoch`: it stops within --log-interval steps.

    If that is after the last step of an epoch, the resumed run still evaluates it.
    """
    raised = (
        f"            if (run.position.epoch, run.position.samples) == ({epoch}, {sample}):\n"
        "                __import__('signal').raise_signal(10)\n"
    )
    copy = changed_copy(tmp_path, "mnist/single.py", STEP, raised + STEP)
    flags = f"{TWO_EPOCHS} --log-interval {interval} --log-dir part"
    assert (
        compute(f"python {copy}/single.py {flags}", cwd=tmp_path).count("stopped after a signal")
        == 1
    )
    saved = checkpoint(tmp_path / "part")
    steps = (place(saved)[0] - epoch) * 4 + (place(saved)[1] - sample) // 64
    assert 1 <= steps <= interval
    compute(f"python {ROOT}/mnist/single.py {flags} --resume auto", cwd=tmp_path)
    assert_same_run(two_epochs, tmp_path / "part")


def test_from_launcher_to_launcher(tmp_path):
    """A run begins with FSDP, goes on under Horovod, in one process, and again with FSDP.

    All but the last stop within an epoch; together the four train like one undisturbed run of DDP.
    """
    need_horovod()
    stops = (
        "            import os, signal\n"
        "            if run.position.samples == int(os.environ['STOP_AT']) - 64:\n"
        "                signal.raise_signal(signal.SIGUSR1)\n"
    )
    changed_copy(tmp_path, "mnist/single.py", STEP, stops + STEP)
    for name in ("fsdp", "hvd"):
        path = tmp_path / "mnist" / f"{name}.py"
        path.write_text(path.read_text().replace(STEP, stops + STEP))
    flags = (
        "--synthetic 320 --epochs 2 --model lenet --lr 0.02 --scale-lr none --device cpu "
        "--log-interval 1"
    )
    on_two = {name: f"{command} -b 32" for name, command in strategies(2, "mnist").items()}
    compute(f"{on_two['ddp_launch']} {flags} --log-dir whole", tmp_path, STOP_AT="-1")
    # 5 steps of 64 images in each epoch: after 2 and 4 of the first, 2 of the second, at the end
    chain = [
        (on_two["fsdp"], 128, (0, 128)),
        (on_two["hvd_gloo"], 256, (0, 256)),
        ("python mnist/single.py -b 64", 128, (1, 128)),
        (on_two["fsdp"], -1, (2, 0)),
    ]
    saved = None
    for command, stop_at, ends in chain:
        resume = "--log-dir part --resume auto"
        output = compute(f"{command} {flags} {resume}", tmp_path, STOP_AT=str(stop_at))
        says = re.findall("^resumed from part/last.pt.*", output, re.MULTILINE)
        assert len(says) == (saved is not None)
        assert not says or f"(saved by {saved['config']['saved_by']})" in says[0]
        saved = checkpoint(tmp_path / "part")
        assert place(saved) == ends
    whole = checkpoint(tmp_path / "whole")
    assert largest_difference(saved["model"], whole["model"]) < 1e-5
    figures = evaluations(tmp_path / "part"), evaluations(tmp_path / "whole")
    assert len(figures[0]) == 2
    for one, other in zip(*figures, strict=True):
        assert one["train/loss"] == pytest.approx(other["train/loss"], rel=1e-5)


@pytest.mark.parametrize("copied", ["late", "never"])
def test_each_machine_reads_the_checkpoint(copied, tmp_path):
    """Two machines with own folders: with copies they go on, without they end and say why.

    They look again, as NFS may show a new file late.
    """
    folder = in_float64(tmp_path, "mnist")
    code = tmp_path / "common" / "checkpoint.py"
    text = code.read_text()
    # A file says that it looks again. It does so for long, or once if no copy will come.
    often = 5 if copied == "never" else 100_000
    for line, changed in (
        ("LOOK_AGAIN = 60", f"LOOK_AGAIN = {often}"),
        ("time.sleep(5)", "time.sleep(0.1); open('looks-again', 'w').close()"),
    ):
        assert text.count(line) == 1
        text = text.replace(line, changed)
    code.write_text(text)
    for machine in ("first", "second"):
        (tmp_path / machine).mkdir()
    common = (
        f"python {folder}/ddp_spawn.py --synthetic 256 --model lenet --device cpu --log-dir log"
    )
    compute(f"{common} -g 2 --epochs 1", cwd=tmp_path / "first")
    logs = tmp_path / "first" / "log", tmp_path / "second" / "log"
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    jobs = [
        ForkedJob(
            f"{common} -n 2 -g 1 -nr {k} --epochs 2 --resume auto", cwd=tmp_path / machine, **where
        )
        for k, machine in enumerate(("first", "second"))
    ]
    if copied == "late":
        wait_until((tmp_path / "second" / "looks-again").exists, jobs[1])
        shutil.copytree(logs[0], tmp_path / "copy")
        (tmp_path / "copy").rename(logs[1])
    status = 2 if copied == "never" else 0
    assert [job.finish() for job in jobs] == [status] * 2, [job.output() for job in jobs]
    first, second = (job.output() for job in jobs)
    if copied == "never":
        assert first.count("ddp_spawn.py: --resume auto") == 1
        assert len(first.splitlines()) == 2
        assert "Traceback" not in second
        assert place(checkpoint(tmp_path / "first" / "log")) == (1, 0)
    else:
        assert first.count("resumed from log/last.pt at epoch 2") == 1
        assert place(checkpoint(tmp_path / "first" / "log")) == (2, 0)
        waits = f"all 2 machines wait for each other at 127.0.0.1:{where['MASTER_PORT']}"
        assert second == f"-nr 1: {waits}\n"


def test_evaluations_within_an_epoch_change_nothing_else(tmp_path):
    """The same weights with them as without, and a checkpoint at each."""
    flags = "--synthetic 320 -b 32 --epochs 2 --device cpu"
    compute(f"python {ROOT}/mnist/single.py {flags} --log-dir without", cwd=tmp_path)
    often = f"{flags} --eval-every 4 --log-interval 3"
    compute(f"python {ROOT}/mnist/single.py {often} --log-dir with", cwd=tmp_path)
    assert_same(checkpoint(tmp_path / "with")["model"], checkpoint(tmp_path / "without")["model"])
    steps = [line["step"] for line in evaluations(tmp_path / "with")]
    assert steps == [4, 8, 10, 12, 16, 20]


def test_the_position_counts_what_the_sampler_gave(tmp_path):
    """A copy that fixes the batch size, whatever the flag says."""
    line = "schedule.batch_size(args)"
    folder = changed_copy(tmp_path / "copy", "mnist/single.py", line, "32")
    flags = "--synthetic 640 --max-steps 7 --device cpu -b 64 --log-dir log"
    compute(f"python {folder}/single.py {flags}", cwd=tmp_path)
    assert place(checkpoint(tmp_path / "log")) == (0, 7 * 32)
