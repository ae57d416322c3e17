"""Flags on the command line."""

from pathlib import Path

import pytest

from common import flags
from common.errors import InputError

pytestmark = pytest.mark.check


@pytest.fixture
def parser():
    parser = flags.Parser("A script.")
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--table", metavar="FILE")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tracking", help="a URL")
    flags.add_training_flags(parser, epochs=5, batch_size=64, lr=0.1)
    return parser


def test_which_flags_may_differ_when_a_run_resumes(parser):
    """Those of this run, also with a group of their own, and not those of training."""
    parser.add_run_group()("--workers", type=int)
    parser.add_run_group("tracking")("--entity")
    may_change = set(parser.parse_args([]).may_change)
    assert {"workers", "entity", "epochs", "lr", "resume", "log_dir"} <= may_change
    assert not {"data_dir", "tracking", "seed", "momentum", "warmup_epochs"} & may_change


@pytest.mark.parametrize(
    "words",
    [
        "--log-dir s3://bucket/run",
        "--log-dir=s3://bucket/run",
        "--data-dir gs://bucket",
        "--table https://host/a.csv",
        "--out hdfs://a/b",
        "--resume s3://bucket/last.pt",
        "--init-from https://host/model.pth",
    ],
)
def test_a_path_is_no_url(words, parser):
    """It would become a local folder s3:."""
    with pytest.raises(InputError, match="give a local path") as raised:
        parser.parse_args(words.split())
    assert str(raised.value).startswith(words.replace("=", " ").partition("://")[0])


def test_what_is_no_url(parser):
    """A name with a colon, and the URL of a flag that takes no path."""
    words = "--log-dir runs/at-12:30 --out a:b --tracking http://host"
    args = parser.parse_args(words.split())
    assert args.log_dir == "runs/at-12:30"
    assert args.tracking == "http://host"


@pytest.mark.parametrize("flag", ["timeout", "epochs", "max-steps", "batch-size", "log-interval"])
def test_a_number_that_a_timer_or_a_tensor_cannot_hold(flag, parser):
    assert vars(parser.parse_args([f"--{flag}", "2147483647"]))[flag.replace("-", "_")] == 2**31 - 1
    with pytest.raises(InputError, match="99999999999 is above 2147483647"):
        parser.parse_args([f"--{flag}", "99999999999"])


@pytest.mark.parametrize("flag", ["--log-dir", "--data-dir", "--table", "--out", "--resume", "to"])
def test_a_path_is_not_empty(flag, parser):
    """As in --log-dir "$RUN" --resume auto, which began anew in a new folder each time."""
    parser.add_argument("to", type=Path, nargs="?")
    words = [""] if flag == "to" else [flag, ""]
    with pytest.raises(InputError, match=f"^{flag} is empty: give a path"):
        parser.parse_args(words)
    assert parser.parse_args(["--tracking", ""]).tracking == ""


def test_a_default_may_be_an_empty_path(parser):
    parser.add_argument("--cache-dir", default="")
    assert parser.parse_args([]).cache_dir == ""


def test_a_home_is_found(parser, monkeypatch):
    """Also where no shell has seen the word, as in a list of arguments of a job."""
    monkeypatch.setenv("HOME", "/home/me")
    words = ["--log-dir", "~/run", "--data-dir=~", "--out", "~/out", "--tracking", "~/no path"]
    args = parser.parse_args(words)
    assert (args.log_dir, args.data_dir) == ("/home/me/run", "/home/me")
    assert args.out == Path("/home/me/out")
    assert args.tracking == "~/no path"
