"""kubernetes/mpijob.yaml on three containers: a launcher and two workers, as the operator does."""

import shutil
import subprocess

import pytest
from forked import compute
from launch import assert_same, checkpoint, need_horovod
from pods import Namespace, Pod, documents, evict
from recipes import ROOT

CHANGES = {
    "slotsPerWorker: 4": "slotsPerWorker: 1",
    "cifar10/hvd.py": "mnist/hvd.py",
    '- "25"': '- "4"',
}
RECIPE = "                - --checkpoint-every=500\n"
# Where Kubernetes and the operator put them.
HOSTS = "hvd-worker-{}.hvd.default.svc"


class MPIJob:
    """The pods of a job, with the hostfile and the keys that the operator makes."""

    def __init__(self, namespace, spec, image):
        self.namespace, self.spec, self.image = namespace, spec, image
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
            mounts={self.spec["sshAuthMountPath"]: self.keys},
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


# Enough work that the run does not end before mpirun has passed on a signal.
FLAGS = "--synthetic=6400 --batch-size=320 --arch=lenet --epochs=20 --log-interval=5"


@pytest.fixture
def job(image, tmp_path):
    need_horovod("mpi")
    lines = "".join(
        f"                - {flag}\n" for flag in [*FLAGS.split(), "--checkpoint-every=3"]
    )
    _, document = documents("kubernetes/mpijob.yaml", CHANGES | {RECIPE: lines})
    with Namespace(tmp_path) as namespace:
        yield MPIJob(namespace, document["spec"], image("horovod"))


def test_launcher_and_worker_evicted(job, tmp_path):
    """After the first, the run goes on where it was; after the second, from its last checkpoint."""
    launcher = job.launcher()
    launcher.wait_for("^epoch 1/")
    evict(launcher)
    assert "stopped after a signal" in launcher.log()
    assert launcher.status() != 0, "it would count as complete"

    launcher = job.launcher()
    launcher.wait_for("^resumed from")
    evict(job.workers[1])
    assert launcher.wait() != 0
    assert "stopped after a signal" not in launcher.log()

    job.workers[1] = job.worker(1)
    launcher = job.launcher()
    launcher.wait_for("^resumed from")
    assert launcher.wait() == 0, launcher.log()

    mpirun = "mpirun --oversubscribe --bind-to none -np 2"
    compute(f"{mpirun} python {ROOT}/mnist/hvd.py {FLAGS} --device=cpu --log-dir=log", tmp_path)
    run = job.namespace.claim("runs", 1000) / "hvd"
    assert_same(checkpoint(run)["model"], checkpoint(tmp_path / "log")["model"])
