"""The package's root: its names, and what it costs to import."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys

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
