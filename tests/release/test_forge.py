"""What the public forge runs is what ``.ci/run`` runs, and its forms ask for commands that there are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.documents import ROOT

from lightning_module_monitor.cli import COMMANDS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
FORMS = [path for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")) if path.name != "config.yml"]


def cases() -> list[dict[str, str]]:
    """Target and version of Python of each job of tests.yml."""
    matrix = WORKFLOWS["tests.yml"]["jobs"]["target"]["strategy"]["matrix"]
    return [{"python": python, "target": target} for python in matrix["python"] for target in matrix["target"]] + matrix["include"]


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of all jobs."""
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_the_tests_are_those_of_ci() -> None:
    """Every target that ``.ci/run`` makes, besides the set-up; each exists."""
    in_ci = {word for line in re.findall(r"^make (.+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE) for word in line.split()}
    assert len(in_ci) > 7
    assert in_ci - {"dev"} <= {case["target"].split()[0] for case in cases()}
    for case in cases():
        command = ["make", "--dry-run", *case["target"].split()]
        assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0, case


def test_every_version_of_python_is_tested() -> None:
    """Those of the classifiers, by ``make test``; the lowest and the newest dependencies, also with the wheel."""
    versions = {name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)}
    assert {case["python"] for case in cases() if case["target"] == "test"} == versions
    targets = {case["target"] for case in cases()}
    assert targets >= {f"test-{which}" for which in ("lowest", "newest", "wheel DEPENDENCIES=lowest", "wheel DEPENDENCIES=newest")}


def test_a_tag_is_released_if_it_has_the_version_of_the_package() -> None:
    """By the name of the wheel; only the job that publishes may ask for the identity of a trusted publisher."""
    build, publish = (WORKFLOWS["release.yml"]["jobs"][name] for name in ("build", "publish"))
    [check] = [step["run"] for step in build["steps"] if step.get("run", "").startswith("test ")]
    wheel = check.partition('"')[2].rstrip('"').replace("${GITHUB_REF_NAME#v}", PROJECT["version"])
    assert wheel == f"dist/lightning_module_monitor-{PROJECT['version']}-py3-none-any.whl"
    assert "permissions" not in build
    assert publish["permissions"] == {"id-token": "write"}
    assert not any("run" in step for step in publish["steps"])


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_may_only_read_and_ends(name: str) -> None:
    """Unless it says otherwise; each job has a limit; each action has a version; each command is a target, but the check of a tag."""
    workflow = WORKFLOWS[name]
    assert workflow["permissions"]["contents"] == "read"
    assert all(job["timeout-minutes"] <= 60 for job in workflow["jobs"].values())
    for step in steps(workflow):
        assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step.get("uses", "actions/checkout@v1"))
        assert step.get("run", "make").startswith(("make", "test -f"))


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_asks_for_commands_that_there_are(path: Path) -> None:
    """Of bugs and verdicts for versions and for the verdict of the store."""
    asked = re.findall(r'"lightning-module-monitor (\w+)[^"]*"', path.read_text())
    assert {*asked} <= {command.name for command in COMMANDS}
    assert {*asked} == (set() if path.stem == "feature" else {"info", "summary"})
