"""scripts/check.py: right scripts pass, and what is wrong in a script is named by its row."""

import shlex

import pytest
from forked import ForkedJob

from scripts import check


@pytest.fixture
def checked(tmp_path, monkeypatch, capsys):
    """A function that checks a command, and returns its status and what it said."""

    def start(command, more, output, limit):
        more = {**more, "PYTHONPATH": ""}
        job = ForkedJob(shlex.join(command), tmp_path, agent=False, **more)
        status = job.finish()
        output.write(job.output())
        return status

    def of(command):
        monkeypatch.setattr(check, "start", start)
        monkeypatch.setattr("sys.argv", ["check.py", *shlex.split(command)])
        status = check.main()
        return status, capsys.readouterr().out

    return of
