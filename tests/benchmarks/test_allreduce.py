"""benchmarks/allreduce.py under each launcher: its table, and its JSON."""

import json
import re
import signal

import pytest
from forked import compute
from launch import Job, need_horovod
from recipes import ROOT, commands

SCRIPT = ROOT / "benchmarks" / "allreduce.py"


@pytest.mark.parametrize(
    ("command", "backend"),
    list(zip(commands(SCRIPT), ("gloo", "horovod-gloo", "horovod-mpi"), strict=True)),
)
def test_docstring_command(command, backend, tmp_path):
    if backend.startswith("horovod"):
        need_horovod(backend)
    output = compute(
        f"{command} --max-bytes 5000 --repeats 2 --json {tmp_path}/out.json",
        cwd=ROOT,
    )
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["backend"], result["processes"], result["hosts"]) == (backend, 2, 1)
    assert [size["bytes"] for size in result["sizes"]] == [4**k for k in range(1, 7)]
    assert all(size["seconds"] > 0 and size["spread"] >= 0 for size in result["sizes"])
    assert {"python", "torch"} <= result["versions"].keys()
    assert result["hardware"]["cores"] and result["date"]
    rows = re.findall(
        r"^\| ([\d,]+) \| ([\d.]+) \| \d+% \| ([\d.]+) \| ([\d.]+) \|$",
        output,
        re.MULTILINE,
    )
    assert len(rows) == 6, output
    for size, (length, microseconds, algorithm, bus) in zip(result["sizes"], rows, strict=True):
        assert int(length.replace(",", "")) == size["bytes"]
        assert float(microseconds) == pytest.approx(size["seconds"] * 1e6, abs=0.06)
        assert float(algorithm) == pytest.approx(size["bytes"] / size["seconds"] / 1e9, abs=6e-4)
        assert bus == algorithm, "with two processes 2 (p-1)/p is 1"


def test_wrong_inputs(tmp_path):
    for flags, complaint in (
        ("", "start it with a launcher, torchrun --nproc-per-node=2"),
        ("--max-bytes 3", "3 is not at least 4"),
        ("--json no/out.json", "folder does not exist"),
    ):
        output = compute(f"python {SCRIPT} {flags}", cwd=tmp_path, status=2)
        assert complaint in output
        assert output.count("\n") == 1


def test_ctrl_c(tmp_path):
    job = Job(
        f"exec torchrun --standalone --nproc-per-node=2 {SCRIPT} --repeats 100000", cwd=tmp_path
    )
    job.wait_for("bus bandwidth")
    job.signal(signal.SIGINT)
    assert job.finish() != 0
    assert 'allreduce.py", line' not in job.output(), "no rank prints a traceback"
