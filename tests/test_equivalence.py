"""The published matrix of ways to train has the cells that the tests' markers name."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.equivalence import PAGE, page

TESTS = Path(__file__).parent


def test_the_page_has_the_cells_that_the_tests_name(collected: list[pytest.Item], request: pytest.FixtureRequest) -> None:
    """No cell without its test, no test without its cells."""
    marked = {path for path in TESTS.rglob("test_*.py") if "pytest.mark.shows(" in path.read_text(encoding="utf-8")}
    if any("::" in argument for argument in request.config.args) or not marked <= {item.path for item in collected}:
        pytest.skip("needs all marked tests to be collected: run the whole suite")
    assert PAGE.read_text() == page(collected), "write it: python -m pytest tests --collect-only -q --write-equivalence"
