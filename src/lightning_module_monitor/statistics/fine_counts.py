"""Quantiles and parts of tensors, from their counts in fine bins."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from lightning_module_monitor.kernels.bins_of_floats import FINE
from lightning_module_monitor.kernels.moments import Array

EDGES: Array = np.array([edge.magnitude for edge in FINE.edges])


def _middles() -> Array:
    """For each magnitude of a bin the number that no other number of the bin differs from by more than 4.4 %."""
    lower, upper = EDGES, np.append(EDGES[1:], 2.0**128)
    # Below the first edge there is no float32 but the edge itself.
    return np.append(EDGES[0], 2 * lower * upper / (lower + upper))


MIDDLES: Array = _middles()
_VALUES: Array = np.concatenate([[-np.inf], -MIDDLES[::-1], [0.0], MIDDLES, [np.inf]])
"""The middle of each bin, in the order of a row of counts, which also has a count of NaN."""


class FineCounts:
    """The counts of several tensors in the bins of ``FINE``.

    Args:
        rows: A row of counts for each tensor, whole numbers, float64.
    """

    def __init__(self, rows: Sequence[Array]) -> None:
        self._rows = np.stack(rows)

    @functools.cached_property
    def finite(self) -> Array:
        """Number of finite elements, shape ``(tensors,)``, as all that follow."""
        total: Array = self._rows[:, 1:-2].sum(1)
        return total

    @functools.cached_property
    def zeros(self) -> Array:
        """Number of zeros."""
        return self._rows[:, FINE.zero_bin]

    @functools.cached_property
    def _cumulative(self) -> Array:
        return np.cumsum(self._rows[:, :-1], axis=1)

    @functools.cached_property
    def _up_to(self) -> Array:
        """Number of elements that are not zero, below each edge, and of all of them; shape ``(tensors, edges + 2)``, from 0 on."""
        positive, negative = self._rows[:, FINE.zero_bin + 1 : -2], self._rows[:, FINE.zero_bin - 1 : 0 : -1]
        return np.pad(np.cumsum(positive + negative, axis=1), ((0, 0), (1, 0)))

    def up_to(self, magnitude: Array | float) -> Array:
        """Number of elements that are not zero, and are below an edge: for each tensor its own, or one for all.

        Args:
            magnitude: Edges of ``FINE``: powers of two, or where a cast leaves the range of a format.
        """
        edge = np.broadcast_to(np.searchsorted(EDGES, magnitude, side="right"), len(self._rows))
        return self._up_to[np.arange(len(self._rows)), edge]

    def smallest(self) -> Array:
        """The smallest magnitude that is not zero, to within 4.4 %; infinite if there is none that is finite."""
        is_empty = self._up_to[:, -1] == 0
        return np.where(is_empty, np.inf, MIDDLES[np.where(is_empty, 0, (self._up_to > 0).argmax(1) - 1)])

    def quantile(self, percent: int) -> Array:
        """The smallest element that at least so many percent of all are not larger than, to within 4.4 %.

        It is NaN for a tensor without elements, or with one that is NaN.
        """
        total = self._cumulative[:, -1]
        rank = np.maximum(np.ceil(percent * total / 100), 1)
        index = [np.searchsorted(row, of_row) for row, of_row in zip(self._cumulative, rank, strict=True)]
        return np.where((total > 0) & (self._rows[:, -1] == 0), _VALUES[np.minimum(index, len(_VALUES) - 1)], np.nan)
