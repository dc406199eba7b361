"""Wheel and sdist, built once; and an environment with the wheel."""

from __future__ import annotations

import os
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from helpers.releases import copy_of_source, run


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is made of the sdist; of a copy, because a build writes into its tree."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    copy_of_source(source)
    # Without isolation: an isolated build fetches setuptools, and a test runs without a network.
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), "."], source)
    return folder


@pytest.fixture(scope="session")
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel.

    ``make test-wheel`` names one, in which pip has installed the wheel and what it depends on. Else what it depends on comes from this
    environment, by a path file: torch is not installed once more. Python does not read the path files in such a folder, so the editable
    install of this project, which is one, is not there.
    """
    if "WHEEL_PYTHON" in os.environ:
        return Path(os.environ["WHEEL_PYTHON"]).absolute()
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    [wheel] = request.getfixturevalue("release").glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], folder)
    own = Path(run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip())
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python
