"""docs/first_run.ipynb: each cell runs, from training to the prediction."""

import importlib.util
import json
import sys

import pytest
from forked import compute
from launch import ENVIRONMENT, need
from recipes import ROOT, waiting_copy

NOTEBOOK = ROOT / "docs" / "first_run.ipynb"
# Two ranks take 20 steps in an epoch.
FLAGS = "--synthetic 640 --model lenet -b 16 --test-batch-size 100 --device cpu"
# IPython is what Jupyter runs cells with.
RUN_CELLS = """
import json
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
with open("first_run.ipynb") as file:
    cells = [cell for cell in json.load(file)["cells"] if cell["cell_type"] == "code"]
for number, cell in enumerate(cells, 1):
    print(f"cell {number}:", flush=True)
    shell.run_cell("".join(cell["source"])).raise_error()
"""
# torchrun with its ranks as forks, which do not import torch again
TORCHRUN = """#!{python}
import sys
from pathlib import Path

sys.path.append("{helpers}")
import forked
import torch._dynamo

if Path("runs").exists():
    # Ranks that resume do not wait.
    Path("told").touch()
forked.run_torchrun(sys.argv[1:])
"""


@pytest.mark.check
def test_outputs_are_cleared():
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        assert not cell.get("outputs") and not cell.get("execution_count")


def test_each_cell_runs(tmp_path):
    for package in ("IPython", "matplotlib"):
        need(importlib.util.find_spec(package), f"pip install {package}")
    # The ranks wait in the second epoch until the cell tells them to stop.
    waiting_copy(tmp_path, "mnist/ddp_launch.py", steps=21)
    docs, programs = tmp_path / "docs", tmp_path / "bin"
    docs.mkdir()
    programs.mkdir()
    text = NOTEBOOK.read_text()
    assert text.count('FLAGS = \\"\\"') == 1
    (docs / "first_run.ipynb").write_text(text.replace('FLAGS = \\"\\"', f'FLAGS = \\"{FLAGS}\\"'))
    (docs / "run_cells.py").write_text(RUN_CELLS)
    helpers = ROOT / "tests" / "helpers"
    (programs / "torchrun").write_text(TORCHRUN.format(python=sys.executable, helpers=helpers))
    (programs / "torchrun").chmod(0o755)
    environment = {
        "PATH": f"{programs}:{ENVIRONMENT['PATH']}",
        "IPYTHONDIR": str(tmp_path),
        "MPLBACKEND": "agg",
    }
    printed = compute("python run_cells.py", docs, **environment)
    _, _, _, _, train, resume, _, predict, horovod = printed.split("cell ")
    assert "world size 2" in train and "epoch 3/3" not in train
    assert "resumed from" in resume and "epoch 3/3" in resume
    assert "of 8 are right" in predict
    there = importlib.util.find_spec("horovod")
    assert ("epoch 1/1" if there else "Build it first") in horovod
