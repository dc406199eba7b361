"""What the whole suite shares: Lightning's log, and docs/equivalence.md, which the tests' markers make."""

from __future__ import annotations

import logging

import pytest
from helpers.equivalence import PAGE, page

# Lightning keeps its messages from the root logger, where caplog reads them, if that has no handler when Lightning is imported.
logging.getLogger("lightning.pytorch").propagate = True

COLLECTED = pytest.StashKey[list[pytest.Item]]()
"""All tests that were collected, also those that were deselected since: in the stash of pytest's config."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that writes the page."""
    parser.addoption("--write-equivalence", action="store_true", help="write docs/equivalence.md from the markers of all tests")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep all tests for the comparison with the page, or write it."""
    config.stash[COLLECTED] = list(items)
    if config.getoption("--write-equivalence"):
        PAGE.write_text(page(items))


@pytest.fixture
def collected(request: pytest.FixtureRequest) -> list[pytest.Item]:
    """All tests that were collected."""
    return request.config.stash[COLLECTED]
