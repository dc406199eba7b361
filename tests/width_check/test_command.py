"""The command line ``lightning-module-monitor coordinate-check``: its output and files, exit statuses, one-line errors."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.widths import WideMlp

from lightning_module_monitor import coordinate_check
from lightning_module_monitor.cli import main

ROOT = Path(__file__).parents[2]
MODEL = {"class_path": "helpers.widths.WideMlp", "init_args": {"learning_rate": 0.01}}
CONFIG = {"model": MODEL, "width_argument": "width", "widths": [16, 32, 64], "seeds": 2, "tolerance": 0.2}


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "160")


def run(capsys: pytest.CaptureFixture[str], config: object = None, *flags: str, **changes: Any) -> tuple[int, str, str]:
    """Run the command on a configuration; returns status, stdout and stderr."""
    Path("check.yaml").write_text(yaml.safe_dump({**CONFIG, **changes} if config is None else config))
    status = main(["coordinate-check", "check.yaml", *flags])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def error(capsys: pytest.CaptureFixture[str], config: object = None, *flags: str, **changes: Any) -> str:
    """The one line that is printed for a wrong command."""
    status, out, err = run(capsys, config, *flags, **changes)
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    return line.removeprefix("lightning-module-monitor coordinate-check: error: ")


def test_table_and_status_are_those_of_python(capsys: pytest.CaptureFixture[str]) -> None:
    """The same rows as the function gives; status 1 where a module offends, 0 where none does."""
    expected = coordinate_check(lambda width: WideMlp(width, learning_rate=0.01), [16, 32, 64], seeds=2, tolerance=0.2, quiet=True)
    assert not expected.is_sound  # the standard parametrization against mup
    status, out, _err = run(capsys)
    assert status == 1
    assert f"{expected['net.0', 'effective_update'].exponent:+.2f}" in out
    assert out.splitlines()[-1] == expected.summary
    assert run(capsys, tolerance=3)[0] == 0


def test_every_option_arrives(capsys: pytest.CaptureFixture[str]) -> None:
    """Data, steps, terms, exponents by pattern, options of the Trainer; table and figure are written."""
    status, out, _err = run(
        capsys,
        None,
        "--figure=check.png",
        "--table=check.csv",
        data={"class_path": "helpers.widths.Gaussian", "init_args": {"num_batches": 3}},
        widths=[16, 64],
        seeds=[5, 7, 9],
        steps=2,
        terms="effective_update",
        parametrization={"net.0": -9},
        confidence=0.8,
        trainer={"accelerator": "cpu"},
    )
    assert status == 1
    assert "Exponents of width against exponents of your own: widths 16, 64; 3 seeds, 2 steps" in out
    assert "propagating" not in out
    header, first, *rest = Path("check.csv").read_text().splitlines()
    assert header == "module,role,term,exponent,lower,upper,expected,verdict,note"
    assert re.fullmatch(r"net\.0,input,effective_update,\S+,-9\.0,grows,", first)
    assert len(rest) == 2
    assert Path("check.png").read_bytes().startswith(b"\x89PNG")


def test_classes_of_the_current_folder_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    """As with ``python -m``: a project need not be installed."""
    Path("my_own_project.py").write_text("from helpers.widths import WideMlp\n\nclass Mine(WideMlp):\n    pass\n")
    status, out, _err = run(capsys, model="my_own_project.Mine")
    assert status in (0, 1)
    assert "net.4" in out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"widths": [16]}, r"widths is \[16\]; expected at least two, .*"),
        ({"parametrization": "sp"}, "parametrization is 'sp'; expected mup, or exponents by pattern of module names, .*"),
        ({"parametrisation": "mup"}, "CONFIG has the key 'parametrisation'; expected some of .*; nearest: 'parametrization'"),
        ({"width_argument": "size"}, "model is wrong: .*Option 'size' is not accepted"),
        ({"width_argument": 3}, "width_argument is 3; expected the name of one of the model's init_args."),
        ({"model": "helpers.widths.Wide"}, "model is wrong: Problem with given class_path 'helpers.widths.Wide': .*"),
        ({"model": "torch.nn.Linear"}, "model is wrong: .*does not correspond to a subclass of LightningModule"),
        ({"model": {"init_args": {}}}, r"model is .*; expected class_path, and perhaps init_args\."),
        ({"model": MODEL | {"init_args": {"learning_rate": "fast"}}}, r"model is wrong: .*learning_rate.*float.*fast"),
        ({"model": MODEL | {"init_args": [3]}}, r"model.init_args is \[3\]; expected arguments by name."),
        ({"data": "torch.nn.Linear"}, "data is wrong: .*does not correspond to a subclass of LightningDataModule"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_configuration_is_one_line(capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str) -> None:
    """The wrong value and the expected one; status 2."""
    assert re.fullmatch(message, error(capsys, **changes))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", r"CONFIG 'check.yaml' holds \[1, 2\]; expected keys model, width_argument, widths, ..."),
        ("model: {", "CONFIG 'check.yaml' is no YAML (.*)."),
        ("model: x.Y", "CONFIG has no 'width_argument'; expected at least model, width_argument, widths."),
        (None, "CONFIG 'check.yaml' cannot be read (.*)."),
    ],
)
def test_a_file_that_is_no_configuration(capsys: pytest.CaptureFixture[str], text: str | None, message: str) -> None:
    """As above."""
    if text is not None:
        Path("check.yaml").write_text(text)
    assert main(["coordinate-check", "check.yaml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)


def test_where_nothing_can_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    """An error before anything is trained."""
    assert error(capsys, None, "--figure=nowhere/check.png") == "'nowhere/check.png' cannot be written: there is no folder 'nowhere'."


@pytest.mark.parametrize(("package", "flag", "extra"), [("jsonargparse", "", "cli"), ("matplotlib", "--figure=f.png", "plot")])
def test_without_an_extra(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, package: str, flag: str, extra: str) -> None:
    """The line has the command that installs it."""
    real = importlib.import_module

    def refuse(name: str, *args: Any) -> Any:
        if name == package:
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(importlib, "import_module", refuse)
    flags = [flag] if flag else []
    assert error(capsys, None, *flags) == f"{package} is not installed. Install it with: pip install 'lightning-module-monitor[{extra}]'"


def test_a_training_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither sound nor offending nor wrong usage: the traceback, and status 3."""
    Path("failing.py").write_text(
        "from helpers.widths import WideMlp\n\n"
        "class Fails(WideMlp):\n    def forward(self, x):\n        raise ZeroDivisionError('of the model')\n"
    )
    status, out, err = run(capsys, model="failing.Fails")
    assert (status, out) == (3, "")
    assert err.splitlines()[-1] == "ZeroDivisionError: of the model"


def test_the_configuration_in_configs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs from the repository's root, finds muP sound, and names every option there is, with its default."""
    monkeypatch.chdir(ROOT)
    path = Path("configs/coordinate_check.yaml")
    assert main(["coordinate-check", str(path)]) == 0
    assert "no offending module" in capsys.readouterr().out
    config = yaml.safe_load(path.read_text())
    from lightning_module_monitor.width_check import command

    assert set(config) == {*command.COMMAND_KEYS, *command.CHECK_OPTIONS}


def test_help_has_an_example_that_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    """The YAML of the help is parsed, and its keys are those of the command."""
    with pytest.raises(SystemExit) as stop:
        main(["coordinate-check", "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    example = yaml.safe_load(out.partition("with check.yaml:\n")[2].partition("  and, as in Python")[0])
    from lightning_module_monitor.width_check import command

    assert set(example) <= {*command.COMMAND_KEYS, *command.CHECK_OPTIONS}
    assert set(command.REQUIRED) <= set(example)
    for status in ("0  no module offends", "1  some module does", "2  the command, or CONFIG, is wrong", "3  a training failed"):
        assert status in out
