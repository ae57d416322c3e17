import pytest
from cluster import SlurmJob


@pytest.fixture
def submit(cluster, tmp_path):
    """A function that submits a job from `tmp_path`. It is cancelled at the end of the test."""
    jobs = []

    def submit(arguments, **environment):
        jobs.append(SlurmJob(cluster, tmp_path, arguments, **environment))
        return jobs[-1]

    yield submit
    for job in jobs:
        cluster.run(f"scancel {job.id}")
    # A test that failed may have left node2 without them. (SLURM refuses to resume an idle node.)
    cluster.run("ip link set link-node2 up; scontrol update nodename=node2 state=resume || true")
