"""Faults of a job on a cluster: no rank hangs, and the run continues where it was."""

import os
import random
import re
import signal
import time

import pytest
import torch
from cluster import MPI_INIT_CAN_CRASH, SlurmJob
from forked import compute
from launch import (
    assert_same,
    checkpoint,
    evaluations,
    largest_difference,
    need_horovod,
    place,
    random_seed,
)
from recipes import ROOT, STEP, changed_copy, in_float64

# Six epochs of 10 steps on two processes, and a checkpoint every 3 steps. A copy of the recipe
# prints its position, and from the epoch on that is written in a file it waits in each step: the
# fault comes while it waits, and the test decides when it goes on. It also goes on when one rank is
# told to stop. With DEFAULT_MODEL=1 in the environment the model is ResNet-18.
if os.environ.get("DEFAULT_MODEL"):
    DATASET, BATCH, MODEL = "cifar10", 2, "--lr 0.001"
else:
    DATASET, BATCH, MODEL = "mnist", 32, "-a lenet"
DDP = f"{DATASET}/ddp_launch.py"
HVD = f"{DATASET}/hvd.py"
IMAGES = 20 * BATCH
INTERVAL = 5
EPOCHS = 6
SIZE = (
    f"--synthetic {IMAGES} --batch-size {BATCH} {MODEL} --epochs {EPOCHS} --checkpoint-every 3 "
    f"--device cpu --log-interval {INTERVAL}"
)
# The line in one write: two ranks' lines would mix.
WAITS = """\
        import os, time

        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        line = f"at {position.epoch} {position.samples} {run.stop.requested}\\n"
        os.write(1, line.encode())
        told = f"told-{position.epoch}-{position.samples}"
        while position.epoch >= int(open("wait-from").read()) and not os.path.exists(told):
            if run.stop.requested:
                open(told, "w").close()
            time.sleep(0.02)
"""


def wait_from(folder, epoch):
    """Let the ranks of a job in `folder` wait from this epoch on, and go on until it."""
    (folder / "new").write_text(str(epoch))
    (folder / "new").rename(folder / "wait-from")


def go_on(job):
    """Let them go on to the end of the run."""
    wait_from(job.folder, EPOCHS)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of an undisturbed run on two processes.

    Only on two processes does a resumed run end with the same bits. On more, DDP sums the gradients
    of the first step after a start in another order, as it rebuilds its buckets after that step
    (unless find_unused_parameters=True).
    """
    folder = tmp_path_factory.mktemp("undisturbed")
    compute(
        f"torchrun --standalone --nproc-per-node=2 {ROOT}/{DDP} {SIZE} --log-dir log", cwd=folder
    )
    return folder / "log"


@pytest.fixture
def waiting_job(cluster, tmp_path):
    """A function that starts the copy on two nodes, and returns once it may wait."""
    started = []

    def start(flags="", sbatch="", file="slurm/ddp_2nodes.sh", recipe=DDP, epoch=2, **environment):
        if not started:
            changed_copy(tmp_path, recipe, STEP, WAITS + STEP)
        wait_from(tmp_path, epoch)
        job = SlurmJob(
            cluster,
            tmp_path,
            f"--nodes=2 --gpus-per-node=1 --cpus-per-task=1 {sbatch} {file} {recipe} "
            f"{SIZE} {flags}",
            **environment,
        )
        started.append(job)
        job.wait_for("^at [2-9] ")
        return job

    yield start
    for job in started:
        cluster.run(f"scancel {job.id}")


def is_whole(folder, undisturbed):
    """The same bits, and each epoch has one evaluation, with the figures of an undisturbed run."""
    assert_same(checkpoint(folder)["model"], checkpoint(undisturbed)["model"])
    figures = [
        [
            [line[name] for name in ("epoch", "step", "train/accuracy", "val/accuracy")]
            for line in lines
        ]
        for lines in (evaluations(folder), evaluations(undisturbed))
    ]
    assert figures[0] == figures[1]
    assert [line[0] for line in figures[0]] == list(range(1, EPOCHS + 1))


def test_worker_killed(waiting_job, cluster):
    job = waiting_job(sbatch="--gpus-per-node=2")
    cluster.run(f"scancel --signal=USR2 {job.id}")
    job.wait_for("Current thread", count=4)  # each rank prints its stack, and continues
    wait_from(job.folder, 4)
    job.wait_for("^epoch 4/")
    job.ranks("node2")[-1].kill()
    log = job.finish("FAILED")
    # Each torchrun says what it saw first.
    first = r"host +: node2\n +rank +: [23] .*\n +exitcode +: -9 "
    assert any(re.search(first, cause) for cause in log.split("Root Cause")[1:]), log


def test_worker_killed_and_restarted(waiting_job, undisturbed):
    job = waiting_job(RESTARTS="2")
    job.ranks("node2")[-1].kill()
    job.wait_for("^resumed from")
    go_on(job)
    job.finish()
    is_whole(job.runs(), undisturbed)


def test_link_down_for_8_seconds(waiting_job, cluster, undisturbed):
    job = waiting_job()
    cluster.run("ip link set link-node2 down")
    go_on(job)
    cluster.run("sleep 8; ip link set link-node2 up")
    assert "resumed" not in job.finish()
    is_whole(job.runs(), undisturbed)


def test_link_down_for_longer_than_the_timeout(waiting_job, cluster, undisturbed):
    job = waiting_job("--timeout 20", RESTARTS="2")
    cluster.run("ip link set link-node2 down")
    go_on(job)
    job.wait_for(r"Timeout \(0:00:20\)!")
    cluster.run("ip link set link-node2 up")
    job.wait_for("^resumed from")
    job.finish()
    is_whole(job.runs(), undisturbed)


def test_node_down(waiting_job, cluster, undisturbed):
    job = waiting_job()
    # It comes back when SLURM looks at it again.
    cluster.run("scontrol update nodename=node2 state=down reason=test")
    job.wait_for("^resumed from")
    go_on(job)
    job.finish()
    assert job.shown("Restarts") == {"1"}
    is_whole(job.runs(), undisturbed)


def test_a_node_goes_and_comes_back(cluster, tmp_path):
    """Elastic: with the global batch fixed, the weights are those of one process.

    The job has more tasks than torchruns, and inherits the binding of a job that submitted it.
    """
    in_float64(tmp_path, "mnist", "ddp_launch.py", STEP, WAITS + STEP)
    wait_from(tmp_path, 2)
    flags = (
        f"--synthetic 640 --model lenet --epochs {EPOCHS} --device cpu "
        f"--log-interval {INTERVAL} -G 64"
    )
    job = SlurmJob(
        cluster,
        tmp_path,
        "--gpus-per-node=2 --cpus-per-task=2 --ntasks-per-node=2 slurm/ddp_elastic.sh "
        f"mnist/ddp_launch.py "
        f"{flags} --checkpoint-every 3",
        SLURM_CPU_BIND="quiet,mask_cpu:0x1",
    )
    job.wait_for(r"world size 4 (.*\n)*?at 2 ")
    assert job.shown("NodeList") == {"node1", "node2"}
    cluster.run(
        f"scontrol update nodename=node2 state=drain reason=test; scontrol requeue {job.id}_1"
    )
    job.wait_for(r"^mnist: .* world size 2 ")
    cluster.run("scontrol update nodename=node2 state=resume")
    job.wait_for(r"^mnist: .* world size 4 ", count=2)
    go_on(job)
    log = job.finish()
    assert re.findall(r"^mnist: .* world size (\d)", log, re.MULTILINE) == ["4", "2", "4"], log
    compute(f"python mnist/single.py {flags} --log-dir one", cwd=tmp_path)
    folder = tmp_path / "runs" / f"ddp-elastic-{job.id}"
    saved = checkpoint(folder)
    elastic = evaluations(folder)
    steps = [(line["epoch"], line["step"]) for line in elastic]
    assert steps == [(epoch, 10 * epoch) for epoch in range(1, EPOCHS + 1)]
    # The means of all epochs, also of those with a restart, are over each image once.
    losses = [line["train/loss"] for line in elastic]
    one = [line["train/loss"] for line in evaluations(tmp_path / "one")]
    assert losses == pytest.approx(one, rel=1e-5)
    assert largest_difference(saved["model"], checkpoint(tmp_path / "one")["model"]) < 1e-5


def stopped_at(log):
    """The epoch and the sample at which the last warned run in a log stopped.

    It must be soon after the warning.
    """
    before, after = log.rsplit("stopped after a signal at epoch ", 1)
    epoch, sample = map(int, re.match(r"(\d+), sample (\d+)", after).groups())
    steps = re.findall(
        r"^at (\d+) (\d+) (True|False)$", before.split("world size")[-1], re.MULTILINE
    )
    stopped = (epoch - 1) * IMAGES + sample
    samples = [
        int(epoch) * IMAGES + int(sample) for epoch, sample, warned in steps if warned == "True"
    ]
    # There is none if no rank went on.
    first_warned = min(samples, default=stopped)
    assert stopped <= first_warned + INTERVAL * 2 * BATCH
    return epoch, sample


def test_time_limit(waiting_job, cluster, undisturbed):
    """SLURM's own warning, 60 to 90 s before the time limit. Then the limit is raised."""
    job = waiting_job(sbatch="--time=4")
    job.wait_for("^stopped after a signal")
    epoch, sample = stopped_at(job.log())
    job.wait_for(rf"^resumed from .* at epoch {epoch}, sample {sample} ")
    cluster.run(f"scontrol update jobid={job.id} timelimit=30")
    go_on(job)
    job.finish()
    assert job.shown("Restarts") == {"1"}
    is_whole(job.runs(), undisturbed)


MOMENTS = int(os.environ.get("MOMENTS", 1))  # at which a job is told to stop


@pytest.mark.timeout(1500 + 60 * MOMENTS)
@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_told_to_stop(launcher, waiting_job, cluster, undisturbed, tmp_path):
    """SIGTERM to all processes of a job, as when it is preempted (test_preempted: under torchrun).

    Others go on.
    """
    if launcher == "mpirun":
        need_horovod("mpi")
    how = {
        "srun": {"file": "slurm/ddp_srun_2nodes.sh"},
        "mpirun": {"file": "slurm/hvd_2nodes.sh", "recipe": HVD},
    }[launcher]
    how |= {"flags": "--log-dir told", "sbatch": "--ntasks-per-node=1"}
    draw = random.Random(random_seed())
    for _ in range(MOMENTS):
        job = waiting_job(**how, epoch=EPOCHS - 1, STEP_SECONDS="0.05")
        time.sleep(draw.uniform(0, 1))
        cluster.run(f"scancel --signal=TERM {job.id}")
        job.wait_for("^stopped after a signal")
        if launcher == "srun":
            job.finish()
        else:  # mpirun takes minutes to notice that its daemon on node2 ended, and then fails
            cluster.run(f"scancel {job.id}")
        epoch, sample = stopped_at(job.log())
        saved = checkpoint(tmp_path / "told")
        assert place(saved) == (epoch - 1, sample)
    waiting_job(**how, epoch=EPOCHS).finish()
    is_whole(tmp_path / "told", undisturbed)


PREEMPTIONS = int(os.environ.get("PREEMPTIONS", 2))
# Seconds from one to the next.
EVERY = int(os.environ.get("EVERY", 2))


@pytest.mark.timeout(1500 + 60 * PREEMPTIONS)
def test_preempted(waiting_job, cluster, undisturbed):
    """A job that needs both nodes comes again and again; MAX_REQUEUES is not about that."""
    began = time.monotonic()
    # All steps take longer than all pauses: most preemptions come while it trains.
    step = 1.6 * PREEMPTIONS * EVERY / (10 * EPOCHS)
    job = waiting_job(
        sbatch="--time=30", epoch=EPOCHS - 1, STEP_SECONDS=str(step), MAX_REQUEUES="0"
    )
    for number in range(1, PREEMPTIONS + 1):
        time.sleep(EVERY)
        cluster.run(
            "sbatch --wait --partition=urgent --nodes=2 --exclusive --wrap='sleep 1' "
            "--output=/dev/null"
        )
        # And has made a step: before it, SIGTERM ends a rank at once.
        job.wait_for(r"^resumed from .*\n(.*\n)*?at ", count=number)
    go_on(job)
    log = job.finish()
    print(
        f"{PREEMPTIONS} preemptions, {10 * EPOCHS} steps of at least {step:.1f} s: "
        f"{time.monotonic() - began:.0f} s"
    )
    assert (
        log.count("ddp: preempted, and queued again")
        == log.count("stopped after a signal")
        == PREEMPTIONS
    )
    is_whole(job.runs(), undisturbed)


def test_fsdp_preempted(cluster, tmp_path):
    """Two nodes write their shards to one folder.

    The job goes on from them, and ends as an undisturbed one.
    """
    changed_copy(tmp_path, "imagenet/fsdp.py", STEP, WAITS + STEP)
    wait_from(tmp_path, 1)
    flags = (
        "--arch convnet --image-size 32 --synthetic 96 -b 8 --epochs 3 --lr 0.001 --device "
        "cpu --log-interval 1"
    )
    job = SlurmJob(
        cluster,
        tmp_path,
        "--nodes=2 --gpus-per-node=1 --cpus-per-task=1 slurm/ddp_2nodes.sh "
        f"imagenet/fsdp.py {flags} --sharded-checkpoint",
    )
    job.wait_for("^at 1 ")
    cluster.run(
        "sbatch --wait --partition=urgent --nodes=2 --exclusive --wrap='sleep 1' --output=/dev/null"
    )
    job.wait_for("^resumed from")
    go_on(job)
    assert job.finish().count("resumed from") == 1
    compute(
        f"torchrun --standalone --nproc-per-node=2 imagenet/fsdp.py {flags} --log-dir log",
        tmp_path,
    )
    compute(f"python {ROOT}/scripts/unshard.py {job.runs()}/last.pt whole.pt", tmp_path)
    saved = torch.load(tmp_path / "whole.pt", weights_only=True)
    undisturbed = checkpoint(tmp_path / "log")
    assert_same(saved["model"], undisturbed["model"])
    assert_same(saved["optimizer"], undisturbed["optimizer"])


STARTS = {
    "single": "--cpus-per-task=1 slurm/single.sh mnist/single.py",
    "ddp": "--cpus-per-task=1 slurm/ddp_2nodes.sh mnist/ddp_launch.py",
    "ddp spawn": "--cpus-per-task=1 slurm/ddp_spawn_2nodes.sh mnist/ddp_spawn.py",
    "hvd mpirun": "--cpus-per-task=1 slurm/hvd_2nodes.sh mnist/hvd.py",
}


@pytest.mark.parametrize("name", STARTS)
def test_signals_while_python_starts(name, cluster, tmp_path):
    """USR2 (stacks) ends no rank; USR1 (the warning) stops the run later, and queues it again."""
    if "hvd" in name:
        need_horovod("mpi")
    one = "" if name == "single" else "--nodes=2 --ntasks-per-node=1"
    flags = "--synthetic 640 --model lenet --device cpu --epochs 1000000"
    job = SlurmJob(
        cluster,
        tmp_path,
        f"--gpus-per-node=1 {one} {STARTS[name]} {flags}",
        LAUNCHER=name.split()[-1],
    )
    while not job.ranks("node1") + job.ranks("node2"):
        time.sleep(0.02)
    cluster.run(f"scancel --batch --signal=USR1 {job.id}")
    # Until then at any moment, also while mp.spawn's processes load torch.
    while "stopped after a signal" not in job.log():
        assert job.shown("JobState") == {"RUNNING"}, job.log()
        cluster.run(f"scancel --signal=USR2 {job.id} || true")
    job.wait_for("queued again, 1 of 10")
    # It may start again before it is cancelled.
    before, _, _ = job.log().partition("queued again")
    cluster.run(f"scancel {job.id}")
    job.finish("CANCELLED")
    assert before.count("stopped after a signal") == 1
    assert "Terminated" not in before and "User defined signal" not in before


def test_signals_to_a_launcher_without_handlers(cluster, tmp_path):
    """They end no launcher that has no handlers yet, or none any more, as mpirun at its end."""
    (tmp_path / "launcher.py").write_text(
        "import os, signal, time\n"
        "print('starts', flush=True)\n"
        "while not os.path.exists('go-on'):\n"
        "    time.sleep(0.1)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
        "signal.sigwait([signal.SIGUSR1])\n"
    )
    command = "exec slurm/requeue.sh python launcher.py"
    job = SlurmJob(cluster, tmp_path, f"--requeue --open-mode=append --wrap '{command}'")
    job.wait_for("starts")
    for name in ("USR2", "USR1"):
        cluster.run(f"scancel --batch --signal={name} {job.id}")
    (tmp_path / "go-on").touch()
    job.wait_for("^wrap: queued again, 1 of 10")
    cluster.run(f"scancel {job.id}")
    job.finish("CANCELLED")


def test_a_job_that_may_not_be_queued_again(waiting_job, cluster):
    """It says so, and why, and not "queued again"."""
    job = waiting_job(sbatch="--no-requeue")
    cluster.run(f"scancel --batch --signal=USR1 {job.id}")
    log = job.finish()
    assert "ddp: not queued again, as scontrol says 'Requested operation is presently" in log
    assert "(--no-requeue?): submit it again" in log
    assert "queued again, 1 of" not in log


def test_as_many_requeues_as_it_says(waiting_job, cluster, undisturbed):
    """With MAX_REQUEUES=1 the second warning ends the job.

    Another job resumes and completes the run.
    """
    job = waiting_job(MAX_REQUEUES="1")
    cluster.run(f"scancel --batch --signal=USR1 {job.id}")
    job.wait_for("^ddp: queued again, 1 of 1")
    # It waits in its first step. A run hears a warning from the end of that step on.
    job.wait_for("^at 2 64 ")
    (job.folder / "told-2-64").touch()
    job.wait_for("^at 2 128 ")
    cluster.run(f"scancel --batch --signal=USR1 {job.id}")
    assert "ddp: not queued again after 1 times" in job.finish()
    stopped_at(job.log())
    assert place(checkpoint(job.runs()))[0] < EPOCHS
    go_on(job)
    other = SlurmJob(
        cluster,
        job.folder,
        "--nodes=2 --gpus-per-node=1 --cpus-per-task=1 slurm/ddp_2nodes.sh "
        f"{DDP} {SIZE} --log-dir {job.runs()}",
    )
    other.finish()
    is_whole(job.runs(), undisturbed)


@pytest.mark.parametrize(
    "launcher", ["torchrun", "mpirun", pytest.param("srun", marks=MPI_INIT_CAN_CRASH)]
)
def test_stopped_rank(launcher, waiting_job):
    if launcher == "torchrun":
        job = waiting_job("--timeout 20", "--gpus-per-node=2")
    else:
        need_horovod("mpi")
        job = waiting_job(
            "--timeout 20",
            "--ntasks-per-node=2 --gpus-per-node=2",
            "slurm/hvd_2nodes.sh",
            HVD,
            LAUNCHER=launcher,
        )
    job.ranks("node2")[-1].send_signal(signal.SIGSTOP)
    go_on(job)
    log = job.finish("FAILED")
    assert "Timeout (0:00:20)!" in log
