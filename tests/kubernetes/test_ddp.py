"""kubernetes/ddp.yaml on two containers: evicted and killed pods, the weights of two processes."""

import shutil
from pathlib import Path

import pytest
from forked import compute
from launch import assert_same, checkpoint, evaluations
from pods import IndexedJob, Namespace, bytes_of, documents, kill, podman
from recipes import ROOT

ONE_PROCESS = {
    "--nproc-per-node=4": "--nproc-per-node=1",
    "cifar10/ddp_amp.py": "mnist/ddp_launch.py",
}
RECIPE = "            - --checkpoint-every=500\n"
# Many epochs, each of 10 steps: a fault that comes after the second comes before the last.
# They ask each other within each, and print no line of a step.
FLAGS = (
    "--synthetic=640 --batch-size=32 --arch=lenet --epochs=40 --log-interval=5 --log-seconds=1000"
)


def manifest(flags, **others):
    """The documents of the manifest by kind, with flags of the recipe and other changed texts."""
    lines = "".join(f"            - {flag}\n" for flag in flags.split())
    found = documents("kubernetes/ddp.yaml", ONE_PROCESS | {RECIPE: lines} | others)
    return {document["kind"]: document for document in found}


@pytest.fixture
def namespace(image, tmp_path):
    with Namespace(tmp_path) as namespace:
        yield namespace


@pytest.fixture
def start(namespace, image):
    """A function that starts the job, with flags of the recipe."""

    def start(flags, **others):
        return IndexedJob(namespace, manifest(flags, **others)["Job"], image("recipes"))

    return start


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of the same run on two local processes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    command = "torchrun --standalone --nproc-per-node=2"
    compute(f"{command} {ROOT}/mnist/ddp_launch.py {FLAGS} --device=cpu --log-dir=log", folder)
    return folder / "log"


def is_whole(run, undisturbed):
    """The same bits, and each epoch has one evaluation, of all samples."""
    assert_same(checkpoint(run)["model"], checkpoint(undisturbed)["model"])
    names = ("epoch", "step", "train/accuracy", "val/accuracy")
    assert [[line[name] for name in names] for line in evaluations(run)] == [
        [line[name] for name in names] for line in evaluations(undisturbed)
    ]


def test_real_images(start, namespace, real_data, tmp_path):
    """With the defaults, and an eviction in the middle, they train as two local processes do."""
    data = namespace.claim("data", group=1000)
    shutil.copytree(real_data("mnist") / "MNIST", data / "MNIST")
    flags = "--max-steps=60 --log-seconds=0"
    job = start(flags)
    job.wait_for("^step 30/")
    job.evict(0)
    log = job.finish()
    assert log.count("stopped after a signal") == log.count("resumed from") == 1
    compute(
        f"torchrun --standalone --nproc-per-node=2 {ROOT}/mnist/ddp_launch.py {flags} "
        f"--device=cpu --data-dir={data} --log-dir=log",
        tmp_path,
    )
    is_whole(namespace.claim("runs", 1000) / "ddp", tmp_path / "log")


def test_evicted_pods(start, namespace, undisturbed):
    """One pod or both: the run is saved, and their successors go on from there."""
    job = start(FLAGS)
    job.wait_for("^epoch 2/")
    for count, pods in enumerate([[1], [0, 1]], 1):
        job.evict(*pods)
        job.wait_for("^stopped after a signal", count)
        # Before its first step a run has nothing to save: an eviction would end it at once. An
        # epoch whose samples were all used is evaluated first: so two lines.
        job.wait_for(r"^resumed from .*\n.*\nepoch.*\nepoch", count)
    log = job.finish()
    assert log.count("resumed from") == 2
    is_whole(namespace.claim("runs", 1000) / "ddp", undisturbed)


def test_killed_pods(start, namespace, undisturbed):
    """Both: the run goes on from the last checkpoint."""
    job = start(f"{FLAGS} --checkpoint-every=3")
    job.wait_for("^epoch 2/")
    kill(*job.pods.values())
    log = job.finish()
    assert "resumed from" in log
    assert "stopped after a signal" not in log
    is_whole(namespace.claim("runs", 1000) / "ddp", undisturbed)


def ranks_of(pod):
    """The numbers of the processes of the recipe in a pod, as this machine counts them."""
    lines = podman("top", pod.name, "hpid", "args").splitlines()
    return [int(line.split()[0]) for line in lines if "ddp_launch.py" in line and " -u " in line]


def test_memory_limit(start, namespace, undisturbed):
    """The kernel kills a rank at the pod's limit: torchrun says so, and starts all ranks again."""
    job = start(f"{FLAGS} --checkpoint-every=3")
    job.wait_for("^epoch 2/")
    pod = job.pods[1]
    # The kernel kills the process with the highest score first: the rank, and then the greedy one.
    (rank,) = ranks_of(pod)
    Path(f"/proc/{rank}/oom_score_adj").write_text("1000")
    pod.execute("python3", "-c", f"b'x' * {bytes_of('2Gi')}", status=137)
    log = job.finish()
    assert "(exitcode: -9)" in log
    assert log.count("resumed from") == 1
    assert job.failures == 0
    is_whole(namespace.claim("runs", 1000) / "ddp", undisturbed)
