"""Flags on the command line."""

import sys

import pytest

from common import flags

pytestmark = pytest.mark.check


def test_a_flag_may_have_an_underscore(monkeypatch):
    parser = flags.Parser("A script.")
    parser.add_argument("--my_flag", type=int)
    monkeypatch.setattr(sys, "argv", ["script", "--my_flag", "3"])
    assert parser.parse_args().my_flag == 3
