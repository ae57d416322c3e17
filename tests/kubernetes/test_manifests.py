"""The manifests have the fields that Kubernetes, Kubeflow and SkyPilot know, and no others."""

import subprocess
import sys

import yaml
from kubeflow_trainer_api import models
from launch import need
from recipes import ROOT


def validate(manifest):
    """Check it against the schemas of Kubernetes."""
    command = [sys.executable, "-m", "kubernetes_validate", "--strict", manifest]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def job_in(name, tmp_path):
    """The job in a manifest, whose network policy has the fields that Kubernetes knows."""
    policy, job = yaml.safe_load_all((ROOT / name).read_text())
    file = tmp_path / "policy.yaml"
    file.write_text(yaml.safe_dump(policy))
    validate(file)
    return job


def unknown_fields(written, known, path=""):
    """The fields of a document that are not in what a model has made of it."""
    if isinstance(written, dict):
        return [
            field
            for name, value in written.items()
            for field in (
                unknown_fields(value, known[name], f"{path}/{name}")
                if isinstance(known, dict) and name in known
                else [f"{path}/{name}"]
            )
        ]
    if isinstance(written, list):
        return [
            field
            for number, value in enumerate(written)
            for field in unknown_fields(value, known[number], f"{path}/{number}")
        ]
    return []


def test_ddp():
    validate(ROOT / "kubernetes" / "ddp.yaml")


def test_trainjob(tmp_path):
    written = job_in("kubernetes/trainjob.yaml", tmp_path)
    job = models.TrainerV1alpha1TrainJob.from_dict(written)
    assert unknown_fields(written, job.to_dict()) == []


def test_mpijob(tmp_path):
    """The pods are checked by Kubernetes' schemas, the rest by the fields of the operator's types.

    These are from kubeflow/mpi-operator, pkg/apis/kubeflow/v2beta1/types.go.
    """
    job = job_in("kubernetes/mpijob.yaml", tmp_path)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    spec = job["spec"]
    assert set(spec) <= {
        "slotsPerWorker",
        "runPolicy",
        "mpiReplicaSpecs",
        "sshAuthMountPath",
        "launcherCreationPolicy",
        "mpiImplementation",
    }
    assert set(spec["runPolicy"]) <= {
        "cleanPodPolicy",
        "ttlSecondsAfterFinished",
        "activeDeadlineSeconds",
        "backoffLimit",
        "schedulingPolicy",
        "suspend",
    }
    assert set(spec["mpiReplicaSpecs"]) == {"Launcher", "Worker"}
    for replica in spec["mpiReplicaSpecs"].values():
        assert set(replica) == {"replicas", "restartPolicy", "template"}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "pod"},
            **replica["template"],
        }
        file = tmp_path / "pod.yaml"
        file.write_text(yaml.safe_dump(pod))
        validate(file)


SKYPILOT = ROOT / ".venv-skypilot"
TASK = """
import sys, sky
task = sky.Task.from_yaml(sys.argv[1])
(machine,) = task.resources
print(task.num_nodes, machine.accelerators)
"""


def test_skypilot():
    # In an environment of its own: it asks for an older click than huggingface-hub.
    need(
        SKYPILOT.exists(),
        f"python3 -m venv {SKYPILOT.name} && {SKYPILOT.name}/bin/pip install skypilot",
    )
    command = [SKYPILOT / "bin" / "python", "-c", TASK, ROOT / "skypilot.yaml"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "2 {'A100': 4}\n", done.stdout + done.stderr
