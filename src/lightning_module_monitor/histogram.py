"""Histograms with fixed bins: one bin for each power of two and sign, so that histograms of any steps and ranks can be added.

Internal: it may change in any version.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

LOWEST_EXPONENT = -64
HIGHEST_EXPONENT = 63
"""A bin for each power of two from 2**-64 to 2**63. Squares of larger or smaller magnitudes exceed float32."""

NUM_BINS = 2 * (HIGHEST_EXPONENT - LOWEST_EXPONENT + 1 + 2) + 1
"""261: for each sign a bin for each power of two, for smaller and for larger magnitudes; and a bin for zero."""

NONFINITE = ("-inf", "inf", "nan")
"""Elements that are counted in addition to the bins, in this order."""

NUM_COUNTS = NUM_BINS + len(NONFINITE)
"""A *row of counts*, in the order of the values: minus infinity, the bins, infinity, NaN."""

FINITE = slice(1, 1 + NUM_BINS)
NOT_FINITE = (0, NUM_COUNTS - 2, NUM_COUNTS - 1)
"""Indices of the bins, and of :data:`NONFINITE`, in a row of counts."""


# The smallest and the largest positive value of float64: no value of a narrower dtype lies beyond.
_MAGNITUDES = np.array([2.0**-1074, *(2.0 ** np.arange(LOWEST_EXPONENT, HIGHEST_EXPONENT + 2)), np.finfo(np.float64).max])

EDGES: NDArray[np.float64] = np.concatenate([-_MAGNITUDES[::-1], _MAGNITUDES])
"""Edges of the bins, ascending, finite, float64, shape ``(NUM_BINS + 1,)``. The edge nearer to zero belongs to a bin: a
positive bin is ``[2**k, 2**(k + 1))``, a negative bin ``(-2**(k + 1), -2**k]``, and the bin of zero has zeros of either sign only. A value
equal to the first or last edge is in the bin beside it."""
EDGES.flags.writeable = False


def _labels() -> tuple[str, ...]:
    powers = [f"2^{exponent}" for exponent in range(LOWEST_EXPONENT, HIGHEST_EXPONENT + 2)]
    positive = [f"[{low}, {high})" for low, high in itertools.pairwise(powers)]
    negative = [f"(-{high}, -{low}]" for low, high in itertools.pairwise(powers)]
    below = [f"(-inf, -{powers[-1]}]", *reversed(negative), f"(-{powers[0]}, 0)"]
    above = [f"(0, {powers[0]})", *positive, f"[{powers[-1]}, inf)"]
    return ("-inf", *below, "0", *above, "inf", "nan")


LABELS = _labels()
"""The range of values of each entry of a row of counts, as text."""


@dataclass(frozen=True, eq=False)
class Histogram:
    """The exact number of a step's elements in each bin.

    Attributes:
        row: Row of counts, int64, shape ``(NUM_COUNTS,)``.
    """

    row: NDArray[np.int64]
    edges: ClassVar[NDArray[np.float64]] = EDGES
    """Edges of the bins, shape ``(NUM_BINS + 1,)``."""

    @property
    def counts(self) -> NDArray[np.int64]:
        """Number of elements in each bin, shape ``(NUM_BINS,)``."""
        return self.row[FINITE]

    @property
    def nonfinite(self) -> dict[str, int]:
        """Number of elements that are ``-inf``, ``inf`` and ``nan``."""
        return dict(zip(NONFINITE, self.row[list(NOT_FINITE)].tolist(), strict=True))

    def __add__(self, other: Histogram) -> Histogram:
        """The histogram of the elements of both histograms."""
        return Histogram(self.row + other.row)

    def __eq__(self, other: object) -> bool:
        """Whether all counts are equal."""
        return isinstance(other, Histogram) and np.array_equal(self.row, other.row)

    def __hash__(self) -> int:
        return hash(self.row.tobytes())

    def occupied(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The histogram without the empty bins at its ends.

        Returns:
            Counts of shape ``(bins,)`` and edges of shape ``(bins + 1,)``; no bin and an edge if no element is finite.
        """
        filled = np.flatnonzero(self.counts)
        first, last = (filled[0], filled[-1]) if len(filled) else (0, -1)
        return self.counts[first : last + 1], self.edges[first : last + 2]
