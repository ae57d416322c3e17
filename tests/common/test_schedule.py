"""The learning rate and the batch, on any number of processes."""

import pytest
import torch

from common.errors import InputError
from common.schedule import WarmupCosine, lr_factor, per_process

pytestmark = pytest.mark.check


def test_schedule():
    lr = 0.1 * lr_factor("linear", 4)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr)
    schedule = WarmupCosine(optimizer, epochs=5, warmup_epochs=2, start_lr=0.1)
    rates = []
    for epochs_done in (0, 1, 2, 3.5, 5, 5.1):
        schedule.set(epochs_done)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.25, 0.4, 0.2, 0, 0])
    assert [lr_factor(how, 4) for how in ("linear", "sqrt", "none")] == [4, 2, 1]
    assert lr_factor("linear", 4, global_batch_size=24) == 1


def test_each_group_keeps_its_own_rate():
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    groups = [{"params": [weights[0]], "lr": 0.1}, {"params": [weights[1]], "lr": 0.001}]
    optimizer = torch.optim.SGD(groups)
    rates = WarmupCosine(optimizer, epochs=10, warmup_epochs=2, start_lr=0.025)
    for done in (0, 1, 5, 9.5):
        rates.set(done)
        backbone, head = (group["lr"] for group in optimizer.param_groups)
        assert backbone == pytest.approx(100 * head)


def test_a_global_batch_is_shared():
    assert per_process(64, None, 4) == 64
    assert per_process(64, 24, 4) == 6
    with pytest.raises(InputError, match="multiple of 5"):
        per_process(64, 24, 5)
