"""Wheel and sdist of a release: what they have, and what is said of them."""

from __future__ import annotations

import email
import shlex
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from helpers.documents import ROOT, snippets
from helpers.releases import copy_of_source, run

PACKAGE = "lightning_module_monitor"
LARGEST = 1_000_000
"""Bytes of the wheel."""
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("release")]  # one worker makes what they share


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
    assert wheel.stat().st_size < LARGEST


def test_the_citation_is_of_this_version(release: Path) -> None:
    """The file is YAML with what its format requires, and has the version and the address of the package."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    [wheel] = release.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        metadata = email.message_from_bytes(archive.read(f"{PACKAGE}-{citation['version']}.dist-info/METADATA"))
    assert metadata["Version"] == citation["version"]
    assert f"Homepage, {citation['repository-code']}" in metadata.get_all("Project-URL", [])
