"""Each recipe, started by each command in its docstring, runs to its end and prints a line once."""

import contextlib
import faulthandler
import gzip
import importlib.util
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from unittest import mock

import psutil
import pytest
import torch.distributed.run
from forked import ForkedJob, compute
from launch import (
    Job,
    checkpoint,
    evaluations,
    free_port,
    need_horovod,
    run,
    strategies,
    wait_until,
)
from recipes import RECIPES, ROOT, changed_copy, commands, name_of, small

from common import spawn

SMALL = "--synthetic 2048 --epochs 1 --batch-size 32"


def jobs():
    """(recipe, commands that make one run, how to start them).

    Those that name a machine by -nr belong together. The recipes of the other data sets have the
    same commands (test_siblings.py), and test_copy_out.py starts each. A launcher that is known
    from another recipe is not started again: its ranks are forked.
    """
    started = set()
    for recipe in [recipe for recipe in RECIPES if recipe.parent.name == "mnist"]:
        lines = commands(recipe)
        together = [line for line in lines if "-nr " in line]
        groups = [[line] for line in lines if line not in together]
        groups += [together] if together else []
        for group in groups:
            first = group is groups[0]
            launcher, _, _ = group[0].partition(" mnist/")
            launcher = launcher.replace("torchrun --standalone", "torchrun")
            can_fork = launcher.startswith(("python", "torchrun", "horovodrun --gloo"))
            known = launcher in started or launcher.startswith("horovodrun --gloo")
            start = ForkedJob if can_fork and known and "-m" not in launcher.split() else Job
            started.add(launcher)
            yield pytest.param(
                recipe,
                group,
                start,
                id=group[-1].replace(" ", "_").replace("/", "."),
                marks=[pytest.mark.check] * first,
            )


def apex_there():
    return torch.cuda.device_count() >= 2 and importlib.util.find_spec("apex") is not None


def test_every_recipe_names_a_command():
    assert len(RECIPES) >= 21
    for recipe in RECIPES:
        assert commands(recipe), f"{name_of(recipe)} does not say how to start it"
        assert all(name_of(recipe) in line for line in commands(recipe))


@pytest.mark.parametrize(("recipe", "group", "start"), list(jobs()))
def test_docstring_command(recipe, group, start, tmp_path):
    if "hvd.py" in recipe.name:
        need_horovod(*group)
    started, port = [], str(free_port())
    for line in group:
        line = line.replace("29500", port)  # several tests at a time
        line = re.sub(r"(torchrun|torch\.distributed\.launch) ", rf"\1 --master-port={port} ", line)
        # a rate for small batches of generated images
        flags = f"{SMALL} {small(recipe.parent.name)} --model convnet --lr 0.005"
        command = f"{line} {flags} --log-dir {tmp_path}/log"
        started.append(start(command, cwd=ROOT))
    status = [job.finish() for job in started]
    output = "".join(job.output() for job in started)
    if recipe.name == "apex_amp.py" and not apex_there():
        assert status == [1], output  # torchrun's own status for a worker that failed
        assert "from apex import amp" in output or "Apex needs a GPU" in output
        return
    assert status == [0] * len(group), output
    first = next(line for line in output.splitlines() if line.startswith(recipe.parent.name))
    names = {
        "--gloo": "Horovod, Gloo",
        "horovodrun": "Horovod, (MPI|Gloo)",  # it takes MPI if there is one
        "mpirun": "Horovod, MPI",
        "spawn.py": r"DDP, mp\.spawn",
        "ddp_amp.py": r"DDP \+ torch\.amp, torchrun",
        "fsdp.py": "FSDP, torchrun",
        "apex_amp.py": "Apex O., torchrun",
        "torch": "DDP, torchrun",
        "dp.py": "DataParallel, [0-9]+ GPUs",
        "single.py": "one device",
    }
    strategy = next(names[part] for part in names if part in group[0])
    world_size = 1 if recipe.name in ("single.py", "dp.py") else 2
    begins = rf"{recipe.parent.name}: {strategy} \| world size {world_size} \|"
    assert re.match(begins, first), first
    assert f"batch 32 per process, {32 * world_size} global | lr 0.0" in first, first
    only_once = re.findall(r"^\w+: .*world size", output, re.MULTILINE)
    assert len(only_once) == 1, output
    result = r"loss [\d.]+ acc [\d.]+%"
    line = rf"^epoch 1/1: {result} \| val {result} \| [\d,]+ images/s \| \d+% data wait$"
    assert len(re.findall(line, output, re.MULTILINE)) == 1, output
    (result,) = evaluations(tmp_path / "log")
    assert result["epoch"] == 1
    assert result["step"] * 32 * world_size == 2048
    assert result["train/accuracy"] > 0.3, "chance is 0.1"
    saved = checkpoint(tmp_path / "log")
    assert saved["config"]["saved_by"].endswith(f"world size {world_size}")
    assert saved["position"]["steps"] == result["step"]


def test_scaling(tmp_path):
    output = compute(
        f"python {ROOT}/mnist/ddp_spawn.py -g 2 --synthetic 512 --batch-size 32 --scale-lr sqrt "
        "--lr 0.1 --dry-run",
        cwd=tmp_path,
    )
    assert "batch 32 per process, 64 global | lr 0.141421" in output
    assert not (tmp_path / "runs").exists(), "--dry-run leaves no files"


def start_of(folder):
    """The first line of results.jsonl."""
    return json.loads((folder / "results.jsonl").read_text().splitlines()[0])


def test_tensorboard_has_the_scalars(tmp_path):
    """The same names, steps and values as results.jsonl, which also says what ran."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    command = f"python {ROOT}/mnist/single.py --synthetic 512 --epochs 3 --log-dir log"
    assert f"cpu ({os.cpu_count()} cores)" in compute(command, cwd=tmp_path)
    events = EventAccumulator(str(tmp_path / "log")).Reload()
    names = ["perf/data_wait", "perf/images_per_sec", "perf/seconds"]
    names += ["train/accuracy", "train/loss", "train/lr", "val/accuracy", "val/loss"]
    assert sorted(events.Tags()["scalars"]) == names
    results = evaluations(tmp_path / "log")
    assert [result["step"] for result in results] == [8, 16, 24]
    for name in names:
        logged = events.Scalars(name)
        assert [event.step for event in logged] == [8, 16, 24]
        expected = [result[name] for result in results]
        assert [event.value for event in logged] == pytest.approx(expected)
    start = start_of(tmp_path / "log")
    assert start["torch"] == torch.__version__
    assert start["config"]["epochs"] == 3
    accuracies = [result["val/accuracy"] for result in results]
    assert len(set(accuracies)) > 1
    best = torch.load(tmp_path / "log" / "best.pt", weights_only=True)
    assert best["position"]["epoch"] == 1 + accuracies.index(max(accuracies))


def test_lines_within_an_epoch(tmp_path):
    """With --log-seconds 0 each log interval is a line, an event of results.jsonl and a scalar."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    command = f"python {ROOT}/mnist/single.py --synthetic 1280 --epochs 1 --log-dir log"
    output = compute(f"{command} --log-interval 5 --log-seconds 0", cwd=tmp_path)
    assert re.findall(r"^step (\d+)/20: ", output, re.MULTILINE) == ["5", "10", "15", "20"]
    lines = map(json.loads, (tmp_path / "log" / "results.jsonl").read_text().splitlines())
    steps = [line for line in lines if line["event"] == "step"]
    assert [line["step"] for line in steps] == [5, 10, 15, 20]
    assert [line["samples"] for line in steps] == [320, 640, 960, 1280]
    assert {"train/loss", "train/accuracy", "train/lr", "perf/images_per_sec"} <= set(steps[0])
    events = EventAccumulator(str(tmp_path / "log")).Reload().Scalars("train/loss")
    # the evaluation has the step of the last line
    assert [event.step for event in events] == [5, 10, 15, 20, 20]


# an epoch of 15 steps, and one of 40
@pytest.mark.parametrize(("images", "steps"), [(960, 9), (2560, 10)])
def test_profile(images, steps, tmp_path):
    """The trace of an epoch has up to ten steps from the seventh on, with DDP's all-reduces."""
    command = strategies(2, ROOT / "mnist")["ddp_launch"]
    compute(
        f"{command} --synthetic {images} -b 32 --epochs 2 --profile --log-dir log", cwd=tmp_path
    )
    # named by the step at which its epoch begins
    traces = sorted((tmp_path / "log").glob("trace-*"))
    assert [path.name for path in traces] == ["trace-0.json.gz", f"trace-{images // 64}.json.gz"]
    events = json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert names.count("Optimizer.step#SGD.step") == steps
    assert names.count("gloo:all_reduce") >= steps


def test_nothing_is_imported_before_it_is_needed(tmp_path):
    """A run that does not use TensorBoard or torchvision does not spend time on importing them."""
    code = (
        f"import runpy, sys; sys.path[0] = '{ROOT}/cifar10'; "
        "sys.argv = ['single.py', '--synthetic', '512', '--dry-run', '--model', 'convnet']; "
        f"runpy.run_path('{ROOT}/cifar10/single.py', run_name='__main__'); "
        "print('there:', sorted({name.split('.')[0] for name in sys.modules}))"
    )
    there = run(f'python -c "{code}"', cwd=tmp_path).partition("there:")[2]
    assert "'torch'" in there
    others = "tensorboard torchvision matplotlib PIL safetensors horovod pandas scipy"
    for package in others.split():
        assert f"'{package}'" not in there


SHOW_THREADS = """

def say(word, values):
    import os

    # In one write: torchrun starts `python -u`, and the print() of two ranks could mix.
    os.write(1, f"{word} {sorted(values)}\\n".encode())


def threads():
    import contextlib, os

    names, policies = [], set()
    for task in os.listdir("/proc/self/task"):
        # It may have ended meanwhile.
        with contextlib.suppress(OSError):
            names.append(open(f"/proc/self/task/{task}/comm").read().strip())
            policies.add(os.sched_getscheduler(int(task)))
    return names, policies


"""
# Linux lists a thread that has been joined a moment longer.
AT_THE_END = """\
    while any("gloo" in name for name in threads()[0]):
        pass
    say("at the end", threads()[0])
"""


def test_gloo_threads(tmp_path):
    """They end before Python does; all threads have SCHED_BATCH (docs/cpu.md).

    A thread that drops a tensor late can abort the process: pytorch issue 190489.
    """
    last = "        dist.destroy_process_group()\n"
    before = "        say('threads', threads()[0])\n        say('policies', threads()[1])\n"
    copy = changed_copy(tmp_path, "mnist/ddp_launch.py", last, before + last)
    path = copy / "ddp_launch.py"
    text = path.read_text().replace("\n\ndef parse_args", f"{SHOW_THREADS}def parse_args")
    path.write_text(text + AT_THE_END)
    output = run(
        # chrt: tests in this process change it
        "chrt --other 0 torchrun --standalone --nproc-per-node=2 "
        f"{copy}/ddp_launch.py --dry-run --synthetic --device cpu",
        cwd=tmp_path,
    )
    lines = output.splitlines()
    assert ["gloo" in line for line in lines if line.startswith("threads ")] == [True, True]
    assert sum(line.startswith("at the end ") for line in lines) == 2
    assert output.count(f"policies [{os.SCHED_BATCH}]") == 2


def test_progress_bar_on_a_terminal_only(tmp_path):
    command = f"python {ROOT}/mnist/single.py --synthetic 2048 --epochs 1"
    assert "step/s" not in run(f"{command} --log-dir plain", cwd=tmp_path)
    shown = run(
        f"script -qec 'stty columns 100 rows 40; {command} --log-dir terminal' /dev/null",
        cwd=tmp_path,
    )
    assert "step/s" in shown
    assert "loss=" in shown


WAITING = """
import time, horovod.torch as hvd, torch
hvd.init()
hvd.allreduce(torch.ones(1))
if hvd.rank() == 1:
    time.sleep(2)
began, busy = time.monotonic(), time.thread_time()
hvd.allreduce(torch.ones(1))
if hvd.rank() == 0:
    print((time.thread_time() - busy) / (time.monotonic() - began))
"""


def test_a_rank_that_waits_leaves_its_core_to_others(tmp_path):
    """With Gloo, Horovod would poll all the time; scripts/install_horovod.sh changes it."""
    need_horovod("gloo")
    (tmp_path / "waiting.py").write_text(WAITING)
    assert float(run("horovodrun --gloo -np 2 python waiting.py", cwd=tmp_path)) < 0.2


ENDLESS = "--synthetic 640 --model lenet --device cpu --epochs 100000 --log-dir log"


def start_long_run(launcher, cwd):
    """A run of many epochs that is in its second one."""
    if launcher.startswith("hvd"):
        need_horovod(launcher)
    start = {"single": f"python {ROOT}/mnist/single.py", **strategies(2, ROOT / "mnist")}
    command = start[launcher]
    job = Job(f"exec {command} {ENDLESS}", cwd=cwd)
    job.wait_for("epoch 1/")
    return job


@pytest.mark.parametrize("launcher", ["single", *strategies(2, "")])
def test_ctrl_c(launcher, tmp_path):
    job = start_long_run(launcher, tmp_path)
    job.signal(signal.SIGINT)  # as the terminal does: to the whole process group
    status = job.finish()
    # horovodrun ends with 0 if it notices the signal before its ranks
    assert status != 0 or launcher == "hvd_gloo"
    of_a_rank = re.findall(r'File "[^"]*/(?:mnist|common)/', job.output())
    assert not of_a_rank, "no rank prints a traceback"
    # torchrun and horovodrun end with one
    tracebacks_of_its_own = {"ddp_launch": 1, "fsdp": 1, "hvd_gloo": 1}
    assert job.output().count("Traceback") <= tracebacks_of_its_own.get(launcher, 0), job.output()
    assert "leaked" not in job.output()


def test_ctrl_c_while_another_machine_is_awaited(tmp_path):
    port = free_port()
    job = Job(
        f"python {ROOT}/mnist/ddp_spawn.py -n 2 -g 2 -nr 0 --synthetic 512",
        cwd=tmp_path,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )

    def ports():
        return [known.laddr.port for known in psutil.net_connections() if known.laddr]

    # until rank 0 listens and both are connected
    wait_until(lambda: ports().count(port) >= 3, job)
    job.signal(signal.SIGINT)
    assert job.finish() == 130
    assert job.output() == ""


@pytest.mark.parametrize(
    ("launcher", "number"),
    [
        *((launcher, signal.SIGKILL) for launcher in strategies(2, "") if launcher != "fsdp"),
        ("ddp_launch", signal.SIGTERM),
        ("ddp_spawn", signal.SIGINT),
    ],
)
def test_a_launcher_that_is_ended_leaves_no_process(launcher, number, tmp_path):
    job = start_long_run(launcher, tmp_path)
    job.process.send_signal(number)  # to it alone
    # on busy cores Horovod's helpers wait 5 s twice before they end a rank
    assert job.finish() != 0


def test_ranks_end_with_a_launcher_that_ignores_ctrl_c(tmp_path):
    """As in a script's background job, where mp.spawn's processes inherit the ignored SIGINT."""
    job = Job(f"trap '' INT; exec python {ROOT}/mnist/ddp_spawn.py -g 2 {ENDLESS}", cwd=tmp_path)
    job.wait_for("epoch 1/")
    job.signal(signal.SIGINT)
    job.wait_for("epoch 3/")
    job.process.terminate()
    assert job.finish() == 0
    assert "stopped after a signal" in job.output()


@pytest.mark.parametrize("launcher", ["single", "ddp_spawn"])
def test_more_signals_until_it_has_ended(launcher, tmp_path):
    """A scheduler or a user repeats them, also while a saved run ends: it is no failed run."""
    job = start_long_run(launcher, tmp_path)
    while job.running():
        job.process.terminate()
        time.sleep(0.002)
    assert job.finish() == 0
    assert job.output().count("stopped after a signal") == 1


def test_a_signal_for_a_process_that_has_just_ended():
    """The system call says so, before multiprocessing knows it."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    process = mock.Mock(pid=ended.pid, is_alive=lambda: True)

    def join():
        signal.raise_signal(signal.SIGUSR1)
        return True

    numbers = (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        spawn.join(mock.Mock(processes=[process], join=join))
    finally:
        faulthandler.unregister(signal.SIGUSR2)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def flags_of(recipe):
    """The flags of a recipe, as --help lists them."""
    shown = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [str(recipe), "--help"]),
        contextlib.redirect_stdout(shown),
        mock.patch.object(sys, "path", [str(recipe.parent), *sys.path]),
        pytest.raises(SystemExit),
    ):
        runpy.run_path(str(recipe), run_name="recipe")["parse_args"]()
    return sorted(set(re.findall(r"(?:^  |, )(--?[a-z][\w-]*)", shown.getvalue(), re.MULTILINE)))


@pytest.mark.parametrize(
    "recipe",
    [recipe for recipe in RECIPES if recipe.name in ("ddp_launch.py", "ddp_amp.py")],
    ids=name_of,
)
def test_torchrun_leaves_the_flags_of_a_recipe_alone(recipe):
    """argparse also takes a flag behind the script for an abbreviation of its own, such as --n."""
    flags = flags_of(recipe)
    assert {"--batch-size", "--log-dir", "-b"} <= set(flags)
    parser = torch.distributed.run.get_args_parser()
    for flag in flags:
        for behind in ([flag, "1"], [f"{flag}=1"]):
            parsed = parser.parse_args(["--nproc-per-node=2", str(recipe), *behind])
            assert parsed.training_script_args == behind
    with pytest.raises(SystemExit):
        parser.parse_args([str(recipe), "--n", "1"])


def test_horovodrun_leaves_the_flags_of_a_recipe_alone(monkeypatch):
    need_horovod("gloo")
    from horovod.runner.launch import parse_args

    for recipe in [recipe for recipe in RECIPES if recipe.name == "hvd.py"]:
        for flag in flags_of(recipe):
            command = ["python", str(recipe), flag, "1"]
            monkeypatch.setattr("sys.argv", ["horovodrun", "-np", "2", *command])
            assert parse_args().command == command
