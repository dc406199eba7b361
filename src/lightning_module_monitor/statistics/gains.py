r"""Gains of the gradient's norm from block to block, and a summary of them.

With :math:`h_i` the output of block i and L the loss, the gain of the transition from block i to block i + 1 is

.. math:: \gamma = \lVert \partial L / \partial h_i \rVert \; / \; \lVert \partial L / \partial h_{i+1} \rVert

In the backward pass block i + 1 multiplies the norm of the gradient by this factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Literal, NamedTuple

import numpy as np

from lightning_module_monitor.kernels.moments import Need
from lightning_module_monitor.statistics.casts import largest_magnitude
from lightning_module_monitor.statistics.registry import Statistic

EPS = 1e-30
"""A norm below this has vanished."""


NORMS = {
    "l2": Statistic(Need.SQUARES, lambda moments: np.sqrt(moments.squares)),
    "l1": Statistic(Need.MAGNITUDE, lambda moments: moments.magnitude),
    # An empty gradient has no extremes: its norm is 0.
    "linf": Statistic(Need.EXTREMES, lambda moments: np.where(moments.elements > 0, largest_magnitude(moments), 0.0)),
    "mean": Statistic(Need.MAGNITUDE, lambda moments: moments.magnitude / np.maximum(moments.elements, 1.0)),
}
"""Measures of a gradient's size: Euclidean norm, sum of magnitudes, largest magnitude, and mean magnitude, which is not a norm and does
not grow with the number of elements."""


class Thresholds(NamedTuple):
    """The range of healthy gains. It is heuristic: gains of a healthy network may lie outside."""

    damping: float = 0.5
    """A gain below is damping."""
    amplifying: float = 2.0
    """A gain above is amplifying."""


HEURISTIC = Thresholds()

Category = Literal["healthy", "amplifying", "damping", "vanishing", "missing", "undefined"]


@dataclass(frozen=True)
class Transition:
    """The change of the gradient between two consecutive blocks."""

    gain: float | None
    """None if one of the blocks has no gradient; inf if the later block's norm has vanished."""
    log_gain: float | None
    """Natural logarithm of the gain: inf if the later block's norm has vanished, else -inf if the earlier block's norm has."""
    category: Category
    """``vanishing``: the later block's norm has vanished. ``missing``: a block has no gradient. ``undefined``: a gradient is
    NaN, or both are infinite."""


def transitions(norms: Sequence[float | None], eps: float, thresholds: Thresholds) -> list[Transition]:
    """The transitions between blocks.

    Args:
        norms: Norm of the gradient at each block's output, in the order of the forward pass; ``None`` without a gradient.
        eps: A norm below this has vanished.
        thresholds: The range of healthy gains.

    Returns:
        One transition fewer than blocks.
    """
    changes = []
    for earlier, later in pairwise(norms):
        if earlier is None or later is None:
            changes.append(Transition(None, None, "missing"))
        elif later < eps:
            changes.append(Transition(math.inf, math.inf, "vanishing"))
        else:
            gain = earlier / later
            # The difference of logarithms: a quotient may leave the range of floats.
            log_gain = -math.inf if earlier < eps else math.log(earlier) - math.log(later)
            changes.append(Transition(gain, log_gain, _category(gain, thresholds)))
    return changes


def _category(gain: float, thresholds: Thresholds) -> Category:
    if math.isnan(gain):
        return "undefined"
    if gain > thresholds.amplifying:
        return "amplifying"
    return "damping" if gain < thresholds.damping else "healthy"


COUNTED: tuple[Category, ...] = ("amplifying", "damping", "healthy", "vanishing", "missing")
"""The categories that the summary counts. Undefined transitions make its means NaN."""

SUMMARY = ("mean_gain", "min_gain", "max_gain", "mean_log_gain", *(f"num_{category}" for category in COUNTED))
"""The names in a summary, in order."""


def summary(changes: Sequence[Transition]) -> dict[str, float | int | None]:
    """The summary of transitions: value by name of :data:`SUMMARY`.

    Mean, minimum and maximum leave infinite gains and logarithms out. They are ``None`` if nothing is left, and NaN if a gain is NaN.
    """
    gains = [change.gain for change in changes if change.gain is not None and not math.isinf(change.gain)]
    log_gains = [change.log_gain for change in changes if change.log_gain is not None and not math.isinf(change.log_gain)]
    categories = [change.category for change in changes]
    values: list[float | int | None] = []
    for function, numbers in ((fmean, gains), (min, gains), (max, gains), (fmean, log_gains)):
        has_nan = any(map(math.isnan, numbers))  # `min` and `max` of Python may ignore NaN
        values.append(math.nan if has_nan else function(numbers) if numbers else None)
    return dict(zip(SUMMARY, [*values, *map(categories.count, COUNTED)], strict=True))
