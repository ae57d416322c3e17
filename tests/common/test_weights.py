"""--init-from: the weights of another file."""

import pytest
import torch

from common import checkpoint
from common.errors import InputError
from common.weights import init_from

pytestmark = pytest.mark.check


@pytest.mark.parametrize("kind", ["state_dict", "safetensors", "checkpoint", "wrapped"])
def test_init_from(kind, tmp_path):
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    path = tmp_path / {"safetensors": "w.safetensors", "checkpoint": "last.pt"}.get(kind, "w.pt")
    if kind == "safetensors":
        save_file = pytest.importorskip("safetensors.torch").save_file
        save_file(model.state_dict(), path)
    elif kind == "checkpoint":
        checkpoint.save(tmp_path, {"model": model.state_dict()}, {})
    elif kind == "wrapped":
        torch.save({f"module.{name}": w for name, w in model.state_dict().items()}, path)
    else:
        torch.save(model.state_dict(), path)
    (line,) = init_from(str(path), other)
    assert "2 of 2 loaded" in line
    assert torch.equal(model.weight, other.weight)


def test_init_from_names_what_does_not_fit(tmp_path):
    torch.save(torch.nn.Linear(3, 2).state_dict(), tmp_path / "w.pt")
    other = torch.nn.Linear(4, 2)
    with pytest.raises(InputError, match=r"weight \(\[2, 3\] in the file\)"):
        init_from(str(tmp_path / "w.pt"), other)
    (line,) = init_from(str(tmp_path / "w.pt"), other, partial=True)
    assert "1 of 2 loaded; left out: weight" in line
