"""The package's root: its names, and what it costs to import."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_module_monitor as package


@pytest.mark.parametrize("name", package.__all__)
def test_every_public_name_comes_from_its_home(name: str) -> None:
    """The root has what the home has, and lists it."""
    home = importlib.import_module(f"{package.__name__}.{package._HOME_BY_NAME[name]}")
    assert getattr(package, name) is getattr(home, name)
    assert name in dir(package)


def test_what_it_does_not_have_is_an_attribute_error() -> None:
    """As of any module."""
    assert set(package._HOME_BY_NAME) == {*package.__all__}
    with pytest.raises(AttributeError, match="has no attribute 'load_stores'"):
        _ = package.load_stores


def test_who_reads_a_store_does_not_wait_for_torch() -> None:
    """Neither torch nor Lightning is imported, by the reader nor by the command line's help."""
    program = (
        "import contextlib, sys; from lightning_module_monitor import cli, load_store\n"
        "with contextlib.suppress(SystemExit): cli.main(['--help'])\n"
        "print([name for name in ('torch', 'lightning', 'pandas', 'plotly') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_version_is_that_of_the_metadata() -> None:
    """In Python and on the command line, which is also a module to run."""
    version = importlib.metadata.version("lightning-module-monitor")
    assert package.__version__ == version
    for program in (["-m", "lightning_module_monitor"], ["-c", "from lightning_module_monitor.cli import main; main()"]):
        done = subprocess.run([sys.executable, *program, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout == f"lightning-module-monitor {version}\n"


def test_the_lowest_versions_are_those_of_pyproject() -> None:
    """``make test-lowest`` pins every lower bound of the dependencies and of the extra ``test-core``, which names other extras."""
    root = Path(__file__).parents[1]
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    [named] = re.findall(r"lightning-module-monitor\[(.*?)\]", extras["test-core"][0])
    needed = [*project["dependencies"], *extras["test-core"][1:], *(one for name in named.split(",") for one in extras[name])]
    bounds = dict(re.fullmatch(r"([\w-]+)(?:\[\w+\])?>=([\w.]+)", one).groups() for one in needed)
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", (root / "constraints-lowest.txt").read_text(), re.MULTILINE))
    assert len(bounds) > 20
    assert {name: pins.get(name) for name in bounds} == bounds


def test_a_dependency_is_imported() -> None:
    """A dependency that no file imports would be installed for nothing."""
    root = Path(__file__).parents[1]
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    dependencies = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[\[>=]", dependency)[0].replace("-", "_") for dependency in dependencies}
    sources = "\n".join(path.read_text() for path in (root / "src").rglob("*.py"))
    assert len(names) > 5
    assert names == {name for name in names if re.search(rf"^\s*(from|import) {name}\b", sources, re.MULTILINE)}
