"""kubernetes/mpijob.yaml on three containers: a launcher and two workers, as the operator does."""

import shutil
import subprocess

import pytest
from forked import compute
from launch import assert_same, checkpoint, need_horovod
from pods import Namespace, Pod, documents, evict, with_gates
from recipes import ROOT

RECIPE = "mnist/hvd.py"
FLAGS = "--synthetic=640 --batch-size=32 --arch=lenet --epochs=5 --checkpoint-every=3"
CHANGES = {
    "slotsPerWorker: 4": "slotsPerWorker: 1",
    "cifar10/hvd.py": RECIPE,
    '- "25"': '- "4"',
    # For the tests' sitecustomize.py.
    "                - OMP_NUM_THREADS\n": (
        "                - OMP_NUM_THREADS\n                - -x\n                - PYTHONPATH\n"
    ),
    "                - --checkpoint-every=500\n": "".join(
        f"                - {flag}\n" for flag in FLAGS.split()
    ),
}
# Where Kubernetes and the operator put them.
HOSTS = "hvd-worker-{}.hvd.default.svc"


class MPIJob:
    """The pods of a job, with the hostfile and the keys that the operator makes."""

    def __init__(self, namespace, spec, image, mounts):
        self.namespace, self.spec, self.image, self.mounts = namespace, spec, image, mounts
        replicas = spec["mpiReplicaSpecs"]["Worker"]["replicas"]
        self.keys = namespace.folder / "keys"
        self.keys.mkdir()
        key = self.keys / "id_rsa"
        subprocess.run(["ssh-keygen", "-q", "-N", "", "-t", "rsa", "-f", key], check=True)
        shutil.copy(self.keys / "id_rsa.pub", self.keys / "authorized_keys")
        # A volume of a Secret belongs to root, and its files can be read.
        key.chmod(0o644)
        self.config = namespace.folder / "config"
        self.config.mkdir()
        (self.config / "hostfile").write_text(
            "".join(
                f"{HOSTS.format(index)} slots={spec['slotsPerWorker']}\n"
                for index in range(replicas)
            )
        )
        self.workers = [self.worker(index) for index in range(replicas)]

    def worker(self, index):
        return Pod(
            self.namespace,
            self.spec["mpiReplicaSpecs"]["Worker"]["template"],
            self.image,
            f"hvd-worker-{index}",
            names=[HOSTS.format(index)],
            mounts={self.spec["sshAuthMountPath"]: self.keys} | self.mounts,
        )

    def launcher(self):
        return Pod(
            self.namespace,
            self.spec["mpiReplicaSpecs"]["Launcher"]["template"],
            self.image,
            "hvd-launcher",
            mounts={self.spec["sshAuthMountPath"]: self.keys, "/etc/mpi": self.config},
            OMPI_MCA_orte_keep_fqdn_hostnames="true",
            OMPI_MCA_orte_default_hostfile="/etc/mpi/hostfile",
            OMPI_MCA_plm_rsh_args="-o ConnectionAttempts=10",
        )


@pytest.fixture
def job(image, tmp_path):
    need_horovod("mpi")
    _, document = documents("kubernetes/mpijob.yaml", CHANGES)
    with Namespace(tmp_path) as namespace:
        mounts = {f"/recipes/{RECIPE}": with_gates(RECIPE, (15, 25), tmp_path)}
        yield MPIJob(namespace, document["spec"], image("horovod"), mounts)


def test_worker_and_launcher_evicted(job, tmp_path):
    """After the first, the run goes on from its last checkpoint; after the second, where it was."""
    launcher = job.launcher()
    launcher.wait_for("^at gate-15$")
    evict(job.workers[1])
    assert launcher.wait() != 0
    assert "stopped after a signal" not in launcher.log()

    run = job.namespace.claim("runs", 1000) / "hvd"
    # In its first step a resumed run does not listen for signals: it goes on to the next gate.
    (run / "gate-15").touch()
    job.workers[1] = job.worker(1)
    launcher = job.launcher()
    launcher.wait_for("^resumed from .* at epoch 2, sample 320")
    launcher.wait_for("^at gate-25$")
    evict(launcher)
    assert "stopped after a signal" in launcher.log()
    assert launcher.status() != 0, "it would count as complete"

    # The next launcher would find this checkpoint. Here, two processes of this machine do.
    start = f"horovodrun --gloo -np 2 python {ROOT}/{RECIPE} {FLAGS} --device=cpu --resume=auto"
    resumed = compute(f"{start} --log-dir={run}", tmp_path)
    assert "resumed from" in resumed
    compute(f"{start} --log-dir=log", tmp_path)
    assert_same(checkpoint(run)["model"], checkpoint(tmp_path / "log")["model"])
