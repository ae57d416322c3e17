"""Each recipe, started by each command in its docstring, runs to its end and prints a line once."""

import importlib.util
import os
import re

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
)
from recipes import RECIPES, ROOT, changed_copy, commands, name_of

MPIRUN = "mpirun -np 2 --bind-to none --map-by slot"
# These start as a user starts them: how many processes load the recipe, and how many are ranks. The
# other commands are forked, although a forked process has more modules than a recipe imports.
REAL = {
    "python mnist/single.py": (1, 0),
    # The one that starts the ranks ends as Python does.
    "python mnist/ddp_spawn.py -g 2": (3, 2),
    "torchrun --nproc-per-node=2 mnist/ddp_launch.py": (2, 2),
    "python -m torch.distributed.launch --nproc-per-node=2 mnist/ddp_launch.py": (2, 2),
    "horovodrun -np 2 python mnist/hvd.py": (2, 2),
    # Horovod has it only with MPI.
    f"{MPIRUN} python mnist/hvd.py --use-adasum": (2, 2),
}
# A rate for small batches of generated images.
FLAGS = "--synthetic 1024 --epochs 1 --batch-size 32 --model convnet --lr 0.005"


def groups():
    """The commands that make one run, in the docstrings of mnist/ with its recipe.

    Those that name a machine by -nr belong together. The recipes of the other data sets have the
    same commands (test_siblings.py), and test_copy_out.py starts each.
    """
    for recipe in [recipe for recipe in RECIPES if recipe.parent.name == "mnist"]:
        lines = commands(recipe)
        together = [line for line in lines if "-nr " in line]
        alone = [[line] for line in lines if line not in together]
        for group in [*alone, together] if together else alone:
            yield recipe, group


def cases(real):
    """The groups that are started really, or those that are forked."""
    return [
        pytest.param(
            recipe,
            group,
            id=group[-1].replace(" ", "_").replace("/", "."),
            marks=[pytest.mark.check] * (recipe.name != "hvd.py"),
        )
        for recipe, group in groups()
        if (group[0] in REAL) == real
    ]


def apex_there():
    return torch.cuda.device_count() >= 2 and importlib.util.find_spec("apex") is not None


def trained(group, start, cwd, log_dir):
    """The statuses and the output of the commands of one run."""
    if "hvd.py" in group[0]:
        need_horovod(*group)
    port = str(free_port())
    jobs = []
    for line in group:
        # Each test has a port of its own.
        line = line.replace("29500", port)
        line = re.sub(r"(torchrun|torch\.distributed\.launch) ", rf"\1 --master-port={port} ", line)
        jobs.append(start(f"{line} {FLAGS} --log-dir {log_dir}", cwd))
    return [job.finish() for job in jobs], "".join(job.output() for job in jobs)


# The strategy that a recipe prints, by a part of its command: the first that is there.
STRATEGIES = {
    "--gloo": "Horovod, Gloo",
    "horovodrun": "Horovod, (MPI|Gloo)",  # it takes MPI if there is one
    "mpirun": "Horovod, MPI",
    "spawn.py": r"DDP, mp\.spawn",
    "ddp_amp.py": r"DDP \+ torch\.amp",
    "fsdp.py": "FSDP",
    "apex_amp.py": "Apex O.",
    "torch": "DDP",
    "dp.py": r"DataParallel, (no GPU|\d+ GPU\(s\) with [\d.]+ images each)",
    "single.py": "one device",
}


def check_run(recipe, command, output, log_dir):
    """It prints each line once, learns, and saves."""
    strategy = next(name for part, name in STRATEGIES.items() if part in command)
    world_size = 1 if recipe.name in ("single.py", "dp.py") else 2
    starts = re.findall(r"^\w+: .*world size .*", output, re.MULTILINE)
    assert len(starts) == 1, output
    assert re.match(rf"mnist: {strategy} \| world size {world_size} \|", starts[0]), output
    assert f"batch 32 per process, {32 * world_size} global | lr 0.0" in starts[0], output
    result = r"loss [\d.]+ acc [\d.]+%"
    speed = r"[\d,]+ samples/s \| \d+% data wait \| after 0:\d\d:\d\d"
    # In fp16 there may be steps that were skipped.
    line = rf"^epoch 1/1: train {result}(?: skipped \d+)? \| val {result} \| {speed}$"
    assert len(re.findall(line, output, re.MULTILINE)) == 1, output
    (result,) = evaluations(log_dir)
    assert result["epoch"] == 1
    assert result["step"] * 32 * world_size == 1024
    assert result["train/accuracy"] > 0.3, "chance is 0.1"
    saved = checkpoint(log_dir)
    assert saved["config"]["saved_by"].endswith(f"world size {world_size}")
    assert saved["position"]["steps"] == result["step"]


WITNESSES = """
import atexit, os, threading, time


class Witness:
    def __del__(self, write=os.write):
        write(1, b"destructor\\n")


def late():
    threading.main_thread().join()
    time.sleep(0.1)
    os.write(1, b"thread\\n")


witness = Witness()
atexit.register(os.write, 1, b"exit handler\\n")
threading.Thread(target=late).start()
"""


@pytest.mark.parametrize(("recipe", "group"), cases(real=True))
def test_real_command(recipe, group, tmp_path):
    """A rank ends without destructors.

    It waits for threads and exit handlers; then a late thread of Gloo cannot abort it.
    """
    before = "\n\ndef parse_args"
    changed_copy(tmp_path, name_of(recipe), before, f"{WITNESSES}{before}")
    status, output = trained(group, Job, tmp_path, tmp_path / "log")
    assert status == [0], output
    check_run(recipe, group[0], output, tmp_path / "log")
    processes, ranks = REAL[group[0]]
    assert output.count("thread\n") == processes
    assert output.count("exit handler\n") == processes
    assert output.count("destructor\n") == processes - ranks
    assert not (tmp_path / "log" / ".in-use").exists()


@pytest.mark.parametrize(("recipe", "group"), cases(real=False))
def test_forked_command(recipe, group, tmp_path):
    group = [line.replace(MPIRUN, "horovodrun --gloo -np 2") for line in group]
    status, output = trained(group, ForkedJob, ROOT, tmp_path)
    if recipe.name == "apex_amp.py" and not apex_there():
        assert status == [1], output  # torchrun's own status for a worker that failed
        assert "Apex with amp is not installed" in output or "Apex needs a GPU" in output
        return
    assert status == [0] * len(group), output
    check_run(recipe, group[0], output, tmp_path)


def test_scaling(tmp_path):
    output = compute(
        f"python {ROOT}/mnist/ddp_spawn.py -g 2 --synthetic 512 --batch-size 32 --scale-lr sqrt "
        "--lr 0.1 --dry-run",
        cwd=tmp_path,
    )
    assert "batch 32 per process, 64 global | lr 0.141421" in output
    assert not (tmp_path / "runs").exists(), "--dry-run leaves no files"


def test_nothing_is_imported_before_it_is_needed(tmp_path):
    """A run that does not use TensorBoard or torchvision does not spend time on importing them."""
    code = (
        "import runpy, sys; "
        "sys.argv = ['single.py', '--synthetic', '512', '--dry-run', '--model', 'convnet']; "
        f"runpy.run_path('{ROOT}/cifar10/single.py', run_name='__main__'); "
        "print('there:', sorted({name.split('.')[0] for name in sys.modules}))"
    )
    there = run(f'python -c "{code}"', cwd=tmp_path).partition("there:")[2]
    assert "'torch'" in there
    others = "tensorboard torchvision matplotlib PIL safetensors horovod pandas scipy"
    for package in others.split():
        assert f"'{package}'" not in there


SHOW_POLICIES = """\
        import contextlib, os

        policies = set()
        for task in os.listdir("/proc/self/task"):
            # It may have ended meanwhile.
            with contextlib.suppress(OSError):
                policies.add(os.sched_getscheduler(int(task)))
        # In one write: the lines of two ranks could mix.
        os.write(1, f"policies {policies}\\n".encode())
"""


def test_all_threads_have_the_policy_batch(tmp_path):
    """SCHED_BATCH, see docs/cpu.md."""
    last = "        dist.destroy_process_group()\n"
    copy = changed_copy(tmp_path, "mnist/ddp_launch.py", last, SHOW_POLICIES + last)
    path = copy / "ddp_launch.py"
    # Tests in this process change its policy, which a forked one inherits.
    other = "import os; os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))\n"
    path.write_text(path.read_text().replace("import sys\n", f"import sys\n{other}", 1))
    flags = "--dry-run --synthetic --model lenet --device cpu"
    output = compute(f"torchrun --nproc-per-node=2 {path} {flags}", tmp_path)
    assert output.count(f"policies {{{os.SCHED_BATCH}}}") == 2


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
    assert float(compute("horovodrun --gloo -np 2 python waiting.py", tmp_path)) < 0.2
