"""Quantiles and parts of tensors, from their counts in fine bins."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.kernels.bins_of_floats import FINE
from lightning_module_monitor.kernels.moments import Array

EDGES: Array = np.array([edge.magnitude for edge in FINE.edges])


_UPPER_EDGES = np.append(EDGES[1:], 2.0**128)
MIDDLES: Array = np.append(EDGES[0], 2 * EDGES * _UPPER_EDGES / (EDGES + _UPPER_EDGES))
"""For each magnitude of a bin the number that no other number of the bin differs from by more than 4.4 %. Below the first edge there is no
float32 but the edge itself."""
_VALUES: Array = np.concatenate([[-np.inf], -MIDDLES[::-1], [0.0], MIDDLES, [np.inf]])
"""The middle of each bin, in the order of a row of counts, which also has a count of NaN."""


class FineCounts:
    """The counts of several tensors in the bins of ``FINE``.

    Args:
        rows: A row of counts for each tensor, whole numbers, float64.
    """

    def __init__(self, rows: Sequence[Array]) -> None:
        whole = np.stack(rows)
        # A tensor fills few of the bins.
        self._columns = np.flatnonzero(whole.any(0))
        self._counts = whole[:, self._columns]
        self.zeros: Array = whole[:, FINE.zero_bin]
        """Number of zeros, shape ``(tensors,)``."""
        self.finite: Array = whole[:, 1:-2].sum(1)
        """Number of finite elements."""

    @functools.cached_property
    def _by_magnitude(self) -> tuple[NDArray[np.int64], Array]:
        """The distances of the filled bins of finite numbers but zero, ascending; numbers of elements before each, and of all of them."""
        distances = np.abs(self._columns - FINE.zero_bin)
        order = np.argsort(distances, kind="stable")
        order = order[(distances[order] > 0) & (distances[order] < FINE.zero_bin)]
        return distances[order], np.pad(np.cumsum(self._counts[:, order], axis=1), ((0, 0), (1, 0)))

    def up_to(self, magnitude: Array | float) -> Array:
        """Number of elements that are not zero, and are below an edge: for each tensor its own, or one for all.

        Args:
            magnitude: Edges of ``FINE``: powers of two, or where a cast leaves the range of a format.
        """
        distances, before = self._by_magnitude
        last_bin = np.searchsorted(EDGES, magnitude, side="right")
        index = np.broadcast_to(np.searchsorted(distances, last_bin, side="right"), len(before))
        return before[np.arange(len(before)), index]

    def smallest(self) -> Array:
        """The smallest magnitude that is not zero, to within 4.4 %; infinite if there is none that is finite."""
        distances, before = self._by_magnitude
        middles = np.append(np.inf, MIDDLES[distances - 1])  # the first for a tensor without any
        smallest: Array = middles[(before > 0).argmax(1)]
        return smallest

    @functools.cached_property
    def _cumulative(self) -> tuple[Array, Array]:
        """The middles of the filled bins, ascending, and for each tensor the number of elements up to each."""
        ordered = self._columns < FINE.num_counts - 1
        return _VALUES[self._columns[ordered]], np.cumsum(self._counts[:, ordered], axis=1)

    def quantile(self, percent: int) -> Array:
        """The smallest element that at least so many percent of all are not larger than, to within 4.4 %.

        It is NaN for a tensor without elements, or with one that is NaN.
        """
        values, cumulative = self._cumulative
        num_nan = self._counts[:, self._columns == FINE.num_counts - 1].sum(1)
        if not len(values):
            return np.full(len(cumulative), np.nan)
        total = cumulative[:, -1]
        rank = np.maximum(np.ceil(percent * total / 100), 1)
        index = (cumulative < rank[:, np.newaxis]).sum(1)
        return np.where((total > 0) & (num_nan == 0), values[np.minimum(index, len(values) - 1)], np.nan)
