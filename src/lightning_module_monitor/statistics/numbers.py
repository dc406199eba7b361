"""The numbers of a step, of one rank or of all ranks together, in the order of a layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.kernels.moments import Array
from lightning_module_monitor.statistics.functions import Aggregate

Flags: TypeAlias = NDArray[np.float64]
"""0 or 1 for each item."""


@dataclass
class Numbers:
    """What one rank, or all ranks together, have observed in a step: on the host, float64, in the order of a layout.

    The fields of ``LARGEST`` are merged over ranks by their maximum, those of ``SUMMED`` by their sum, and moments as moments.
    """

    moments: Array
    """Shape ``(fields, rows)``."""
    observed: Flags
    """Whether a stream has moments; shape ``(streams,)``."""
    failed: Flags
    """Whether the statistics, histogram or units of a stream could not be computed."""
    called: Flags
    """Whether there is a result, shape ``(values,)``."""
    raised: Flags
    """Whether a result could not be computed."""
    extremes: Array
    """The largest result; where the aggregate is ``min``, minus the least. Shape ``(values,)``."""
    has_nan: Flags
    """Whether a result is NaN."""
    is_lost: Flags
    """Whether an error has ended the monitoring of the step, shape ``(1,)``."""
    has_more: Flags
    """Whether something was observed that the layout lacks, shape ``(1,)``."""
    counts: Array
    """Rows of counts, and of sums of channels, one after the other: shape ``(counts,)``."""
    totals: Array
    """Sum of the results, times their weights where the aggregate is ``mean``; shape ``(values,)``."""
    weights: Array
    num_results: Array
    num_errors: Array
    """Shape ``(1,)``."""

    def merged(self, aggregates: Sequence[Aggregate]) -> list[float]:
        """The value of each result, by its aggregate; NaN for an aggregate of the user's."""
        with np.errstate(all="ignore"):
            means = self.totals / self.weights
        # Times its weight and divided by it, a value could round.
        means = np.where((self.num_results == 1) & (self.weights != 0) & (self.has_nan == 0), self.extremes, means)
        extremes = np.where(self.has_nan > 0, np.nan, self.extremes)
        by_name = {"mean": means, "sum": self.totals, "max": extremes, "min": -extremes}
        return [float(by_name[aggregate][index]) if isinstance(aggregate, str) else math.nan for index, aggregate in enumerate(aggregates)]


LARGEST = ("observed", "failed", "called", "raised", "extremes", "has_nan", "is_lost", "has_more")
SUMMED = ("counts", "totals", "weights", "num_results", "num_errors")
