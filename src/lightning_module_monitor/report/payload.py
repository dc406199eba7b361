"""Input of the page's script: tables and histograms of the runs, packed into few columns and four digits."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.histogram import FINITE, LABELS, NUM_BINS
from lightning_module_monitor.sinks.store.matrices import HistogramMatrix, Table
from lightning_module_monitor.sinks.store.reader import StoreReader

MAX_NUMBERS = 3_000_000
"""Largest number of values in all tables together: 12 MB of the page."""
FEWEST_COLUMNS, MOST_COLUMNS = 50, 1000
"""Limits of a table's columns."""
MAX_HISTOGRAMS = 20_000
"""Largest number of histograms in all tables together: at most 8 MB of the page."""
FEWEST_HISTOGRAMS, MOST_HISTOGRAMS = 8, 60
"""Limits of a site's histograms."""

ABSENT_BITS = 0x7FC0_0100
"""The NaN for "not recorded", as in data.js."""

_LARGEST = 3.4e38


class Payload:
    """Packs tables and histograms. Lists of sites and steps that several tables share are stored once.

    Args:
        num_series: Number of series in all tables; limits the columns of each.
        num_histogram_series: Number of series of histograms; limits the steps of each.
    """

    def __init__(self, num_series: int, num_histogram_series: int) -> None:
        self._max_columns = int(np.clip(MAX_NUMBERS // max(1, num_series), FEWEST_COLUMNS, MOST_COLUMNS))
        self._max_histograms = int(np.clip(MAX_HISTOGRAMS // max(1, num_histogram_series), FEWEST_HISTOGRAMS, MOST_HISTOGRAMS))
        self._lists: dict[tuple[str | int, ...], int] = {}

    def table(self, table: Table) -> dict[str, Any]:
        """A table of numbers."""
        condensed, last_steps = condense(table, self._max_columns)
        return {
            **{"kind": table.kind, "base": table.name.kind, "stage": table.name.stage, "statistic": table.statistic},
            "sites": self._index(table.sites),
            "first": self._index(condensed.steps.tolist()),
            "last": self._index(last_steps.tolist()),
            "data": pack(condensed.values, condensed.is_recorded),
        }

    def histograms(self, store: StoreReader, kind: str) -> list[dict[str, Any]]:
        """The histograms of a kind as shares of the elements, a table for each statistic."""
        matrix = store.histogram_matrix(kind, self._max_histograms)
        columns_by_statistic: dict[str, list[int]] = {}
        for column, key in enumerate(matrix.keys):
            columns_by_statistic.setdefault(key.statistic, []).append(column)
        return [self._histogram(kind, statistic, matrix, columns) for statistic, columns in columns_by_statistic.items()]

    def _histogram(self, kind: str, statistic: str, matrix: HistogramMatrix, columns: list[int]) -> dict[str, Any]:
        counts = matrix.counts[:, columns]
        totals = counts.sum(axis=2, keepdims=True)
        shares = np.divide(counts, totals, out=np.zeros(counts.shape), where=totals > 0)
        filled = np.flatnonzero(counts.any(axis=(0, 1)))
        low, high = (int(filled[0]), int(filled[-1]) + 1) if len(filled) else (NUM_BINS // 2, NUM_BINS // 2 + 1)
        return {
            **{"kind": kind, "statistic": statistic, "bins": list(LABELS[FINITE][low:high])},
            "sites": self._index([matrix.keys[column].site for column in columns]),
            "first": self._index(matrix.steps.tolist()),
            "data": pack(np.moveaxis(shares[..., low:high], 1, 0)),
            "nonfinite": pack(np.moveaxis(matrix.nonfinite[:, columns].sum(axis=2), 1, 0).astype(np.float64)),
        }

    def lists(self) -> list[list[str | int]]:
        """The lists of sites and of steps; tables refer to them by index."""
        return list(map(list, self._lists))

    def _index(self, items: Sequence[str] | Sequence[int]) -> int:
        return self._lists.setdefault(tuple(items), len(self._lists))


def condense(table: Table, max_columns: int) -> tuple[Table, NDArray[np.int64]]:
    """Merge neighbouring steps into a column, with each site's value of largest magnitude; a non-finite value takes precedence.

    Returns:
        A table with the first step of each column, and the last steps, shape ``(columns,)``. A table with at most ``max_columns`` steps is
        returned unchanged.
    """
    num_sites, num_steps = table.values.shape
    stride = -(-num_steps // max_columns)
    if stride == 1:
        return table, table.steps
    columns = -(-num_steps // stride)
    missing = columns * stride - num_steps
    blocks = np.pad(table.values, ((0, 0), (0, missing)), constant_values=np.nan).reshape(num_sites, columns, stride)
    recorded = np.pad(table.is_recorded, ((0, 0), (0, missing))).reshape(blocks.shape)
    importance = np.where(recorded, np.where(np.isfinite(blocks), np.abs(blocks), np.inf), -1.0)
    chosen = importance.argmax(axis=2, keepdims=True)
    last = np.minimum(np.arange(1, columns + 1) * stride, num_steps) - 1
    values = np.take_along_axis(blocks, chosen, axis=2)[..., 0]
    return replace(table, steps=table.steps[::stride], values=values, is_recorded=np.asarray(recorded.any(axis=2))), table.steps[last]


def pack(values: NDArray[np.float64], is_recorded: NDArray[np.bool_] | None = None) -> str:
    """Pack numbers of any shape into ASCII text: the three upper bytes of float32, in base64; a relative error of 1.6e-5 at most.

    Infinities and NaN are kept; a number too large for float32 becomes the largest float32. ``unpack`` in data.js is the inverse.
    """
    with np.errstate(over="ignore", under="ignore"):
        single = np.where(np.isfinite(values), np.clip(values, -_LARGEST, _LARGEST), values).astype("<f4")
    bits = single.view(np.uint32).copy()
    bits[np.isfinite(single)] += np.uint32(1 << 7)  # half of the byte that is dropped: rounds to nearest
    if is_recorded is not None:
        bits[~is_recorded] = ABSENT_BITS
    return base64.b64encode(bits.reshape(-1, 1).view(np.uint8)[:, 1:].tobytes()).decode()
