"""What the whole suite shares: Lightning's log, and the seed of each test."""

from __future__ import annotations

import logging

import pytest
import torch

# Lightning keeps its messages from the root logger, where caplog reads them, if that has no handler when Lightning is imported.
logging.getLogger("lightning.pytorch").propagate = True


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test draws the same numbers whichever tests its worker has run before."""
    torch.manual_seed(0)
