"""Cases of a test that are run by ``make test``, and others that are slow: all of them are run by ``make test-all``."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def spread(*values: Iterable[Any], stride: int = 3) -> list[Any]:
    """All combinations of parameters, of which those are quick whose indices add up to a multiple of ``stride``.

    They are spread evenly: each combination of all parameters but one that has at least ``stride`` values has a quick case.
    """
    combinations = itertools.product(*(enumerate(each) for each in values))
    return [
        pytest.param(
            *(value for _index, value in numbered), marks=[pytest.mark.slow] if sum(index for index, _value in numbered) % stride else []
        )
        for numbered in combinations
    ]
