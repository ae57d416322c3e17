"""kubernetes/trainjob.yaml on two containers, with what the runtime gives to torchrun."""

from forked import compute
from launch import assert_same, checkpoint
from pods import Namespace, Pod, documents, evict, with_gates
from recipes import ROOT

RECIPE = "mnist/ddp_launch.py"
FLAGS = "--synthetic=640 --batch-size=32 --arch=lenet --epochs=3 --log-interval=5"
CHANGES = {
    "numProcPerNode: 4": "numProcPerNode: 1",
    "cifar10/ddp_amp.py": RECIPE,
    "      - --checkpoint-every=500\n": "".join(f"      - {flag}\n" for flag in FLAGS.split()),
}


def template(spec):
    """The template of the pods: that of the job over the patch of the runtime torch-distributed."""
    trainer = spec["trainer"]
    (patch,) = spec["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    container |= {
        "command": trainer["command"],
        "env": trainer["env"],
        "resources": trainer["resourcesPerNode"],
    }
    return {"spec": pod}


def test_an_evicted_pod(image, tmp_path):
    """It saves, and its successor joins the other: the weights of two local processes."""
    _, document = documents("kubernetes/trainjob.yaml", CHANGES)
    spec = document["spec"]
    mounts = with_gates(RECIPE, (15,), tmp_path)

    with Namespace(tmp_path) as namespace:

        def start(rank):
            return Pod(
                namespace,
                template(spec),
                image("recipes"),
                f"ddp-node-0-{rank}",
                names=[f"ddp-node-0-{rank}.ddp"],
                mounts=mounts,
                PET_NNODES=str(spec["trainer"]["numNodes"]),
                PET_NPROC_PER_NODE=str(spec["trainer"]["numProcPerNode"]),
                PET_NODE_RANK=str(rank),
                PET_MASTER_ADDR="ddp-node-0-0.ddp",
                PET_MASTER_PORT="29500",
            )

        pods = [start(rank) for rank in range(2)]
        for pod in pods:
            pod.wait_for("^at gate-15$")
        evict(pods[1])
        pods[1] = start(1)
        for pod in pods:
            assert pod.wait() == 0, pod.log()
        assert pods[0].log().count("stopped after a signal") == 1
        assert pods[0].log().count("resumed from") == 1
        command = "torchrun --standalone --nproc-per-node=2"
        compute(f"{command} {ROOT}/{RECIPE} {FLAGS} --device=cpu --log-dir=log", tmp_path)
        run = namespace.claim("runs", 1000) / "ddp"
        assert_same(checkpoint(run)["model"], checkpoint(tmp_path / "log")["model"])
