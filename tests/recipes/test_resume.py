"""A run that was killed and resumed ends with exactly the weights of an undisturbed one."""

import importlib.util
import os
import random
import re
import shutil
import signal
import time

import pytest
from forked import ForkedJob, compute
from launch import (
    Job,
    assert_same,
    checkpoint,
    evaluations,
    free_port,
    largest_difference,
    need,
    need_horovod,
    place,
    random_seed,
    run,
    strategies,
    wait_until,
)
from recipes import ROOT, STEP, changed_copy, in_float64, small, waiting_copy

from common import checkpoint as checkpoints

# How often each run is killed. ddp_spawn.py is started as a user does, which takes longest.
# DEFAULTS has one under MPI.
KILLS = {"ddp_spawn": 1, "ddp_launch": 1, "hvd_gloo": 1}
RUNS = {"ddp_spawn": "cifar10", "ddp_launch": "imagenet", "hvd_gloo": "cifar10"}
EPOCHS, STEPS = 4, 8  # global batches of 128
# Steps from one checkpoint to the next.
EVERY = 3


def start(strategy, folder):
    """The command for a strategy's recipe in `folder`, on two processes unless it is `single`."""
    if strategy.startswith("hvd"):
        need_horovod(strategy)
    return {"single": f"python {folder}/single.py", **strategies(2, folder)}[strategy]


def recipe_of(strategy):
    """The name of a strategy's recipe, without .py."""
    return "hvd" if strategy.startswith("hvd") else strategy


def forked(strategy):
    """The same strategy with forked processes: on two ranks any sum is a + b, bit by bit."""
    return "hvd_gloo" if strategy == "hvd_mpi" else strategy


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


@pytest.mark.parametrize("strategy", KILLS)
def test_kills(strategy, tmp_path):
    """SIGKILL at random steps of one run, which --resume auto takes up again each time."""
    dataset = RUNS[strategy]
    flags = (
        f"-b 64 --lr 0.005 --synthetic {128 * STEPS} --epochs {EPOCHS} --wd 5e-4 "
        f"--model convnet --device cpu --checkpoint-every {EVERY} {small(dataset)} --resume auto"
    )
    # The run that is killed never comes to its end by itself.
    copy = waiting_copy(tmp_path, f"{dataset}/{recipe_of(strategy)}.py", steps=(EPOCHS - 1) * STEPS)
    command = f"{start(strategy, copy)} {flags}"
    quick = f"{start(forked(strategy), ROOT / dataset)} {flags}"
    assert "starting from the beginning" in compute(f"{quick} --log-dir whole", cwd=tmp_path)
    start_job = Job if strategy == "ddp_spawn" else ForkedJob
    draw, folder = random.Random(random_seed()), tmp_path / "part"
    # After each of them there is a checkpoint, before the run waits.
    targets = range(1, (EPOCHS - 1) * STEPS - EVERY)
    for target in sorted(draw.sample(targets, k=KILLS[strategy])):

        def reached(steps=target):
            saved = newest(folder)
            return saved and saved["position"]["steps"] >= steps

        kill(start_job(f"{command} --log-dir part", cwd=tmp_path), reached)
    output = compute(f"{quick} --log-dir part", cwd=tmp_path)
    assert "resumed from part/" in output
    assert "skipped" not in output
    assert place(checkpoint(tmp_path / "whole")) == (EPOCHS, 0)
    assert_same_run(tmp_path / "whole", folder)


# The tensors of a checkpoint, by their checksums. torch would take seconds to load.
RESULT = """
import sys
import zipfile

entries = zipfile.ZipFile(sys.argv[1]).infolist()
print([entry.CRC for entry in entries if "/data/" in entry.filename])
"""


def test_ckpt_chaos(tmp_path):
    """Killed with a torn file, and told to stop by SIGTERM: the same weights at the end."""
    need(importlib.util.find_spec("ckpt_chaos"), "pip install ckpt-chaos")
    (tmp_path / "result.py").write_text(RESULT)
    recipe = f"python {ROOT}/mnist/single.py --synthetic 640 --model lenet --device cpu --epochs 2"
    said = run(
        "ckpt-chaos run --work work --modes torn,term --max-points 2 "
        "--result-cmd 'python result.py {out}/last.pt' -- "
        f"{recipe} --checkpoint-every 4 --resume auto --log-dir {{out}}",
        tmp_path,
    )
    assert re.findall(r"^([A-Z_]+): \d+$", said, re.M) == ["PASS"]


# The recipes with the models that they have by default: checkpoints of 89 MB, and of 205 MB.
DEFAULTS = {
    "cifar10/hvd.py": "horovodrun -np 2 python {}/hvd.py --synthetic 96 -b 16",
    "cifar10/ddp_launch.py": "torchrun --nproc-per-node=2 --standalone {}/ddp_launch.py "
    "--synthetic 96 -b 16",
    "imagenet/single.py": "python {}/single.py --arch resnet50 --image-size 64 --synthetic 48 "
    "-b 16",
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_killed_with_the_default_model(name, tmp_path):
    """SIGKILL in the last of three steps, and --resume auto."""
    if "hvd" in name:
        need_horovod()
    command, quick = (
        f"{DEFAULTS[name].format(folder)} --epochs 1 --device cpu --checkpoint-every 2"
        for folder in (waiting_copy(tmp_path, name, steps=2), (ROOT / name).parent)
    )
    quick = quick.replace("horovodrun", "horovodrun --gloo")
    job = Job(f"{command} --log-dir part", cwd=tmp_path)
    kill(job, lambda: "waits" in job.output())
    assert place(checkpoint(tmp_path / "part")) == (0, 32 if "imagenet" in name else 64)
    for flags in ("--log-dir part --resume auto", "--log-dir whole"):
        assert compute(f"{quick} {flags}", cwd=tmp_path).count("resumed from") == ("auto" in flags)
    whole, resumed = checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "part")
    if "single" in name:
        assert_same_run(tmp_path / "whole", tmp_path / "part")
    assert largest_difference(resumed["model"], whole["model"]) < 1e-6
    assert place(resumed) == place(whole) == (1, 0)


def test_killed_before_the_first_checkpoint(tmp_path):
    """It starts over: a job that a scheduler restarts cannot choose another folder."""
    copy = waiting_copy(tmp_path, "mnist/single.py", steps=2)
    flags = "--synthetic 640 --model lenet --device cpu --epochs 1 --log-dir log --resume auto"
    job = ForkedJob(f"python {copy}/single.py {flags}", cwd=tmp_path)
    kill(job, lambda: "waits" in job.output())
    assert (tmp_path / "log" / "results.jsonl").exists()
    assert not list((tmp_path / "log").glob("*.pt"))
    compute(f"python {ROOT}/mnist/single.py {flags}", cwd=tmp_path)
    assert place(checkpoint(tmp_path / "log")) == (1, 0)


@pytest.mark.parametrize(("first", "then"), [("--channels-last", ""), ("", "--channels-last")])
def test_resumed_with_another_memory_format(first, then, tmp_path):
    """Momentum is loaded in the memory format of the weights.

    Fused SGD would update others with it.
    """
    folder = in_float64(tmp_path, "mnist")
    command = f"python {folder}/single.py --synthetic 640 --device cpu"
    compute(f"{command} {first} --epochs 1 --log-dir first", cwd=tmp_path)
    for flags, name in ((first, "same"), (then, "other")):
        compute(
            f"{command} {flags} --epochs 2 --resume first/last.pt --log-dir {name}", cwd=tmp_path
        )
    same, other = (checkpoint(tmp_path / name)["model"] for name in ("same", "other"))
    assert 0 < largest_difference(same, other) < 1e-6


def test_last_checkpoint_damaged(tmp_path):
    """The previous one is used, and is still there when the next one is saved."""
    command = (
        f"python {ROOT}/mnist/single.py --synthetic 640 --model lenet --device cpu "
        "--epochs 3 --log-dir log"
    )
    compute(command, cwd=tmp_path)
    shutil.copytree(tmp_path / "log", tmp_path / "whole")
    last = tmp_path / "log" / "last.pt"
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 1
    last.write_bytes(content)
    output = compute(f"{command} --resume auto", cwd=tmp_path)
    assert output.count("skipped log/last.pt") == 1
    assert "resumed from log/previous.pt at epoch 3" in output
    assert_same_run(tmp_path / "log", tmp_path / "whole")
    previous, _ = checkpoints.read(last.with_name("previous.pt"))
    assert previous["position"]["epoch"] == 2
    assert last.with_name("last.pt.damaged").read_bytes() == content


@pytest.mark.parametrize("strategy", ["single", "ddp_spawn", "ddp_launch", "hvd_gloo", "hvd_mpi"])
def test_warned_and_resumed(strategy, tmp_path):
    """SIGUSR1 to one rank stops all after the same step, with a checkpoint and status 0."""
    flags = "--synthetic 512 --epochs 2 --model lenet --device cpu --log-interval 2 --resume auto"
    copy = waiting_copy(tmp_path, f"mnist/{recipe_of(strategy)}.py", steps=5)
    command = f"{start(strategy, copy)} {flags}"
    quick = f"{start(forked(strategy), ROOT / 'mnist')} {flags}"
    compute(f"{quick} --log-dir whole", cwd=tmp_path)
    job = Job(f"exec {command} --log-dir part", cwd=tmp_path)
    job.wait_for("waits")
    told = job.process  # passes it on to the ranks, or is the only one
    if strategy in (
        "ddp_launch",
        "hvd_gloo",
    ):  # their launchers do not; SLURM signals the ranks directly
        told = next(
            process
            for process, words in job.command_lines()
            if re.search(r"python\S*( -u)? \S*/(ddp_launch|hvd)\.py", " ".join(words[:3]))
            and not words[0].endswith("sh")
        )
    told.send_signal(signal.SIGUSR1)
    assert job.finish() == 0, job.output()
    assert job.output().count("stopped after a signal") == 1
    assert "Traceback" not in job.output()
    assert checkpoint(tmp_path / "part")["position"]["steps"] == 6
    assert compute(f"{quick} --log-dir part", cwd=tmp_path).count("resumed from part/last.pt") == 1
    assert_same_run(tmp_path / "whole", tmp_path / "part")


MOMENTS = int(os.environ.get("MOMENTS", 1))  # at which each run is told to stop
# Of the launcher.
STATUS = {"single": 0, "ddp_launch": 1, "hvd_gloo": 0}


@pytest.mark.timeout(1500 + 60 * MOMENTS)
@pytest.mark.parametrize("strategy", STATUS)
def test_told_to_stop_at_any_moment(strategy, tmp_path):
    """SIGTERM to the launcher alone.

    After the start no step is lost, and --resume auto takes the run up each time.
    """
    flags = (
        f"--synthetic 3200 --epochs {3 + MOMENTS} --model lenet --device cpu "
        "--test-batch-size 10 --log-seconds 0 --resume auto"
    )
    command, quick = (
        f"{start(name, ROOT / 'mnist')} {flags}" for name in (strategy, forked(strategy))
    )
    command = command.replace(
        "mpirun ", "mpirun --mca odls_base_sigkill_timeout 5 "
    )  # it always waits that long
    compute(f"{quick} --log-dir whole", cwd=tmp_path)
    draw, folder = random.Random(random_seed()), tmp_path / "part"
    for _ in range(MOMENTS):
        job = Job(f"exec {command} --log-dir part", cwd=tmp_path)
        if draw.random() < 0.8:
            job.wait_for("step ")
        time.sleep(draw.uniform(0, 2))
        if not job.running():
            break
        job.process.terminate()
        status, output = job.finish(), job.output()
        print(strategy, status, output)
        if f"epoch {3 + MOMENTS}/" in output:
            break  # it came in the last evaluation
        if strategy.startswith("hvd") and "stopped after" not in output:
            continue  # its launcher has killed it, 5 s later
        # A rank hears the signal after its first step, which may have printed a line.
        steps = re.findall("^step ", output, re.MULTILINE)
        if len(steps) < 2 and "stopped after" not in output:
            # horovodrun --gloo ends with 0 when it stops ranks that have just been started, whose
            # shells say so
            assert status != 0 or (strategy == "hvd_gloo" and "Terminated" in output), (
                "nothing has begun"
            )
        else:
            assert status == STATUS[strategy], output
            stop = re.search(r"stopped after a signal at epoch (\d+), sample (\d+)", output)
            assert stop, output
            saved = checkpoint(folder)
            epoch, samples = place(saved)
            assert (epoch + 1, samples) == tuple(map(int, stop.groups()))
    compute(f"{quick} --log-dir part", cwd=tmp_path)
    assert_same_run(tmp_path / "whole", folder)


def test_killed_in_an_evaluation(two_epochs, tmp_path):
    """The training before it is saved: the run goes on with this evaluation."""
    line = "    for batch in watchdog.watch(val.loader):\n"
    copy = changed_copy(
        tmp_path, "mnist/single.py", line, line + "        __import__('signal').raise_signal(9)\n"
    )
    flags = f"{TWO_EPOCHS} --log-dir part"
    run(f"exec python {copy}/single.py {flags}", tmp_path, -9)
    assert place(checkpoint(tmp_path / "part")) == (0, 256)
    compute(f"python {ROOT}/mnist/single.py {flags} --resume auto", cwd=tmp_path)
    assert_same_run(two_epochs, tmp_path / "part")


def test_4_2_1_and_3_processes_within_an_epoch(tmp_path):
    """Stopped at random samples: they use each sample once, and end where one process ends."""
    line = (
        "        import os, signal\n"
        "        sampler = train.sampler\n"
        "        k = (position.samples - sampler.start) // sampler.world_size\n"
        "        with open(f'used-{rank}', 'a') as file:\n"
        "            print(*list(sampler)[k : k + sampler.batch_size], file=file)\n"
        "        if position.samples == int(os.environ['STOP_AT']):\n"
        "            signal.raise_signal(signal.SIGTERM)\n"
    )
    in_float64(
        tmp_path, "mnist", "ddp_launch.py", STEP, line + STEP
    )  # 50 steps in float32 let rounding grow to 1e-3
    flags = (
        "--synthetic 1200 --epochs 1 --model lenet --global-batch-size 24 --device cpu "
        "--log-interval 1"
    )
    compute(f"python mnist/single.py {flags} --log-dir whole", cwd=tmp_path)
    draw = random.Random(random_seed())
    # Not in the first step after a start, in which SIGTERM ends a rank at once.
    stops = [1 + 2 * step for step in sorted(draw.sample(range(24), 3))]
    for size, step in zip((4, 2, 1, 3), [*stops, 50], strict=True):
        compute(
            f"torchrun --standalone --nproc-per-node={size} mnist/ddp_launch.py {flags} "
            "--log-dir part "
            "--resume auto",
            cwd=tmp_path,
            STOP_AT=str(24 * step),
        )
        assert place(checkpoint(tmp_path / "part"))[1] == (24 * (step + 1) if step < 50 else 0)
    used = [int(index) for path in tmp_path.glob("used-*") for index in path.read_text().split()]
    assert sorted(used) == list(range(1200))
    whole, saved = checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "part")
    assert largest_difference(saved["model"], whole["model"]) < 1e-5


TWO_EPOCHS = "--synthetic 256 --epochs 2 --model lenet --device cpu"  # 4 steps in each


@pytest.fixture(scope="module")
def two_epochs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_epochs")
    compute(f"python {ROOT}/mnist/single.py {TWO_EPOCHS} --log-dir {folder}", cwd=folder)
    return folder


@pytest.mark.parametrize(("epoch", "sample", "interval"), [(0, 192, 1), (1, 192, 1), (0, 192, 3)])
def test_warned_at_the_end_of_an_epoch(epoch, sample, interval, two_epochs, tmp_path):
    """In the step that begins at `sample` of `epoch`: it stops within --log-interval steps.

    If that is after the last step of an epoch, the resumed run still evaluates it.
    """
    raised = (
        f"        if (position.epoch, position.samples) == ({epoch}, {sample}):\n"
        "            __import__('signal').raise_signal(10)\n"
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


@pytest.mark.parametrize("recipe", ["ddp_launch.py", "fsdp.py"])
def test_from_launcher_to_launcher(recipe, tmp_path):
    """A run begins under torchrun, goes on under Horovod, in one process, and under torchrun.

    All but the last stop within an epoch; together the four train like one undisturbed run.
    """
    need_horovod()
    stops = (
        "        import os, signal\n"
        "        if position.samples == int(os.environ['STOP_AT']) - 64:\n"
        "            signal.raise_signal(signal.SIGUSR1)\n"
    )
    changed_copy(tmp_path, "mnist/single.py", STEP, stops + STEP)
    for name in (recipe, "hvd.py"):
        path = tmp_path / "mnist" / name
        path.write_text(path.read_text().replace(STEP, stops + STEP))
    flags = (
        "--synthetic 320 --epochs 2 --model lenet --lr 0.02 --scale-lr none --device cpu "
        "--log-interval 1"
    )
    torchrun = f"torchrun --standalone --nproc-per-node=2 mnist/{recipe} -b 32 {flags}"
    compute(f"{torchrun} --log-dir whole", cwd=tmp_path, STOP_AT="-1")
    # 5 steps of 64 images in each epoch: after 2 and 4 of the first, 2 of the second, at the end
    chain = [
        (torchrun, 128, (0, 128)),
        (f"horovodrun --gloo -np 2 python mnist/hvd.py -b 32 {flags}", 256, (0, 256)),
        (f"python mnist/single.py -b 64 {flags}", 128, (1, 128)),
        (torchrun, -1, (2, 0)),
    ]
    for number, (command, stop_at, ends) in enumerate(chain):
        before = checkpoint(tmp_path / "part") if number else None
        output = compute(
            f"{command} --log-dir part --resume auto", cwd=tmp_path, STOP_AT=str(stop_at)
        )
        saved = checkpoint(tmp_path / "part")
        assert place(saved) == ends
        lines = [
            line for line in output.splitlines() if line.startswith("resumed from part/last.pt")
        ]
        assert len(lines) == (number > 0)
        assert number == 0 or f"(saved by {before['config']['saved_by']})" in lines[0]
    whole = checkpoint(tmp_path / "whole")
    assert largest_difference(saved["model"], whole["model"]) < 1e-5
    figures = evaluations(tmp_path / "part"), evaluations(tmp_path / "whole")
    assert len(figures[0]) == 2
    for one, other in zip(*figures, strict=True):
        assert one["train/loss"] == pytest.approx(other["train/loss"], rel=1e-5)


def test_rate_on_another_number_of_processes(tmp_path):
    """--scale-lr linear: after the resume, the rates are those of a run on as many processes."""
    flags = "-b 32 --synthetic 192 --model lenet --device cpu"
    compute(
        f"python {ROOT}/mnist/ddp_spawn.py -g 3 {flags} --epochs 1 --log-dir part", cwd=tmp_path
    )
    for folder in ("part", "whole"):
        compute(
            f"python {ROOT}/mnist/single.py {flags} --epochs 3 --log-dir {folder} --resume auto",
            cwd=tmp_path,
        )
    part, whole = (
        [line["train/lr"] for line in evaluations(tmp_path / name)] for name in ("part", "whole")
    )
    assert len(part) == 3
    assert part[0] > whole[0]
    assert part[1:] == whole[1:]


@pytest.mark.parametrize("copied", ["before", "late", "never"])
def test_each_machine_reads_the_checkpoint(copied, tmp_path):
    """Two machines with own folders: with copies they go on, without they end and say why.

    They look again, as NFS may show a new file late.
    """
    folder = in_float64(tmp_path, "mnist")
    code = tmp_path / "common" / "checkpoint.py"
    text = code.read_text()
    # It says that it looks again, and does so often; where no copy comes, once.
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
        f"python {folder}/ddp_spawn.py --synthetic 640 --model lenet --device cpu --log-dir log"
    )
    compute(f"{common} -g 2 --epochs 1", cwd=tmp_path / "first")
    logs = tmp_path / "first" / "log", tmp_path / "second" / "log"
    if copied == "before":
        shutil.copytree(*logs)
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
    flags = "--synthetic 640 --epochs 2 --device cpu"
    compute(f"python {ROOT}/mnist/single.py {flags} --log-dir without", cwd=tmp_path)
    often = f"{flags} --eval-every 4 --log-interval 3"
    compute(f"python {ROOT}/mnist/single.py {often} --log-dir with", cwd=tmp_path)
    assert_same(checkpoint(tmp_path / "with")["model"], checkpoint(tmp_path / "without")["model"])
    steps = [line["step"] for line in evaluations(tmp_path / "with")]
    assert steps == [4, 8, 10, 12, 16, 20]


def test_the_position_counts_what_the_sampler_gave(tmp_path):
    """A copy that fixes the batch size, whatever the flag says."""
    line = "schedule.per_process(args.batch_size, args.global_batch_size)"
    folder = changed_copy(tmp_path / "copy", "mnist/single.py", line, "32")
    flags = "--synthetic 640 --max-steps 7 --device cpu -b 64 --log-dir log"
    compute(f"python {folder}/single.py {flags}", cwd=tmp_path)
    assert place(checkpoint(tmp_path / "log")) == (0, 7 * 32)
