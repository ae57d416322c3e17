"""What loader workers need of the machine, and who ends them."""

import os
import signal

import pytest
import torch

from common.errors import InputError
from common.process import workers


def test_a_temporary_folder_with_a_long_name(tmp_path, monkeypatch):
    """Its sockets would have names that are too long, and the loader would wait for ever."""
    monkeypatch.setattr(workers.tempfile, "gettempdir", lambda: f"/{'x' * 80}")
    with pytest.raises(InputError, match="set TMPDIR to a shorter name"):
        workers.data_loader(torch.arange(8), range(8), 2, workers=1)


def test_no_folder_for_temporary_files(monkeypatch):
    """k8s-sidecar 427, open-r1 488: a root file system that may not be written."""

    def fails():
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(workers.tempfile, "gettempdir", fails)
    with pytest.raises(InputError, match="need a folder for temporary files, in TMPDIR or /tmp"):
        workers.data_loader(torch.arange(8), range(8), 2, workers=1)


@pytest.mark.parametrize("system", ["Linux", "macOS"])
def test_who_sent_sigterm(system, monkeypatch):
    """Here the worker itself. macOS does not say who did, and then it counts as the rank."""
    if system == "macOS":
        monkeypatch.delattr(signal, "sigwaitinfo")
    worker = os.fork()
    if worker == 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(workers.sent_by_the_rank())
    _, status = os.waitpid(worker, 0)
    assert os.waitstatus_to_exitcode(status) == (system == "macOS")
