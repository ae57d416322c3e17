"""benchmarks/allreduce.py: its table and its JSON agree, under torchrun and Horovod."""

import json
import re

import pytest
import runs
from forked import compute
from launch import need_horovod, one_line
from recipes import ROOT, commands

SCRIPT = ROOT / "benchmarks" / "allreduce.py"
TORCHRUN, HOROVODRUN, _MPIRUN = commands(SCRIPT)


@pytest.mark.parametrize(("command", "backend"), [(TORCHRUN, "gloo"), (HOROVODRUN, "horovod-gloo")])
def test_docstring_command(command, backend, tmp_path):
    if command == HOROVODRUN:
        need_horovod("gloo")
    flags = f"--max-bytes 70 --repeats 2 --json {tmp_path}/out.json"
    output = compute(f"{command} {flags}", cwd=ROOT)
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["backend"], result["processes"], result["hosts"]) == (backend, 2, 1)
    assert [size["bytes"] for size in result["sizes"]] == [4, 16, 64]
    row = r"^\| (\d+) \| ([\d.]+) \| \d+% \| ([\d.]+) \| ([\d.]+) \|$"
    rows = re.findall(row, output, re.MULTILINE)
    for size, (length, microseconds, algorithm, bus) in zip(result["sizes"], rows, strict=True):
        assert int(length) == size["bytes"]
        assert float(microseconds) == pytest.approx(size["seconds"] * 1e6, abs=0.06)
        assert float(algorithm) == pytest.approx(size["bytes"] / size["seconds"] / 1e9, abs=6e-4)
        assert bus == algorithm, "with two processes 2 (p-1)/p is 1"


def test_each_launcher(tmp_path):
    """Without a launcher it starts itself under those that are here."""
    flags = f"--max-bytes 70 --repeats 2 --processes 2 --out {tmp_path}"
    compute(f"python {SCRIPT} {flags}", cwd=tmp_path)
    (measured,) = runs.read(tmp_path / "allreduce.jsonl")
    backends = [run["backend"] for run in measured["runs"]]
    assert backends[0] == "gloo"
    assert len(backends) == len(runs.launchers())
    assert "| bytes | gloo, 2 processes: us | GB/s |" in (tmp_path / "allreduce.md").read_text()


def test_one_process(tmp_path):
    line = one_line(compute(f"torchrun --nproc-per-node=1 {SCRIPT}", cwd=tmp_path, status=2))
    assert "one process has nothing to reduce" in line
