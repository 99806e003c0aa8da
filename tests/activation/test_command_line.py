"""The commands, and what is said about one that does not exist."""

import pytest

from kvcanary_agent import __version__
from kvcanary_agent.__main__ import COMMANDS, main


def test_an_unknown_command_is_named_with_the_commands_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rnu", "x"]) == 2
    assert capsys.readouterr() == ("", f"kvcanary-agent: unknown command 'rnu'; there are {', '.join(COMMANDS)}\n")


def test_no_command_is_the_usage_and_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: kvcanary-agent" in capsys.readouterr().err


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr()
    assert "run " in printed.out
    assert "demo " in printed.out
    assert printed.err == ""


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvcanary-agent {__version__}\n"
