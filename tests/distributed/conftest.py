"""Every scenario is run once for each number of ranks, by the worker that has all tests of this number."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.launch import finish, results, start

SCRIPT = Path(__file__).with_name("scenarios.py")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of a number of ranks are one group, as pytest-xdist distributes them."""
    for item in items:
        if isinstance(item, pytest.Function) and "run_scenarios" in item.fixturenames:
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            item.add_marker(pytest.mark.xdist_group(f"ranks_{parameters.get('num_ranks', 2)}"))


@pytest.fixture(scope="session")
def run_scenarios(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], list[Any]]:
    """Gives what a scenario returned on each rank; the first to ask runs it."""

    @functools.cache
    def run(num_ranks: int, scenario: str) -> tuple[Path, str]:
        folder = tmp_path_factory.mktemp(f"ranks_{num_ranks}")
        return folder, "\n\n".join(finish(start(SCRIPT, num_ranks, folder, scenario)))

    def run_scenario(num_ranks: int, scenario: str) -> list[Any]:
        folder, printed = run(num_ranks, scenario)
        try:
            outcomes = results(folder, scenario, num_ranks)
        except FileNotFoundError:
            pytest.fail(printed[-6000:])
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                pytest.fail(f"{outcome!r}\n{printed[-6000:]}")
        return outcomes

    return run_scenario
