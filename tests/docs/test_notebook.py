"""docs/first_run.ipynb: each cell runs, from training to the prediction."""

import importlib.util
import json
import shutil

import pytest
from launch import need, run
from recipes import ROOT

NOTEBOOK = ROOT / "docs" / "first_run.ipynb"
# Quick without a GPU. The first epoch is long enough to stop within the others.
FLAGS = "--synthetic 2000 --model lenet -b 16 --test-batch-size 100 --device cpu"


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.check
def test_outputs_are_cleared():
    for cell in code_cells(json.loads(NOTEBOOK.read_text())):
        assert (cell["outputs"], cell["execution_count"]) == ([], None)


# jupyter_client chooses ports that another test can take before the kernel does.
@pytest.mark.flaky(reruns=2, only_rerun="Kernel died")
def test_each_cell_runs(tmp_path):
    for package in ("nbclient", "ipykernel"):
        need(importlib.util.find_spec(package), f"pip install {package}")
    for folder in ("common", "images", "mnist"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    text = NOTEBOOK.read_text()
    assert text.count('FLAGS = \\"\\"') == 1
    copy = tmp_path / "docs" / "first_run.ipynb"
    copy.parent.mkdir()
    copy.write_text(text.replace('FLAGS = \\"\\"', f'FLAGS = \\"{FLAGS}\\"'))
    here = {"IPYTHONDIR": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path)}
    run(f"jupyter execute --inplace {copy}", tmp_path, **here)
    cells = code_cells(json.loads(copy.read_text()))
    printed = ["".join(map(str, cell["outputs"])) for cell in cells]
    _, _, _, train, resume, curves, predict = printed
    assert "world size 2" in train
    assert "epoch 3/3" not in train
    assert "resumed from" in resume
    assert "epoch 3/3" in resume
    assert "image/png" in curves
    assert "of 8 are right" in predict
