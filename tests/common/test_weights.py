"""--init-from: the weights of another file."""

from argparse import Namespace

import pytest
import torch

from common import checkpoint
from common.errors import InputError
from common.metadata import Metadata
from common.ranks import World
from common.weights import init_from

pytestmark = pytest.mark.check


@pytest.fixture
def begin(capsys):
    """A function that loads --init-from into a model, and returns what is said of it."""

    def begin(args, model, **metadata):
        init_from(args, model, Metadata(**metadata), World(torch.device("cpu")))
        return capsys.readouterr().out

    return begin


def flags(path, **others):
    """The flags of a run that begins with the weights in `path`."""
    given = {"init_from": str(path), "init_partial": False, "resume": None, "log_dir": None}
    return Namespace(**({"evaluate": False} | given | others))


@pytest.mark.parametrize("kind", ["state_dict", "safetensors", "checkpoint"])
def test_init_from(kind, begin, tmp_path):
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    path = tmp_path / {"safetensors": "w.safetensors", "checkpoint": "last.pt"}.get(kind, "w.pt")
    if kind == "safetensors":
        save_file = pytest.importorskip("safetensors.torch").save_file
        save_file(model.state_dict(), path)
    elif kind == "checkpoint":
        checkpoint.save(tmp_path, {"model": model.state_dict()}, {})
    else:
        torch.save(model.state_dict(), path)
    assert "2 of 2 loaded" in begin(flags(path), other)
    assert torch.equal(model.weight, other.weight)


def test_init_from_names_what_does_not_fit(begin, tmp_path):
    torch.save(torch.nn.Linear(3, 2).state_dict(), tmp_path / "w.pt")
    other = torch.nn.Linear(4, 2)
    with pytest.raises(InputError, match=r"weight \(\[2, 3\] in the file\)"):
        begin(flags(tmp_path / "w.pt"), other)
    said = begin(flags(tmp_path / "w.pt", init_partial=True), other)
    assert "1 of 2 loaded; left out: weight" in said


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "module.module."]
)
def test_init_from_a_wrapped_model(prefix, begin, tmp_path):
    """pytorch 101107, nanoGPT 325."""
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    renamed = {f"{prefix}{name}": weight for name, weight in model.state_dict().items()}
    torch.save(renamed, tmp_path / "w.pt")
    begin(flags(tmp_path / "w.pt"), other)
    assert torch.equal(model.weight, other.weight)


def test_a_model_with_a_part_of_the_name_of_a_prefix(begin, tmp_path):
    model, other = (torch.nn.ModuleDict({"module": torch.nn.Linear(3, 2)}) for _ in range(2))
    torch.save(model.state_dict(), tmp_path / "w.pt")
    begin(flags(tmp_path / "w.pt"), other)
    assert torch.equal(model["module"].weight, other["module"].weight)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"<!DOCTYPE html>", "it is a web page"),
        (b"\n <html>", "it is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"", "it is damaged, or holds more than tensors"),
    ],
)
@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_init_from_a_file_without_weights(content, says, name, begin, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=says):
        begin(flags(tmp_path / name), torch.nn.Linear(3, 2))


def test_a_run_that_goes_on_needs_no_weights_to_begin_with(begin, tmp_path):
    checkpoint.save(tmp_path, {}, {})
    gone = flags(tmp_path / "gone.pt", resume="auto", log_dir=tmp_path)
    assert begin(gone, torch.nn.Linear(3, 2)) == ""


def test_weights_with_other_classes(begin, tmp_path):
    """A line says so: they are used, as a new task may have as many classes."""
    model = torch.nn.Linear(3, 2)
    state = {"model": model.state_dict(), "metadata": Metadata(classes=["cat", "dog"]).state_dict()}
    checkpoint.save(tmp_path, state, {})
    said = begin(flags(tmp_path / "last.pt"), model, classes=["cat", "emu"])
    assert said.endswith("its classes[1] is 'dog', and in this run 'emu'\n")
    assert "classes" not in begin(flags(tmp_path / "last.pt"), model, classes=["cat", "dog"])
