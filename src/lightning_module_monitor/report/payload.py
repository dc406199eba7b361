"""Input of the page's script: the tables and histograms of the runs, packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_module_monitor.record import LABELS, NUM_BINS
from lightning_module_monitor.report.packing import condense, pack
from lightning_module_monitor.report.run import Table
from lightning_module_monitor.sinks.store.matrices import HistogramMatrix
from lightning_module_monitor.sinks.store.reader import StoreReader

MAX_NUMBERS = 5_000_000
"""In all tables together: some 15 MB of the page."""
FEWEST_COLUMNS, MOST_COLUMNS = 50, 1000
"""Of a table."""
MAX_HISTOGRAMS = 40_000
FEWEST_HISTOGRAMS, MOST_HISTOGRAMS = 8, 60
"""Of a site."""


class Payload:
    """Packs tables; lists that several tables share are on the page once.

    Args:
        num_series: Number of series of all tables together.
        num_histogram_series: Number of series of all histograms together.
    """

    def __init__(self, num_series: int, num_histogram_series: int) -> None:
        self._max_columns = int(np.clip(MAX_NUMBERS // max(1, num_series), FEWEST_COLUMNS, MOST_COLUMNS))
        self._max_histograms = int(np.clip(MAX_HISTOGRAMS // max(1, num_histogram_series), FEWEST_HISTOGRAMS, MOST_HISTOGRAMS))
        self._lists: dict[tuple[str | int, ...], int] = {}

    def table(self, table: Table) -> dict[str, Any]:
        """One table."""
        condensed = condense(table, self._max_columns)
        return {
            **{"kind": table.kind, "base": table.name.kind, "stage": table.name.stage, "statistic": table.statistic},
            "sites": self._place(table.sites),
            "first": self._place(condensed.first_steps.tolist()),
            "last": self._place(condensed.last_steps.tolist()),
            "data": pack(condensed.values, condensed.is_recorded),
        }

    def histograms(self, store: StoreReader, kind: str) -> list[dict[str, Any]]:
        """The histograms of one kind, as shares of the elements: one for each statistic that is one."""
        matrix = store.histogram_matrix(kind, self._max_histograms)
        places: dict[str, list[int]] = {}
        for place, key in enumerate(matrix.keys):
            places.setdefault(key.statistic, []).append(place)
        return [self._histogram(kind, statistic, matrix, columns) for statistic, columns in places.items()]

    def _histogram(self, kind: str, statistic: str, matrix: HistogramMatrix, columns: list[int]) -> dict[str, Any]:
        counts = matrix.counts[:, columns]
        totals = counts.sum(axis=2, keepdims=True)
        shares = np.divide(counts, totals, out=np.zeros(counts.shape), where=totals > 0)
        filled = np.flatnonzero(counts.any(axis=(0, 1)))
        low, high = (int(filled[0]), int(filled[-1]) + 1) if len(filled) else (NUM_BINS // 2, NUM_BINS // 2 + 1)
        return {
            **{"kind": kind, "statistic": statistic, "bins": list(LABELS[1:-2][low:high])},
            "sites": self._place([matrix.keys[column].site for column in columns]),
            "steps": self._place(matrix.steps.tolist()),
            "data": pack(np.moveaxis(shares[..., low:high], 1, 0)),
            "nonfinite": pack(np.moveaxis(matrix.nonfinite[:, columns].sum(axis=2), 1, 0).astype(np.float64)),
        }

    def lists(self) -> list[list[str | int]]:
        """The lists of sites and of steps, which tables name by their place."""
        return [list(one) for one in self._lists]

    def _place(self, items: Sequence[str] | Sequence[int]) -> int:
        return self._lists.setdefault(tuple(items), len(self._lists))
