"""scripts/take.py: what it copies runs in test_copy_out.py."""

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
        take.say(recipe, Path("project/train.py"))
        said = capsys.readouterr().out
        assert len(re.findall(r"^(?:run|prove): .* project/train\.py", said, re.M)) == 2, recipe


def test_files_that_are_there(tmp_path):
    """One that differs stays, and nothing else changes, until --overwrite is given."""
    run(f"{TAKE} {ROOT}/mnist/single.py .", tmp_path)
    log = tmp_path / "common" / "log.py"
    log.write_text("mine\n")
    (tmp_path / "digits.py").unlink()
    line = one_line(run(f"{TAKE} {ROOT}/mnist/single.py .", tmp_path, status=2))
    assert "differ: common/log.py" in line
    assert log.read_text() == "mine\n"
    assert not (tmp_path / "digits.py").exists()
    run(f"{TAKE} {ROOT}/mnist/single.py . --overwrite", tmp_path)
    assert log.read_bytes() == (ROOT / "common" / "log.py").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("mnist/digits.py project", "mnist/digits.py is no recipe"),
        ("mnist/single.py /dev/null/project", "/dev/null"),
    ],
)
def test_refused(arguments, says):
    assert says in one_line(run(f"{TAKE} {arguments}", ROOT, status=2))
