"""scripts/take.py: what it copies runs in test_copy_out.py."""

import json
import re
from pathlib import Path

import pytest
from launch import one_line, run
from recipes import ROOT

from scripts import take

TAKE = f"python {ROOT}/scripts/take.py"
pytestmark = pytest.mark.check


def test_what_to_install_and_to_type(tmp_path):
    said = run(f"{TAKE} {ROOT}/cifar10/hvd.py project --name train.py", tmp_path)
    assert "horovodrun -np 2 python project/train.py" in said
    assert "scripts/install_horovod.sh" in said
    taken = {path.name for path in (tmp_path / "project").glob("*")}
    assert taken == {"train.py", "cifar.py", "common", "images"}
    assert (tmp_path / "project" / "common" / "LICENSE").exists()


def test_the_command_is_that_of_the_copy(capsys):
    for recipe in take.RECIPES:
        take.say(recipe, Path("project/train.py"), changed=[])
        said = capsys.readouterr().out
        assert len(re.findall(r"^(?:run|prove): .* project/train\.py", said, re.M)) == 2, recipe


def test_files_that_are_there(tmp_path):
    """Those of others stay, and nothing else changes, until --overwrite is given."""
    (tmp_path / "common").mkdir()
    log = tmp_path / "common" / "log.py"
    log.write_text("mine\n")
    line = one_line(run(f"{TAKE} {ROOT}/mnist/single.py .", tmp_path, status=2))
    assert "differ: common/log.py" in line
    assert [path.name for path in tmp_path.rglob("*.py")] == ["log.py"]
    run(f"{TAKE} {ROOT}/mnist/single.py . --overwrite", tmp_path)
    assert log.read_bytes() == (ROOT / "common" / "log.py").read_bytes()


def test_up_to_date(tmp_path):
    """The same command again: what the user has changed stays, and all else is replaced."""
    run(f"{TAKE} {ROOT}/mnist/single.py . --name train.py", tmp_path)
    train = tmp_path / "train.py"
    train.write_text("mine\n")
    # As an older version of this repository had it.
    log = tmp_path / "common" / "log.py"
    log.write_text("older\n")
    taken = json.loads((tmp_path / take.TAKEN).read_text())
    taken["commit"] = "0123abc"
    taken["files"]["common/log.py"] = take.checksum(log)
    (tmp_path / take.TAKEN).write_text(json.dumps(taken))
    said = run(f"{TAKE} {ROOT}/mnist/single.py . --name train.py", tmp_path)
    assert f"update:  from commit 0123abc to {take.commit()}\n" in said
    assert "yours:   not replaced, because you have changed them: train.py\n" in said
    assert train.read_text() == "mine\n"
    assert log.read_bytes() == (ROOT / "common" / "log.py").read_bytes()


def test_a_module_that_ours_would_hide(tmp_path):
    (tmp_path / "common.py").touch()
    line = one_line(run(f"{TAKE} {ROOT}/mnist/single.py .", tmp_path, status=2))
    assert "common.py is there, and common/ beside it would hide it" in line
    assert [path.name for path in tmp_path.iterdir()] == ["common.py"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("mnist/digits.py project", "mnist/digits.py is not a recipe"),
        ("mnist/single.py /dev/null/project", "/dev/null"),
    ],
)
def test_refused(arguments, says):
    assert says in one_line(run(f"{TAKE} {arguments}", ROOT, status=2))
