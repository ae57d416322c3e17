"""The manifests have the fields that Kubernetes, Kubeflow and SkyPilot know, and no others."""

import kubernetes_validate
import yaml
from recipes import ROOT


def documents_in(name):
    return list(yaml.safe_load_all((ROOT / name).read_text()))


def validate(document):
    """Check it against the schemas of the newest Kubernetes that the package knows."""
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


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
    for document in documents_in("kubernetes/ddp.yaml"):
        validate(document)


def test_trainjob():
    # It takes seconds, which every worker of pytest would spend on its collection.
    from kubeflow_trainer_api import models

    policy, written = documents_in("kubernetes/trainjob.yaml")
    validate(policy)
    job = models.TrainerV1alpha1TrainJob.from_dict(written)
    assert unknown_fields(written, job.to_dict()) == []


def test_mpijob():
    """The pods are checked by Kubernetes' schemas, the rest by the fields of the operator's types.

    These are from kubeflow/mpi-operator, pkg/apis/kubeflow/v2beta1/types.go.
    """
    policy, job = documents_in("kubernetes/mpijob.yaml")
    validate(policy)
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
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
        validate(pod | replica["template"])
