"""Training on a cluster, and its faults: no rank hangs, and the run continues where it was.

Each start of a job loads torch four times. So one job goes through one fault after another, and
what is about slurm/ and not about training is in test_slurm.py, with a script without torch.
"""

import os
import re
import sys

import pytest
from cluster import MPI_INIT_CAN_CRASH
from forked import compute
from launch import (
    assert_same,
    checkpoint,
    evaluations,
    largest_difference,
    need_horovod,
    place,
)
from recipes import ROOT, STEP, changed_copy, in_float64

# Two processes, ten steps in an epoch, and a checkpoint every three. Only on two processes does a
# resumed run end with the same bits. On more, DDP sums the gradients of the first step after a
# start in another order, as it rebuilds its buckets after that step (unless
# find_unused_parameters=True).
FLAGS = (
    "--synthetic 160 --batch-size 8 --model lenet --checkpoint-every 3 --device cpu "
    "--log-interval 5"
)
TWO_NODES = "--nodes=2 --gpus-per-node=1 --cpus-per-task=1"
URGENT = "sbatch --wait --partition=urgent --nodes=2 --exclusive --wrap='sleep 1' -o /dev/null"

# A copy of a recipe waits in each step from the epoch in the file wait-from on: the fault comes
# while it waits, and the test decides when it goes on. It also goes on when a rank is told to stop.
# A file shows that a rank waits, as the output of another rank could tear a line apart.
WAITS = """\
            from waiting import wait

            wait(run)
"""
WAITING = """\
import time
from pathlib import Path


def wait(run):
    rank = run.world.rank
    epoch = run.position.epoch
    told = Path(f"told-{epoch}-{run.position.samples}")
    run.watchdog.cancel()
    while epoch >= int(Path("wait-from").read_text()) and not told.exists():
        Path(f"waits-{epoch}-{rank}").touch()
        if run.stop.requested:
            told.touch()
        time.sleep(0.1)
    run.watchdog.arm()
"""


def wait_from(folder, epoch):
    """Let the ranks of a job in `folder` train until this epoch, and wait from there on."""
    (folder / "new").write_text(str(epoch))
    (folder / "new").rename(folder / "wait-from")


def make_waiting_copy(folder, recipe, copy=changed_copy):
    """Copy a recipe that waits to `folder`, where its jobs run."""
    copy(folder, recipe, STEP, STEP + WAITS)
    (folder / recipe).with_name("waiting.py").write_text(WAITING)


def wait_for_ranks(job, epoch):
    """Return once both ranks wait in an epoch, for the first time."""
    files = [job.folder / f"waits-{epoch}-{rank}" for rank in (0, 1)]
    job.wait_until(lambda: all(file.exists() for file in files), f"no rank is in epoch {epoch}")


def wait_for_stop(job, epoch):
    """Return the sample at which the run was stopped, in the epoch in which it waited."""
    stopped = rf"^stopped after a signal at epoch {epoch + 1}, sample (\d+)"
    job.wait_for(stopped)
    return int(re.search(stopped, job.log(), re.MULTILINE)[1])


def is_whole(folder, undisturbed, epochs):
    """The same bits, and each epoch has one evaluation, with the figures of an undisturbed run."""
    assert_same(checkpoint(folder)["model"], checkpoint(undisturbed)["model"])
    figures = [
        [
            [line[name] for name in ("epoch", "step", "train/accuracy", "val/accuracy")]
            for line in evaluations(run)
        ]
        for run in (folder, undisturbed)
    ]
    assert figures[0] == figures[1]
    assert [line[0] for line in figures[0]] == list(range(1, epochs + 1))


class Chain:
    """A job that goes through faults: its ranks wait in an epoch for the next one."""

    def __init__(self, job, cluster):
        self.job = job
        self.cluster = cluster
        self.epoch = 1

    def go_on(self):
        """Let the ranks train up to the next epoch."""
        wait_from(self.job.folder, self.epoch + 1)

    def next_link(self):
        """Return once they wait in the next epoch."""
        self.go_on()
        self.epoch += 1
        wait_for_ranks(self.job, self.epoch)

    def wait_for_resume(self, sample=r"\d+"):
        self.job.wait_for(rf"^resumed from \S+ at epoch {self.epoch + 1}, sample {sample} ")


def stacks(chain):
    chain.cluster.run(f"scancel --signal=USR2 {chain.job.id}")
    chain.job.wait_for("Current thread", count=2)


def link_down_for_8_seconds(chain):
    """The connections outlive it."""
    chain.cluster.run("ip link set link-node2 down")
    chain.go_on()
    chain.cluster.run("sleep 8; ip link set link-node2 up")
    wait_for_ranks(chain.job, chain.epoch + 1)
    assert f" at epoch {chain.epoch + 1}, sample" not in chain.job.log()


def rank_killed(chain):
    """Torchrun starts the ranks again, with RESTARTS."""
    chain.job.ranks("node2")[-1].kill()
    chain.wait_for_resume()


def link_down_for_longer_than_the_timeout(chain):
    """The ranks end by their own watchdogs, and torchrun starts them again."""
    chain.cluster.run("ip link set link-node2 down")
    chain.go_on()
    chain.job.wait_for(r"Timeout \(0:00:30\)!")
    chain.cluster.run("ip link set link-node2 up")
    chain.wait_for_resume()


def node_down(chain):
    """SLURM queues the job again. The node comes back when SLURM looks at it again."""
    chain.cluster.run("scontrol update nodename=node2 state=down reason=test")
    chain.wait_for_resume()


def preempted(chain):
    """A job that needs both nodes comes: SIGTERM to all processes."""
    chain.cluster.run(URGENT)
    chain.wait_for_resume(wait_for_stop(chain.job, chain.epoch))
    assert "ddp: preempted, and queued again" in chain.job.log()


def time_limit(chain):
    """SLURM's own warning, 60 to 90 s before the time limit. Then the limit is raised."""
    (ran,) = chain.job.shown("RunTime")
    hours, minutes, _ = map(int, ran.split(":"))
    update = f"scontrol update jobid={chain.job.id} timelimit="
    chain.cluster.run(f"{update}{60 * hours + minutes + 2}")
    sample = wait_for_stop(chain.job, chain.epoch)
    chain.cluster.run(f"{update}30")
    chain.wait_for_resume(sample)
    (restarts,) = chain.job.shown("Restarts")
    assert f"ddp: queued again, {restarts} of 10" in chain.job.log()


LINKS = {
    link.__name__: link
    for link in (
        stacks,
        link_down_for_8_seconds,
        rank_killed,
        link_down_for_longer_than_the_timeout,
        node_down,
        preempted,
        time_limit,
    )
}


def test_one_fault_after_another(submit, cluster, tmp_path):
    """LINKS=node_down,preempted in the environment: only these."""
    names = os.environ.get("LINKS", ",".join(LINKS)).split(",")
    epochs = len(names) + 2
    make_waiting_copy(tmp_path, "mnist/ddp_launch.py")
    wait_from(tmp_path, 1)
    flags = f"mnist/ddp_launch.py {FLAGS} --epochs {epochs}"
    job = submit(f"{TWO_NODES} slurm/ddp_2nodes.sh {flags} --timeout 30", RESTARTS=str(len(names)))
    chain = Chain(job, cluster)
    wait_for_ranks(job, chain.epoch)
    for name in names:
        print(f"in epoch {chain.epoch}: {name}")
        LINKS[name](chain)
        chain.next_link()
    wait_from(tmp_path, epochs)
    job.finish()
    queued_again = sum(name in ("node_down", "preempted", "time_limit") for name in names)
    assert job.shown("Restarts") == {str(queued_again)}
    compute(f"torchrun --standalone --nproc-per-node=2 {ROOT}/{flags} --log-dir log", tmp_path)
    is_whole(job.runs(), tmp_path / "log", epochs)


# A python for which the host's own name is 127.0.1.1, as Debian's /etc/hosts has it.
AS_ON_DEBIAN = """\
#!/usr/bin/env bash
file=$(mktemp)
sed "s/^.* $(hostname)$/127.0.1.1 $(hostname)/" /etc/hosts > "$file"
exec unshare --mount bash -c 'mount --bind $0 /etc/hosts; exec "$@"' "$file" {python} "$@"
"""
CONNECTS = """\
import torch.distributed as dist

dist.init_process_group("gloo")
"""


def test_fsdp_under_srun(submit, cluster, tmp_path):
    """Each of two nodes has a share of the weights, and a preempted job resumes from the whole.

    First, the message and the cure of docs/clusters.md where a host's name is a loopback address.
    """
    make_waiting_copy(tmp_path, "imagenet/fsdp.py")
    wait_from(tmp_path, 1)
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(AS_ON_DEBIAN.format(python=sys.executable))
    python.chmod(0o755)
    environment = {
        "PATH": f"{python.parent}:{cluster.environment['PATH']}",
        "TMPDIR": str(tmp_path),
    }
    (tmp_path / "connects.py").write_text(CONNECTS)
    script = f"{TWO_NODES} --ntasks-per-node=1 slurm/ddp_srun_2nodes.sh"
    log = submit(f"{script} connects.py", **environment).finish("FAILED")
    assert "Gloo connectFullMesh failed" in log
    assert "remote=[127.0.1.1]" in log
    message = "`Gloo connectFullMesh failed`, with `remote=[127.0.1.1]`"
    assert message in (ROOT / "docs" / "clusters.md").read_text()

    flags = (
        "imagenet/fsdp.py --arch convnet --image-size 32 --synthetic 160 -b 8 --epochs 2 "
        "--lr 0.001 --device cpu --log-interval 5 -j 0"
    )
    job = submit(f"{script} {flags}", **environment, GLOO_SOCKET_IFNAME="eth0")
    wait_for_ranks(job, 1)
    cluster.run(URGENT)
    sample = wait_for_stop(job, 1)
    job.wait_for(rf"^resumed from \S+ at epoch 2, sample {sample} ")
    wait_from(tmp_path, 2)
    job.finish()
    compute(f"torchrun --standalone --nproc-per-node=2 {flags} --log-dir log", tmp_path)
    saved = checkpoint(job.runs())
    undisturbed = checkpoint(tmp_path / "log")
    assert_same(saved["model"], undisturbed["model"])
    assert_same(saved["optimizer"], undisturbed["optimizer"])


@MPI_INIT_CAN_CRASH
def test_horovod(submit, cluster, tmp_path):
    """One run under three launchers: srun, mpirun, and horovodrun over ssh."""
    need_horovod("mpi")
    make_waiting_copy(tmp_path, "mnist/hvd.py")
    wait_from(tmp_path, 1)
    flags = f"{FLAGS} --epochs 4 --log-dir log --resume auto"
    options = "--nodes=2 --ntasks-per-node=1 --gpus-per-node=0 --cpus-per-task=1"
    job = f"{options} slurm/hvd_2nodes.sh mnist/hvd.py {flags}"

    under_srun = submit(job, LAUNCHER="srun")
    wait_for_ranks(under_srun, 1)
    cluster.run(f"scancel --batch --signal=USR1 {under_srun.id}")
    sample = wait_for_stop(under_srun, 1)
    under_srun.wait_for("^hvd: queued again, 1 of 10")
    cluster.run(f"scancel {under_srun.id}")
    under_srun.finish("CANCELLED")
    wait_from(tmp_path, 2)

    under_mpirun = submit(job)
    under_mpirun.wait_for(rf"^resumed from \S+ at epoch 2, sample {sample} ")
    wait_for_ranks(under_mpirun, 2)
    cluster.run(f"scancel --signal=TERM {under_mpirun.id}")
    sample = wait_for_stop(under_mpirun, 2)
    # mpirun takes minutes to notice that its daemon on node2 ended, and then fails.
    cluster.run(f"scancel {under_mpirun.id}")
    under_mpirun.finish("CANCELLED")
    assert place(checkpoint(tmp_path / "log")) == (2, sample)

    wait_from(tmp_path, 4)
    output = cluster.run(
        f"horovodrun -np 2 -H node1:1,node2:1 python mnist/hvd.py {flags}", tmp_path
    )
    assert re.search(rf"resumed from \S+ at epoch 3, sample {sample} ", output)
    assert len(re.findall(r"mnist: .* world size 2 \|", output)) == 1
    compute(
        f"torchrun --standalone --nproc-per-node=2 {ROOT}/mnist/ddp_launch.py {FLAGS} --epochs 4 "
        "--log-dir undisturbed",
        tmp_path,
    )
    is_whole(tmp_path / "log", tmp_path / "undisturbed", 4)


def copy_in_float64(folder, recipe, line, replacement):
    dataset, name = recipe.split("/")
    in_float64(folder, dataset, name, line, replacement)


def test_a_node_goes_and_comes_back(submit, cluster, tmp_path):
    """Elastic: with the global batch fixed, the weights are those of one process.

    The job has more tasks than torchruns, and inherits the binding of a job that submitted it.
    """
    make_waiting_copy(tmp_path, "mnist/ddp_launch.py", copy_in_float64)
    wait_from(tmp_path, 1)
    flags = "--synthetic 160 --model lenet --epochs 4 --device cpu --log-interval 5 -G 16"
    job = submit(
        "--gpus-per-node=1 --cpus-per-task=1 --ntasks-per-node=2 slurm/ddp_elastic.sh "
        f"mnist/ddp_launch.py {flags} --checkpoint-every 3",
        SLURM_CPU_BIND="quiet,mask_cpu:0x1",
    )
    world_size = r"^mnist: .* world size (\d)"
    wait_for_ranks(job, 1)
    assert job.shown("NodeList") == {"node1", "node2"}
    cluster.run(
        f"scontrol update nodename=node2 state=drain reason=test; scontrol requeue {job.id}_1"
    )
    job.wait_for(world_size.replace(r"(\d)", "1"))
    wait_from(tmp_path, 2)
    job.wait_until((tmp_path / "waits-2-0").exists, "the rank on the other node does not train")
    cluster.run("scontrol update nodename=node2 state=resume")
    job.wait_for(world_size.replace(r"(\d)", "2"), count=2)
    wait_from(tmp_path, 4)
    log = job.finish()
    assert re.findall(world_size, log, re.MULTILINE) == ["2", "1", "2"], log
    compute(f"python mnist/single.py {flags} --log-dir one", cwd=tmp_path)
    folder = tmp_path / "runs" / f"ddp-elastic-{job.id}"
    saved = checkpoint(folder)
    elastic = evaluations(folder)
    steps = [(line["epoch"], line["step"]) for line in elastic]
    assert steps == [(epoch, 10 * epoch) for epoch in range(1, 5)]
    # The means of all epochs, also of those with a restart, are over each image once.
    losses = [line["train/loss"] for line in elastic]
    one = [line["train/loss"] for line in evaluations(tmp_path / "one")]
    assert losses == pytest.approx(one, rel=1e-5)
    assert largest_difference(saved["model"], checkpoint(tmp_path / "one")["model"]) < 1e-5
