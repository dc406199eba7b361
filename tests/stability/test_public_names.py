"""What is public follows semantic versioning: each change since the last release has a line in the changelog."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.public_names import STORED, public_names

import lightning_module_monitor as package

CHANGELOG = Path(__file__).parents[2] / "CHANGELOG.md"


def not_in_changelog(released: Sequence[str], present: Sequence[str], changelog: str) -> list[str]:
    """The lines that are only in one of two lists, and whose last name the unreleased part of a changelog does not have as code."""
    unreleased = changelog.partition("## [Unreleased]")[2].partition("\n## [")[0]
    code = " ".join(re.findall(r"`([^`]+)`", unreleased))
    changed = sorted({*released} ^ {*present})
    return [line for line in changed if re.search(rf"(?<![\w-]){re.escape(name_of(line))}(?![\w-])", code) is None]


def name_of(line: str) -> str:
    """The word of a line that a changelog has: ``sites`` of ``Rule.sites``, ``--json`` of ``command summary --json``."""
    if line.startswith("json "):
        return re.findall(r"\w+", line.rpartition(":")[0])[-1]
    if line.startswith("command "):
        words = line.partition(":")[0].partition(" {")[0].split()
        return words[-1].rpartition("/")[2]
    return re.findall(r"[\w]+", line.partition("(")[0].partition(" is ")[0])[-1]


def test_a_change_of_what_is_public_is_in_the_changelog() -> None:
    """Since the last release, whose list is in the repository."""
    released = STORED.read_text(encoding="utf-8").splitlines()
    missing = not_in_changelog(released, public_names(), CHANGELOG.read_text(encoding="utf-8"))
    assert not missing, "write a line with each of these names under [Unreleased] in CHANGELOG.md; a release writes the list anew"
    assert len(released) > 250


@pytest.mark.parametrize(
    ("present", "changelog", "missing"),
    [
        ("Rule.sites\nstatistic rms", "", []),
        ("Rule.sites\nstatistic rms\nstatistic q", "- `q`: new", []),
        ("Rule.sites\nstatistic rms\nstatistic q", "- `p`: new", ["statistic q"]),
        ("Rule.sites\nstatistic rms\nstatistic q", "\n## [1.0]\n- `q`: old", ["statistic q"]),
        ("statistic rms", "- q", ["Rule.sites"]),
        ("statistic rms", "- `Rule.sites` is gone", []),
        ("Rule.sites\nstatistic rms\ncommand summary -j/--json", "- `summary --json-lines`", ["command summary -j/--json"]),
        ("Rule.sites\nstatistic rms\ncommand keys {a,b}\njson info: a[].detail: text", "- `keys`; `detail`", []),
        ("Rule.sites\nstatistic rms\nload_store(path)", "- `load_stores`", ["load_store(path)"]),
    ],
)
def test_what_the_changelog_must_have(present: str, changelog: str, missing: list[str]) -> None:
    """New lines and lines that are gone, by their last names, as code, under the heading of what is unreleased."""
    released = ["Rule.sites", "statistic rms"]
    assert not_in_changelog(released, present.splitlines(), f"## [Unreleased]\n{changelog}") == missing


def test_other_modules_say_that_they_are_internal() -> None:
    """Every module of the root, and every package, but the root itself and ``standalone``."""
    found = [
        module.name
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if module.ispkg or module.name.count(".") == 1
    ]
    public = {f"{package.__name__}.{name}" for name in ("standalone", "__main__")}
    assert len(found) > 25
    for name in {*found} - public:
        assert importlib.import_module(name).__doc__.strip().endswith("\n\nInternal: it may change in any version."), name
    for name in public:
        assert "Internal" not in importlib.import_module(name).__doc__
