"""kubernetes/ddp.yaml on two containers: pods are evicted, killed, and at their memory limit."""

import re
import struct
from pathlib import Path

import torch
from forked import compute
from launch import assert_same, checkpoint, evaluations
from pods import IndexedJob, Namespace, bytes_of, documents, kill, podman, with_gates
from recipes import ROOT

RECIPE = "mnist/ddp_launch.py"
GLOBAL_BATCH = 2 * 32
STEPS_PER_EPOCH = 10
# 6 epochs of 640 images. Within each the ranks ask each other whether to stop; no step is printed.
FLAGS = """
    --batch-size=32 --arch=lenet --epochs=6 --checkpoint-every=3 --log-interval=5 --log-seconds=1000
"""
CHANGES = {
    "--nproc-per-node=4": "--nproc-per-node=1",
    "cifar10/ddp_amp.py": RECIPE,
    "            - --checkpoint-every=500\n": "".join(
        f"            - {flag}\n" for flag in FLAGS.split()
    ),
}


def write_mnist(folder):
    """Write the files of MNIST, with a hundredth of its images."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, length in (("train", 640), ("t10k", 100)):
        images = torch.randint(256, (length, 28, 28), dtype=torch.uint8).numpy().tobytes()
        labels = torch.randint(10, (length,), dtype=torch.uint8).numpy().tobytes()
        (raw / f"{name}-images-idx3-ubyte").write_bytes(
            struct.pack(">4i", 2051, length, 28, 28) + images
        )
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, length) + labels)


def rank_of(pod):
    """The process of the recipe in a pod, as this machine numbers it."""
    lines = podman("top", pod.name, "hpid", "args").splitlines()
    (rank,) = [int(line.split()[0]) for line in lines if RECIPE in line and " -u " in line]
    return rank


def test_pods_that_end(image, tmp_path):
    """One evicted, both evicted, both killed, one at its memory limit: the same bits at the end.

    After an eviction the run has lost nothing; else it goes on from its last checkpoint.
    """
    job_of_manifest = documents("kubernetes/ddp.yaml", CHANGES)[-1]
    mounts = {f"/recipes/{RECIPE}": with_gates(RECIPE, (15, 25, 35, 45), tmp_path)}
    with Namespace(tmp_path) as namespace:
        data = namespace.claim("data", group=1000)
        write_mnist(data)
        run = namespace.claim("runs", group=1000) / "ddp"
        job = IndexedJob(namespace, job_of_manifest, image("recipes"), mounts)

        print("evict one pod")
        job.wait_for("^at gate-15$", count=2)
        job.evict(1)

        print("evict both pods")
        job.wait_for("^at gate-25$", count=2)
        assert job.log().count("stopped after a signal") == 1
        job.evict(0, 1)

        print("kill both pods")
        job.wait_for("^at gate-35$", count=2)
        assert job.log().count("stopped after a signal") == 2
        kill(*job.pods.values())
        (run / "gate-35").touch()

        print("let a pod reach its memory limit")
        job.wait_for("^at gate-45$", count=2)
        failures = job.failures
        pod = job.pods[1]
        # The kernel ends the process with the highest score first: the rank, then the greedy one.
        Path(f"/proc/{rank_of(pod)}/oom_score_adj").write_text("1000")
        pod.execute("python3", "-c", f"b'x' * {bytes_of('2Gi')}", status=137)
        (run / "gate-45").touch()

        print("finish")
        log = job.finish()
        # torchrun has started the ranks again, in the same pods.
        assert "(exitcode: -9)" in log
        assert job.failures == failures
        assert log.count("stopped after a signal") == 2
        places = re.findall(r"^resumed from .* at epoch (\d+), sample (\d+)", log, re.MULTILINE)
        one, both, killed, at_limit = sorted(
            STEPS_PER_EPOCH * (int(epoch) - 1) + int(sample) // GLOBAL_BATCH
            for epoch, sample in places
        )
        # An eviction is agreed on in the step after the gate, or soon after.
        assert 15 < one <= 18
        assert 25 < both <= 28
        # --checkpoint-every=3
        assert killed == 33
        assert at_limit == 45

    compute(
        f"torchrun --standalone --nproc-per-node=2 {ROOT}/{RECIPE} {' '.join(FLAGS.split())} "
        f"--device=cpu --data-dir={data} --log-dir=log",
        tmp_path,
    )
    undisturbed = tmp_path / "log"
    assert_same(checkpoint(run)["model"], checkpoint(undisturbed)["model"])
    # Each epoch has one evaluation, of all samples.
    names = ("epoch", "step", "train/accuracy", "val/accuracy")
    assert [[line[name] for name in names] for line in evaluations(run)] == [
        [line[name] for name in names] for line in evaluations(undisturbed)
    ]
