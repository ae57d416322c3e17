"""kubernetes/trainjob.yaml: pods like those of ddp.yaml; torchrun with the runtime's variables."""

import os
import re
import signal
import subprocess

from forked import ForkedJob, compute
from launch import assert_same, checkpoint, free_port
from pods import documents, with_gates
from recipes import ROOT

RECIPE = "mnist/ddp_launch.py"
FLAGS = "--synthetic=640 --batch-size=32 --arch=lenet --epochs=3 --log-interval=5 --device=cpu"
CHANGES = {
    "numProcPerNode: 4": "numProcPerNode: 1",
    "cifar10/ddp_amp.py": RECIPE,
    "      - --checkpoint-every=500\n": "".join(f"      - {flag}\n" for flag in FLAGS.split()),
}


def job():
    """The `spec` of the manifest, for small machines."""
    _, document = documents("kubernetes/trainjob.yaml", CHANGES)
    return document["spec"]


def test_its_pods_are_those_of_ddp():
    """So what test_ddp.py sees of users, volumes and evictions holds for them."""
    spec = job()
    (patch,) = spec["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    of_ddp = documents("kubernetes/ddp.yaml", {})[-1]["spec"]["template"]["spec"]
    for name in ("terminationGracePeriodSeconds", "securityContext"):
        assert pod[name] == of_ddp[name]
    (container,) = pod["containers"]
    (container_of_ddp,) = of_ddp["containers"]
    # Only ddp.yaml's root is read-only, with a volume for /tmp.
    assert pod["volumes"] == [v for v in of_ddp["volumes"] if v["name"] != "tmp"]
    mounts = [mount for mount in container_of_ddp["volumeMounts"] if mount["name"] != "tmp"]
    assert container["volumeMounts"] == mounts
    assert container["securityContext"].items() <= container_of_ddp["securityContext"].items()
    assert spec["trainer"]["resourcesPerNode"] == container_of_ddp["resources"]
    # The image's entry point, which `command` replaces.
    assert spec["trainer"]["command"][:2] == ["tini", "--"]
    names = {variable["name"] for variable in spec["trainer"]["env"]}
    assert {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "POD_IP"} <= names


def torchrun_of(spec, variables, folder):
    """The torchrun that the shell of a pod executes."""
    words = [re.sub(r"\$\((\w+)\)", lambda m: variables[m[1]], word) for word in spec["command"]]
    stub = folder / "torchrun"
    stub.write_text('#!/bin/sh\necho torchrun "$@"\n')
    stub.chmod(0o755)
    environment = {**variables, "PATH": f"{folder}:{os.environ['PATH']}"}
    # Without `tini --`.
    done = subprocess.run(words[2:], env=environment, check=True, capture_output=True, text=True)
    return done.stdout


def test_an_evicted_pod(tmp_path):
    """It saves, and its successor joins the other: the weights of two local processes."""
    spec = job()["trainer"]
    copy = with_gates(RECIPE, (15,), tmp_path)
    port = free_port()

    def start(rank):
        """Start the torchrun of a pod, with the variables of the runtime torch-distributed."""
        variables = {
            "PET_NNODES": str(spec["numNodes"]),
            "PET_NPROC_PER_NODE": str(spec["numProcPerNode"]),
            "PET_NODE_RANK": str(rank),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(port),
            "POD_IP": "127.0.0.1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        command = torchrun_of(spec, variables, tmp_path).replace(RECIPE, str(copy))
        return ForkedJob(command, tmp_path, **variables)

    first, second = start(0), start(1)
    for pod in (first, second):
        pod.wait_for("at gate-15\n")
    second.process.send_signal(signal.SIGTERM)
    assert second.finish() == 1, "it would count as complete"
    successor = start(1)
    for pod in (first, successor):
        assert pod.finish() == 0, pod.output()
    assert first.output().count("stopped after a signal") == 1
    assert first.output().count("resumed from") == 1
    compute(
        f"torchrun --standalone --nproc-per-node=2 {ROOT}/{RECIPE} {FLAGS} --log-dir=log", tmp_path
    )
    run = tmp_path / "runs" / "ddp"
    assert_same(checkpoint(run)["model"], checkpoint(tmp_path / "log")["model"])
