"""Tests tell which cells of docs/equivalence.md they show; on request a run of them writes the page."""

from __future__ import annotations

import logging
import platform
from typing import Any

import lightning
import pytest
import torch
from helpers.equivalence import CLAIMS, PAGE, Claim, Outcome, claims_of, page

# Lightning keeps its messages from the root logger, where caplog reads them, if that has no handler when Lightning is imported.
logging.getLogger("lightning.pytorch").propagate = True


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that writes the page."""
    parser.addoption("--write-equivalence", action="store_true", help="write docs/equivalence.md from how the marked tests end")


def pytest_configure(config: pytest.Config) -> None:
    """Gather how tests end: in the process that all workers report to."""
    if config.getoption("--write-equivalence") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Gather(), "equivalence")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Read the markers, and have what they say travel with the tests' reports."""
    config.stash[CLAIMS] = {item.nodeid: tuple(claims_of(item)) for item in items}
    for item in items:
        for claim in config.stash[CLAIMS][item.nodeid]:
            item.user_properties.append(("claim", [claim.row, list(claim.columns), claim.is_refusal]))


class Gather:
    """Keeps how marked tests ended, and writes the page of them."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Outcome] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One of the phases of a test is over."""
        claims = tuple(Claim(row, tuple(columns), refuses) for row, columns, refuses in _properties(report, "claim"))
        before = self.outcomes.get(report.nodeid)
        # A test that has passed may still fail when it is taken down.
        if claims and (before is None or before.outcome == "passed"):
            reason = str(report.longrepr[2]).removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""
            refusal = next(iter(_properties(report, "refusal")), before.refusal if before is not None else "")
            self.outcomes[report.nodeid] = Outcome(report.nodeid, claims, report.outcome, reason, refusal)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the page, of a run that nobody has cut short."""
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device here"
        versions = (
            f"Written by `pytest --write-equivalence` with Python {platform.python_version()}, torch {torch.__version__}, "
            f"Lightning {lightning.__version__}, on {platform.system()} {platform.machine()}; GPU: {device}."
        )
        PAGE.write_text(page([self.outcomes[nodeid] for nodeid in sorted(self.outcomes)], versions))


def _properties(report: pytest.TestReport, name: str) -> list[Any]:
    return [value for key, value in report.user_properties if key == name]
