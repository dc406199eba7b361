"""Every set of scenarios is run once, by whichever worker comes first."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed.scenarios import TOGETHER
from filelock import FileLock
from helpers.launch import finish, results, start

SCRIPT = Path(__file__).with_name("scenarios.py")


@pytest.fixture(scope="session")
def run_scenarios(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], list[Any]]:
    """Gives what one scenario returned on each rank; the first to ask runs all that are run together."""
    base = tmp_path_factory.getbasetemp()
    # Workers share the parent of their base folders; without workers that belongs to all runs.
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def run(num_ranks: int, scenario: str) -> list[Any]:
        folder = shared / f"ranks_{num_ranks}"
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                folder.mkdir()
                messages = finish(start(SCRIPT, num_ranks, folder, *TOGETHER[num_ranks]))
                (folder / "output.txt").write_text("\n\n".join(messages))
        text = (folder / "output.txt").read_text()
        try:
            outcomes = results(folder, scenario, num_ranks)
        except FileNotFoundError:
            pytest.fail(text[-6000:])
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                pytest.fail(f"{outcome!r}\n{text[-6000:]}")
        return outcomes

    return run
