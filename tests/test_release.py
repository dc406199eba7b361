"""A release: wheel and sdist are built and checked, and the wheel works by itself."""

from __future__ import annotations

import email
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from helpers.documents import snippets

ROOT = Path(__file__).parents[1]
PACKAGE = "lightning_module_monitor"
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("release")]  # one worker makes what they share


def run(command: list[str], folder: Path, **environment: str) -> str:
    """What a command prints, without the source tree on its path.

    Raises:
        AssertionError: If its exit status is not 0.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=inherited | environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_of_source(folder: Path) -> None:
    """Copy what git knows of this repository, or would take in."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in filter(None, run(listed, ROOT).split("\0")):
        if (ROOT / name).is_file():  # else it was deleted, and that is not committed yet
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is made of the sdist; of a copy, because a build writes into its tree."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    copy_of_source(source)
    # Without isolation: an isolated build fetches setuptools, and a test runs without a network.
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), "."], source)
    return folder


def test_it_installs_from_a_git_repository_as_the_readme_says(tmp_path: Path) -> None:
    """Pip takes the command, clones the repository, and finds the package; git gets it from this machine in place of its address."""
    repository = tmp_path / "repository"
    copy_of_source(repository)
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    for arguments in (["init", "--quiet"], ["add", "."], [*identity, "commit", "--quiet", "--message", "all"]):
        run(["git", *arguments], repository)
    [command] = [line for line in snippets("sh", "README.md")[0].splitlines() if "git+" in line]
    address = command.partition("git+")[2].rstrip("'")
    instead = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"url.file://{repository}.insteadOf", "GIT_CONFIG_VALUE_0": address}
    options = ["--dry-run", "--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed", "--disable-pip-version-check"]
    printed = run([sys.executable, "-m", *shlex.split(command), *options], tmp_path, **instead)
    assert "Would install lightning-module-monitor-" in printed


@pytest.fixture(scope="module")
def python(release: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with the wheel.

    What the package depends on comes from this environment, by a path file: torch is not installed once more. Python does not read the
    path files in such a folder, so the editable install of this project, which is one, is not there.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    [wheel] = release.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], folder)
    own = Path(run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip())
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_wheel_and_sdist_are_whole(release: Path) -> None:
    """Both pass twine, the wheel has every file of the package, and the sdist what it takes to build, read and cite it."""
    archives = sorted(map(str, release.iterdir()))
    assert len(archives) == 2
    printed = run([sys.executable, "-m", "twine", "check", "--strict", *archives], release)
    assert printed.count("PASSED") == 2
    [wheel], [sdist] = release.glob("*.whl"), release.glob("*.tar.gz")
    files = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / PACKAGE).rglob("*") if "__pycache__" not in path.parts}
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith(f"{PACKAGE}/")}
    assert packed == {name for name in files if (ROOT / "src" / name).is_file()}
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml"} <= names


def test_the_citation_is_of_this_version(release: Path) -> None:
    """The file is YAML with what its format requires, and has the version and the address of the package."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    [wheel] = release.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        metadata = email.message_from_bytes(archive.read(f"{PACKAGE}-{citation['version']}.dist-info/METADATA"))
    assert metadata["Version"] == citation["version"]
    assert f"Homepage, {citation['repository-code']}" in metadata.get_all("Project-URL", [])


def test_the_wheel_works_without_the_source_tree(python: Path, tmp_path: Path) -> None:
    """The package is that of the environment, with its version, and its command is there."""
    program = f"import {PACKAGE}; print({PACKAGE}.__file__); print({PACKAGE}.__version__)"
    file, version = run([str(python), "-c", program], tmp_path).splitlines()
    assert Path(file).is_relative_to(python.parents[1])
    assert run([str(python.with_name("lightning-module-monitor")), "--version"], tmp_path).split() == ["lightning-module-monitor", version]


def test_the_demo_runs_from_the_wheel(python: Path, tmp_path: Path) -> None:
    """What ``make demo`` runs, and then the commands that read its store."""
    for folder in ("examples", "configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    target = run(["make", "--dry-run", "demo"], ROOT)
    [command] = [shlex.split(line) for line in target.splitlines() if "examples/digits.py" in line]
    printed = run([str(python), *command[1:]], tmp_path, OMP_NUM_THREADS="1")
    assert float(printed.partition("validation accuracy: ")[2].split()[0]) > 0.9
    monitor = str(python.with_name("lightning-module-monitor"))
    [store] = tmp_path.rglob("monitor.h5")
    assert "healthy" in run([monitor, "summary", str(store)], tmp_path).splitlines()[-1]
    assert "gradient/model.head.weight/norm" in run([monitor, "keys", str(store)], tmp_path)
    run([monitor, "report", str(store), "-o", "page.html"], tmp_path)
    assert (tmp_path / "page.html").stat().st_size > 100_000
