"""results.jsonl, of a run that goes on."""

import pytest
from launch import evaluations, run
from recipes import ROOT

SINGLE = f"python {ROOT}/mnist/single.py --synthetic 640 --epochs 1 --model lenet --device cpu"


@pytest.mark.parametrize("line", [b'{"step": 10, "ep\0\xff\xfe', b'{"note": "mine"}\n', b"[1]\n"])
def test_lines_of_others_in_the_results(line, tmp_path):
    run(f"{SINGLE} --log-dir log", tmp_path)
    path = tmp_path / "log" / "results.jsonl"
    path.write_bytes(path.read_bytes() + line)
    run(SINGLE.replace("--epochs 1", "--epochs 2") + " --log-dir log --resume auto", tmp_path)
    assert [event["epoch"] for event in evaluations(tmp_path / "log")] == [1, 2]
