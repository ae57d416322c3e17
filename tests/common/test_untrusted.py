"""Checkpoints of strangers: refused in one line, and before they take memory or time."""

import os
import zipfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common import checkpoint, untrusted, weights
from common.data import EpochSampler
from common.errors import InputError, brief, printable, show
from common.metrics import Best, Sums
from common.position import Position
from common.ranks import World

pytestmark = pytest.mark.check
FUZZ = int(os.environ.get("FUZZ", 100))  # examples; make fuzz sets more
CPU = torch.device("cpu")


def new_state():
    model = torch.nn.Linear(4, 3)
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1, 0.9, fused=True),
        "position": Position(EpochSampler(100, 7), epochs=5),
        "best": Best(),
        "sums": Sums(CPU, lambda loss: {"loss": loss}),
    }


def good():
    """What a checkpoint of such a run holds."""
    state = new_state()
    state["model"](torch.ones(2, 4)).sum().backward()
    state["optimizer"].step()
    parts = {name: part.state_dict() for name, part in state.items()}
    return {"format": checkpoint.FORMAT, "config": {"momentum": 0.9, "saved_by": "DDP"}, **parts}


def resume(path, state, momentum):
    """Resume from the file `path`, and have the --momentum of that run, or another."""
    config = {"momentum": momentum}
    checkpoint.resume(str(path), None, state, config, set(), set(), World(CPU))


def refusal(saved, folder):
    """What is said of a checkpoint with the content `saved`."""
    torch.save(saved, folder / "stranger.pt")
    with pytest.raises(InputError) as raised:
        resume(folder / "stranger.pt", new_state(), momentum=0.8)
    said = str(raised.value)
    assert len(printable(said)) < 600
    return said


def laughs():
    """A text without end: ten to the power of forty words."""
    value = "lol"
    for _ in range(40):
        value = [value] * 10
    return value


class Call:
    """What torch.load makes of it takes a petabyte."""

    def __reduce__(self):
        return bytearray, (10**15,)


@pytest.mark.parametrize("where", ["config", "junk"])
def test_lists_that_hold_each_other(where, tmp_path):
    refusal(good() | {where: laughs()}, tmp_path)


def test_a_call_for_memory(tmp_path):
    assert "it is damaged" in refusal(good() | {"junk": Call()}, tmp_path)
    torch.save({"weight": torch.zeros(1), "junk": Call()}, tmp_path / "w.pt")
    with pytest.raises(InputError, match="it is damaged"):
        weights.read_weights(str(tmp_path / "w.pt"))
    torch.save({"junk": Call()}, tmp_path / "w.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(InputError, match="it is damaged"):
        weights.read_weights(str(tmp_path / "w.pt"))


def test_an_entry_that_is_compressed(tmp_path):
    """A gigabyte of zeros takes a megabyte so."""
    torch.save(good(), tmp_path / "good.pt")
    source = zipfile.ZipFile(tmp_path / "good.pt")
    with zipfile.ZipFile(tmp_path / "small.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for entry in source.infolist():
            archive.writestr(entry.filename, source.read(entry))
        archive.writestr("archive/junk", bytes(2**20))
    for read in (checkpoint.read, untrusted.load):
        with pytest.raises((checkpoint.CorruptCheckpoint, ValueError)):
            read(tmp_path / "small.pt")


def test_what_is_refused_is_not_saved(tmp_path):
    for value in (laughs(), [bytearray(3)]):
        with pytest.raises(ValueError):
            checkpoint.save(tmp_path, {"mine": value}, {})
    assert list(tmp_path.iterdir()) == []


def test_files_of_an_old_torch(tmp_path):
    """Those of before 1.6, which are no zip, are read as before."""
    state = torch.nn.Linear(2, 2).state_dict()
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    read, *_ = weights.read_weights(str(tmp_path / "old.pt"))
    assert torch.equal(read["weight"], state["weight"])


def replaced(name, value):
    """An edit of a checkpoint: `name` is a path in it, such as position/samples."""

    def edit(saved):
        *path, last = (int(key) if key.isdecimal() else key for key in name.split("/"))
        for key in path:
            saved = saved[key]
        saved[last] = value

    return edit


SPARSE = torch.zeros(3, 4).to_sparse()
GROUP = "optimizer/param_groups/0"


@pytest.mark.parametrize(
    "name, value",
    [
        ("position/samples", -(10**18)),
        ("position/steps", 10**400),
        ("position/epoch", 1.5),
        ("position/epoch", True),
        ("best/value", "abc"),
        ("best/value", torch.zeros(3)),
        ("best/value", []),
        ("sums", "abc"),
        ("sums/loss", torch.zeros(1).expand(3)),
        ("config/momentum", torch.zeros(5)),
        ("config/saved_by", ["DDP"]),
        (f"{GROUP}/momentum", "y"),
        (f"{GROUP}/nesterov", torch.zeros(2)),
        (f"{GROUP}/params", [0]),
        ("optimizer/param_groups", []),
        ("optimizer/state/0", "abc"),
        ("optimizer/state/7", {}),
        ("optimizer/state/0/momentum_buffer", "abc"),
        ("optimizer/state/0/momentum_buffer", torch.zeros(1)),
        ("optimizer/state/0/momentum_buffer", torch.zeros(())),
        ("optimizer/state/0/momentum_buffer", torch.zeros(4, 3)),
        ("optimizer/state/0/momentum_buffer", SPARSE),
        ("optimizer/state/0/momentum_buffer", torch.zeros(3, 4, device="meta")),
        ("optimizer/state/0/momentum_buffer", torch.zeros(1).expand(300_000_000)),
        ("optimizer/state/0/junk", torch.zeros(1).expand(300_000_000)),
        ("model/weight", SPARSE),
        ("model/weight", torch.zeros(1).expand(300_000_000)),
    ],
)
def test_a_value_that_no_run_has(name, value, tmp_path):
    saved = good() | {"config": {"momentum": 0.8, "saved_by": "DDP"}}
    checkpoint.load(saved, new_state(), set())
    replaced(name, value)(saved)
    said = refusal(saved, tmp_path)
    assert said.startswith(f"--resume {tmp_path / 'stranger.pt'} does not fit this run: ")


def paths(content, start=""):
    """The paths of all values in a checkpoint."""
    children = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in children:
        path = f"{start}/{key}".lstrip("/")
        yield path
        if isinstance(value, dict | list):
            yield from paths(value, path)


TENSORS = st.sampled_from([(), (1,), (3,), (4,), (3, 4), (4, 3)]).map(torch.zeros)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | TENSORS,
    max_leaves=5,
    extend=lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner),
)


@settings(max_examples=FUZZ, deadline=None)
@given(path=st.sampled_from(list(paths(good()))), value=VALUES | st.just(10**400))
def test_fuzz_of_a_value(path, value, tmp_path_factory):
    """Any value in any place: refused in one line, or the run trains on."""
    saved = good()
    replaced(path, value)(saved)
    state = new_state()
    file = tmp_path_factory.getbasetemp() / "fuzz-of-a-value.pt"
    torch.save(saved, file)
    try:
        resume(file, state, momentum=0.9)
    except InputError as error:
        assert "\n" not in printable(str(error))
        return
    state["model"](torch.ones(2, 4)).sum().backward()
    state["optimizer"].step()
    state["best"].update(1)
    state["sums"].add(loss=1)


def test_an_option_that_is_missing_is_that_of_this_run():
    """A newer torch may have added it."""
    saved = good()
    del saved["optimizer"]["param_groups"][0]["nesterov"]
    state = new_state()
    checkpoint.load(saved, state, set())
    state["optimizer"].step()


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.Adafactor,
        torch.optim.Adagrad,
        torch.optim.Adam,
        lambda weights: torch.optim.AdamW(weights, amsgrad=True, fused=True),
        torch.optim.NAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        lambda weights: torch.optim.SGD(weights, 0.1),
        lambda weights: torch.optim.SGD([{"params": [each], "lr": 0.1} for each in weights]),
    ],
)
def test_every_optimizer_gets_its_state_back(make, tmp_path):
    models = [torch.nn.Linear(4, 3) for _ in range(2)]
    first, second = (make(list(model.parameters())) for model in models)
    models[0](torch.ones(2, 4)).sum().backward()
    first.step()
    checkpoint.save(tmp_path, {"optimizer": first.state_dict()}, {})
    saved, _ = checkpoint.read(tmp_path / "last.pt")
    checkpoint.load(saved, {"optimizer": second}, set())
    for kept, other in zip(first.state.values(), second.state.values(), strict=True):
        assert kept.keys() == other.keys()
        for name, value in kept.items():
            assert type(value) is type(other[name])
            if isinstance(value, torch.Tensor):
                assert value.dtype == other[name].dtype
                assert torch.equal(value, other[name])


@pytest.mark.parametrize(
    "weight",
    [
        SPARSE,
        torch.zeros(3, 4, device="meta"),
        torch.quantize_per_tensor(SPARSE.to_dense(), 1, 0, torch.qint8),
    ],
    ids=["sparse", "meta", "quantized"],
)
def test_weights_without_elements(weight, tmp_path):
    torch.save({"weight": weight}, tmp_path / "w.pt")
    with pytest.raises(InputError, match="not a state_dict"):
        weights.read_weights(str(tmp_path / "w.pt"))


def test_nothing_that_a_terminal_acts_on_is_printed(capsys):
    stranger = "cat\x1b]52;c;Y3VybA==\x07\x1b[2J\nepoch 5/5: acc 100%\r\u202e\udcff ä"
    show(stranger)
    said, _ = capsys.readouterr()
    assert said.count("\n") == 1
    assert said.startswith("cat\\x1b]52;c;Y3VybA==\\x07\\x1b[2J\\nepoch 5/5")
    assert said.endswith("ä\n")
    assert len(brief(laughs())) < 10_000
