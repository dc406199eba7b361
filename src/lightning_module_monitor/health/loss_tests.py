"""Tests by which losses are judged: of ranks, and of a fall between the first records."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

FALLS, MAY_FALL = 2.326, 1.645
"""Quantiles of the normal distribution for 1 % and 5 %."""
A_GOOD_PART, A_LITTLE = 0.2, 0.1
"""A loss does not fall if its records exclude, at 5 %, that it fell by a good part; a loss that fell before has stalled if they exclude
that it fell by a little."""


def rank_test(before: Sequence[float], after: Sequence[float]) -> float:
    """The normal approximation of Mann and Whitney's statistic: above 2.33, ``after`` is lower at the level of 1 %.

    >>> round(rank_test([4, 5, 6, 7, 8], [0, 1, 2, 3, 3]), 2), rank_test([1, 2], [1, 2])
    (2.61, 0.0)
    """
    earlier, later = np.asarray(before)[:, np.newaxis], np.asarray(after)[np.newaxis]
    num_pairs = len(before) * len(after)
    num_lower = (earlier > later).sum() + 0.5 * (earlier == later).sum()
    return float((num_lower - num_pairs / 2) / math.sqrt(num_pairs * (len(before) + len(after) + 1) / 12))


def excludes_fall(before: Sequence[float], after: Sequence[float], part: float) -> bool:
    """Whether ``after`` is not lower than ``before`` at the level of 5 %, and a fall by a part is excluded at the same level."""
    return rank_test(before, after) <= MAY_FALL <= rank_test(after, [(1 - part) * loss for loss in before])


def fell_at_once(first: float, after: Sequence[float], part: float = 0.0) -> bool:
    """Whether losses are below the first one by a part, and by far more than they vary."""
    mean = float(np.mean(after))
    return mean < (1 - part) * first and mean + 4 * float(np.std(after)) < first and max(after) < first


def may_have_fallen_at_once(first: float, after: Sequence[float]) -> bool:
    """Whether a fall by a good part from the first loss cannot be excluded at 1 %, or would not show in the noise."""
    mean = float(np.mean(after))
    return mean - FALLS * float(np.std(after)) < (1 - A_GOOD_PART) * max(first, mean)
