"""Each recipe, started by each command in its docstring, runs to the end and prints what it should, once."""

import contextlib
import gzip
import importlib.util
import io
import json
import os
import re
import runpy
import signal
import sys
import time
from unittest import mock

import psutil
import pytest
import torch.distributed.run
from forked import ForkedJob, compute
from launch import Job, free_port, need_horovod, run, strategies
from recipes import RECIPES, ROOT, changed_copy, commands, name_of, small

SMALL = "--synthetic 2048 --epochs 1 --batch-size 32"


def jobs():
    """(recipe, commands that make one run, how to start them): those that name a machine by -nr belong together.

    The recipes of the other data sets have the same commands (test_siblings.py), and test_copy_out.py starts each.
    """
    for recipe in sorted((ROOT / "mnist").glob("*.py")):
        lines = commands(recipe)
        together = [line for line in lines if "-nr " in line]
        groups = [[line] for line in lines if line not in together] + ([together] if together else [])
        for group in groups:
            first = group is groups[0]
            start = ForkedJob if not first and group[0].startswith(("torchrun", "horovodrun --gloo")) else Job
            yield pytest.param(recipe, group, start, id=group[-1].replace(" ", "_").replace("/", "."),
                               marks=[pytest.mark.check] * first)


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
        command = f"{line} {SMALL} {small(recipe.parent.name)} --model convnet --lr 0.005 --log-dir {tmp_path}/log"
        started.append(start(command, cwd=ROOT))
    status = [job.finish() for job in started]
    output = "".join(job.output() for job in started)
    if recipe.name == "apex_amp.py" and not apex_there():
        assert status == [1], output  # torchrun's own status for a worker that failed
        assert "from apex import amp" in output or "Apex needs a GPU" in output
        return
    assert status == [0] * len(group), output
    first = next(line for line in output.splitlines() if line.startswith(recipe.parent.name))
    names = {"--gloo": "Horovod, Gloo", "horovodrun": "Horovod, (MPI|Gloo)",  # it takes MPI if there is one
             "mpirun": "Horovod, MPI", "spawn.py": r"DDP, mp\.spawn", "ddp_amp.py": r"DDP \+ torch\.amp, torchrun",
             "fsdp.py": "FSDP, torchrun", "apex_amp.py": "Apex O., torchrun", "torch": "DDP, torchrun",
             "dp.py": "DataParallel, [0-9]+ GPUs", "single.py": "one device"}
    strategy = next(names[part] for part in names if part in group[0])
    world_size = 1 if recipe.name in ("single.py", "dp.py") else 2
    assert re.match(f"{recipe.parent.name}: {strategy} \\| world size {world_size} \\|", first), first
    assert f"batch 32 per process, {32 * world_size} global | lr 0.0" in first, first
    assert len(re.findall(r"^\w+: .*world size", output, re.MULTILINE)) == 1, "only one process may print it"
    assert len(re.findall(r"^epoch 1/1: loss [\d.]+ acc [\d.]+% \| val loss [\d.]+ acc [\d.]+% \| [\d,]+ images/s \| "
                          r"\d+% data wait$", output, re.MULTILINE)) == 1, output
    results = json.loads((tmp_path / "log" / "results.json").read_text())
    assert results["world_size"] == world_size
    assert results["epochs"][0]["train"]["images"] == 2048
    assert results["epochs"][0]["val"]["images"] == 2048 // 5
    assert results["epochs"][0]["train"]["accuracy"] > 0.3, "chance is 0.1"
    assert (tmp_path / "log" / "last.pt").exists()


def test_underscores_and_scaling(tmp_path):
    output = compute(f"python {ROOT}/mnist/ddp_spawn.py -g 2 --synthetic 512 --batch_size 32 --scale_lr sqrt --lr 0.1 "
                 "--dry_run", cwd=tmp_path)
    assert "batch 32 per process, 64 global | lr 0.141421" in output
    assert not (tmp_path / "runs").exists(), "--dry-run leaves no files"


def test_tensorboard_has_the_scalars(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    compute(f"python {ROOT}/mnist/single.py --synthetic 512 --epochs 3 --log-dir log", cwd=tmp_path)
    events = EventAccumulator(str(tmp_path / "log")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["lr", "perf/images_per_sec", "train/accuracy", "train/loss",
                                                "val/accuracy", "val/loss"]
    results = json.loads((tmp_path / "log" / "results.json").read_text())
    logged = [event.value for event in events.Scalars("val/loss")]
    assert logged == pytest.approx([epoch["val"]["loss"] for epoch in results["epochs"]])
    assert results["torch"] == torch.__version__
    assert results["arguments"]["epochs"] == 3
    accuracies = [epoch["val"]["accuracy"] for epoch in results["epochs"]]
    assert len(set(accuracies)) > 1
    best = torch.load(tmp_path / "log" / "best.pt", weights_only=True)
    assert best["epoch"] == 1 + accuracies.index(max(accuracies))
    assert str(os.cpu_count()) in results["device"]


@pytest.mark.parametrize(("images", "steps"), [(960, 9), (2560, 10)])  # an epoch of 15 steps, and one of 40
def test_profile(images, steps, tmp_path):
    """The trace has the steps from the seventh on, up to ten of the first epoch, with DDP's all-reduces."""
    command = strategies(2, ROOT / "mnist")["ddp_launch"]
    compute(f"{command} --synthetic {images} -b 32 --epochs 2 --profile --log-dir log", cwd=tmp_path)
    trace, = (tmp_path / "log").glob("trace-*.json.gz")
    assert trace.name == "trace-epoch-0001.json.gz"
    names = [event.get("name", "") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]]
    assert names.count("Optimizer.step#SGD.step") == steps
    assert names.count("gloo:all_reduce") >= steps


def test_nothing_is_imported_before_it_is_needed(tmp_path):
    """A run that does not use TensorBoard or torchvision does not spend time on importing them."""
    code = (f"import runpy, sys; sys.argv = ['single.py', '--synthetic', '512', '--dry-run', '--model', 'convnet']; "
            f"sys.path[0] = '{ROOT}/cifar10'; runpy.run_path('{ROOT}/cifar10/single.py', run_name='__main__'); "
            "print('there:', sorted({name.split('.')[0] for name in sys.modules}))")
    there = run(f'python -c "{code}"', cwd=tmp_path).partition("there:")[2]
    assert "'torch'" in there
    for package in ("tensorboard", "torchvision", "matplotlib", "PIL", "safetensors", "horovod", "pandas", "scipy"):
        assert f"'{package}'" not in there


def printed(expression):
    """Code that prints a line in one write: torchrun starts `python -u`, and two ranks' print() could mix."""
    return f"import os; os.write(1, ({expression} + '\\n').encode())"


THREADS = "'threads ' + str([open(f'/proc/self/task/{task}/comm').read() for task in os.listdir('/proc/self/task')])"
POLICIES = "'policies ' + str({os.sched_getscheduler(int(thread)) for thread in os.listdir('/proc/self/task')})"


def test_gloo_threads(tmp_path):
    """They end before Python does, as one that drops a tensor late can abort the process: pytorch issue 190489.

    All threads have SCHED_BATCH (docs/cpu.md).
    """
    last = "    dist.destroy_process_group()"
    copy = changed_copy(tmp_path, "mnist/ddp_launch.py", last,
                        f"    {printed(THREADS)}\n    {printed(POLICIES)}\n{last}")
    path = copy / "ddp_launch.py"  # at the end: Linux lists a thread that has just been joined a moment longer
    path.write_text(f"{path.read_text()}    __import__('time').sleep(0.1)\n    {printed(THREADS)}\n")
    output = run("chrt --other 0 torchrun --standalone --nproc-per-node=2 "  # chrt: tests in this process change it
                 f"{copy}/ddp_launch.py --dry-run --synthetic --device cpu", cwd=tmp_path)
    assert ["gloo" in line for line in output.splitlines() if line.startswith("threads")].count(True) == 2
    assert output.count("threads") == 4
    assert output.count(f"policies {{{os.SCHED_BATCH}}}") == 2


def test_progress_bar_on_a_terminal_only(tmp_path):
    command = f"python {ROOT}/mnist/single.py --synthetic 2048 --epochs 1"
    assert "batch/s" not in run(f"{command} --log-dir plain", cwd=tmp_path)
    shown = run(f"script -qec 'stty columns 100 rows 40; {command} --log-dir terminal' /dev/null", cwd=tmp_path)
    assert "batch/s" in shown
    assert "loss=" in shown


WAITING = """
import time, horovod.torch as hvd, torch
hvd.init()
hvd.allreduce(torch.ones(1))
if hvd.rank() == 1:
    time.sleep(2)
began = time.thread_time()
hvd.allreduce(torch.ones(1))
if hvd.rank() == 0:
    print(time.thread_time() - began)
"""


def test_a_rank_that_waits_leaves_its_core_to_others(tmp_path):
    """scripts/install_horovod.sh changes this: with Gloo, Horovod would poll for these two seconds."""
    need_horovod("gloo")
    (tmp_path / "waiting.py").write_text(WAITING)
    assert float(run("horovodrun --gloo -np 2 python waiting.py", cwd=tmp_path)) < 0.5


def start_long_run(launcher, cwd):
    """A run of many epochs that is in its second one."""
    if launcher.startswith("hvd"):
        need_horovod(launcher)
    command = {"single": f"python {ROOT}/mnist/single.py", **strategies(2, ROOT / "mnist")}[launcher]
    job = Job(f"exec {command} --synthetic 2560 --epochs 2000 --log-dir log", cwd=cwd)
    job.wait_for("epoch 1/")
    time.sleep(0.2)
    return job


@pytest.mark.parametrize("launcher", ["single", *strategies(2, "")])
def test_ctrl_c(launcher, tmp_path):
    job = start_long_run(launcher, tmp_path)
    job.signal(signal.SIGINT)  # as the terminal does: to the whole process group
    status = job.finish(timeout=30)
    assert status != 0 or launcher == "hvd_gloo"  # horovodrun ends with 0 if it notices the signal before its ranks
    assert not re.findall(r'File "[^"]*/(?:mnist|common)/', job.output()), "no rank prints a traceback"
    tracebacks_of_its_own = {"ddp_launch": 1, "fsdp": 1, "hvd_gloo": 1}  # torchrun and horovodrun end with one
    assert job.output().count("Traceback") <= tracebacks_of_its_own.get(launcher, 0), job.output()
    assert "leaked" not in job.output()


def test_ctrl_c_while_another_machine_is_awaited(tmp_path):
    port = free_port()
    job = Job(f"python {ROOT}/mnist/ddp_spawn.py -n 2 -g 2 -nr 0 --synthetic 512", cwd=tmp_path,
              MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    end = time.monotonic() + 90  # until rank 0 listens and both are connected
    while [connection.laddr.port for connection in psutil.net_connections() if connection.laddr].count(port) < 3:
        assert time.monotonic() < end and job.process.poll() is None, job.output()
        time.sleep(0.1)
    job.signal(signal.SIGINT)
    assert job.finish(timeout=10) == 130
    assert job.output() == ""


@pytest.mark.parametrize(("launcher", "number"), [*((launcher, signal.SIGKILL) for launcher in strategies(2, "")),
                                                  ("ddp_launch", signal.SIGTERM), ("ddp_spawn", signal.SIGINT)])
def test_a_launcher_that_is_ended_leaves_no_process(launcher, number, tmp_path):
    job = start_long_run(launcher, tmp_path)
    job.process.send_signal(number)  # to it alone
    # on busy cores Horovod's helpers wait 5 s twice before they end a rank
    assert job.finish(timeout=30, grace=15 if launcher == "hvd_gloo" else 10) != 0


def test_ranks_end_with_a_launcher_that_ignores_ctrl_c(tmp_path):
    """As in a script's background job, where mp.spawn's processes inherit the ignored SIGINT."""
    command = f"python {ROOT}/mnist/ddp_spawn.py -g 2 --synthetic 2560 --epochs 2000 --log-dir log"
    job = Job(f"trap '' INT; exec {command}", cwd=tmp_path)
    job.wait_for("epoch 1/")
    job.signal(signal.SIGINT)
    job.wait_for("epoch 3/")
    job.process.terminate()
    assert job.finish(timeout=30) == 0
    assert "stopped after a signal" in job.output()


def flags_of(recipe):
    """The flags of a recipe, with - and with _ between the words, as --help lists them."""
    shown = io.StringIO()
    with (mock.patch.object(sys, "argv", [str(recipe), "--help"]), contextlib.redirect_stdout(shown),
          mock.patch.object(sys, "path", [str(recipe.parent), *sys.path]), pytest.raises(SystemExit)):
        runpy.run_path(str(recipe), run_name="recipe")["parse_args"]()
    listed = set(re.findall(r"(?:^  |, )(--?[a-z][\w-]*)", shown.getvalue(), re.MULTILINE))
    return sorted(listed | {f"--{flag[2:].replace('-', '_')}" for flag in listed if flag.startswith("--")})


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe.name in ("ddp_launch.py", "ddp_amp.py")],
                         ids=name_of)
def test_torchrun_leaves_the_flags_of_a_recipe_alone(recipe):
    """argparse also takes a flag after the script for an abbreviation of its own (--n, --monitor)."""
    flags = flags_of(recipe)
    assert {"--batch-size", "--batch_size", "-b"} <= set(flags)
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
