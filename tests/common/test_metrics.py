"""Sums over any split of the samples, the best value, and losses that are not finite."""

import math

import numpy as np
import pytest
import torch

from common.errors import RunError
from common.metrics import Best, Sums, in_order

pytestmark = pytest.mark.check
CPU = torch.device("cpu")


def averages(loss, samples, confusion):
    return {"loss": loss / samples, "right": confusion.trace()}


def new_sums():
    return Sums(CPU, averages, confusion=(2, 2))


def test_sums_of_any_shape_go_on_after_a_resume():
    sums = new_sums()
    sums.add(loss=torch.tensor(1.5), samples=3, confusion=torch.tensor([[1, 0], [2, 4]]))
    assert sums.result(lambda values: values.mul_(2)) == {"loss": 0.5, "right": 10}
    resumed = new_sums()
    resumed.load_state_dict(sums.state_dict())
    resumed.add(loss=1, samples=1)
    # What was summed before the resume is that of all ranks: it is not multiplied by them.
    total = resumed.total(lambda values: values.mul_(2))
    assert (total["loss"], total["samples"]) == (5, 8)
    assert total["confusion"].tolist() == [[2, 0], [4, 8]]


def test_best_is_the_highest():
    best = Best()
    # NaN is such as an F1 of 0 / 0.
    values = (math.nan, 0.1, 0.3, math.nan, 0.2)
    assert [best.update(value) for value in values] == [False, True, True, False, False]
    # A checkpoint can hold no number of NumPy.
    best.update(np.int64(1))
    assert type(best.state_dict()["value"]) is float


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["loss", "confusion"])
def test_one_value_that_is_not_finite(name, bad):
    """The sum shows it, whatever batch and rank it was in, and the error names it."""
    sums = new_sums()
    for value in (1.0, bad, 1.0):
        sums.add(samples=3, **{name: torch.tensor(value)})
    sent = []
    with pytest.raises(RunError, match=f"the {name} is not finite"):
        sums.total(sent.append)
    good = new_sums()
    good.add(loss=1.0, samples=3)
    assert good.total()["loss"] == 1
    with pytest.raises(RunError, match=f"the {name} is not finite"):
        good.total(lambda values: values.add_(sent[0]))


def test_rows_of_all_ranks_in_order():
    """Three ranks with unequal shares, one of which has seen a part of its own."""
    shares = [range(rank, 8, 3) for rank in range(3)]
    values = [torch.tensor([[index, 10.0 * index] for index in share]) for share in shares]
    values[1] = values[1][:2]
    parts = [in_order(v, s, 8, lambda whole: None) for v, s in zip(values, shares, strict=True)]
    whole = in_order(values[0], shares[0], 8, lambda whole: whole.add_(parts[1]).add_(parts[2]))
    assert whole.tolist() == [[i, 10.0 * i] if i != 7 else [0, 0] for i in range(8)]
