"""The command line as a whole: the console script, its commands, and the errors of wrong commands."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from lightning_module_monitor import cli

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]


def test_the_console_script_is_this_function() -> None:
    """The console script ``lightning-module-monitor`` of pyproject.toml."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert list(scripts) == ["lightning-module-monitor"]
    assert EntryPoint("", scripts["lightning-module-monitor"], "console_scripts").load() is cli.main


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """With its description."""
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    words = " ".join(capsys.readouterr().out.split())
    for command in cli.COMMANDS:
        assert f"{command.name} {command.help}" in words


@pytest.mark.parametrize("arguments", [[], ["reportt", "x.h5"], ["summary"], ["summary", "x.h5", "--no"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2 and a line on stderr."""
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "error: " in capsys.readouterr().err.splitlines()[-1]
