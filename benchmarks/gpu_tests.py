"""Run the tests that need a GPU, and count what became of them.

    python benchmarks/gpu_tests.py FIGURES.json

Tests that need one have the marker ``gpu``. What each has become is written at once, for the time of this program is limited.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from stages import Found, write_json

ROOT = Path(__file__).parents[1]
MOST_WORKERS = 8
"""Most of the time goes into compiling kernels, which the processor does."""


def files_with_tests(folder: Path) -> list[Path]:
    """Those that name the marker; others are not imported."""
    return sorted(path for path in folder.rglob("test_*.py") if "pytest.mark.gpu" in path.read_text(encoding="utf-8"))


class Tally:
    """A plugin of pytest that counts."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.passed = 0
        self.failed: dict[str, str] = {}
        """The reason by test, or by file that cannot be imported."""
        self.skipped: dict[str, str] = {}
        self.num_collected = 0

    def figures(self) -> Found:
        """What is known by now."""
        num_done = self.passed + sum("::" in name for name in (*self.failed, *self.skipped))
        return {
            "passed": self.passed,
            "failed": len(self.failed),
            "skipped": len(self.skipped),
            "not_run": max(0, self.num_collected - num_done),
            "failures": self.failed,
            "reasons_to_skip": dict(Counter(self.skipped.values())),
        }

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """In one process."""
        self.num_collected = len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """In several processes, each of which collects all tests."""
        self.num_collected = len(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported, or is skipped as a whole."""
        self._note(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test, its set-up or its end."""
        if report.passed and report.when == "call":
            self.passed += 1
        self._note(report)

    def _note(self, report: Any) -> None:  # noqa: ANN401  # what both reports have in common has no public type
        if report.failed:
            lines = report.longreprtext.splitlines()
            self.failed[report.nodeid] = next((line[1:].strip() for line in lines if line.startswith("E ")), lines[-1])
        elif report.skipped:
            self.skipped[report.nodeid] = getattr(report, "wasxfail", None) or report.longrepr[2].removeprefix("Skipped: ")
        write_json(self.output, self.figures())


def main() -> None:
    """Run them; ends with a message where one failed, or on a GPU where none ran."""
    tally, is_gpu = Tally(Path(sys.argv[1])), torch.cuda.is_available()
    workers = min(MOST_WORKERS, os.cpu_count() or 1) if is_gpu else 0
    options = ["-m", "gpu", "-n", str(workers), "--continue-on-collection-errors", "-p", "no:cacheprovider", "-q"]
    status = pytest.main([*options, *map(str, files_with_tests(ROOT / "tests"))], plugins=[tally])
    if tally.failed:
        sys.exit(f"{len(tally.failed)} of {tally.num_collected} tests failed")
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        sys.exit(f"pytest ended with status {int(status)}")
    if is_gpu and not tally.passed:
        sys.exit("no test ran")


if __name__ == "__main__":
    main()
