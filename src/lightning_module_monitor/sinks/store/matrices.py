"""The tables of a store in memory: all numbers or all histograms of a kind, or one statistic of a kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.histogram import EDGES, FINITE, NOT_FINITE
from lightning_module_monitor.keys import Key
from lightning_module_monitor.record import is_undefined
from lightning_module_monitor.sinks.store import schema
from lightning_module_monitor.sinks.store.content import Content, StoredTable

_ROWS_PER_READ = 64


@dataclass(frozen=True, eq=False)
class Matrix:
    """All numbers of a kind: a row for each record, a column for each key."""

    keys: list[Key]
    """Keys of the columns; each column has at least one value."""
    steps: NDArray[np.int64]
    """Steps of the rows, ascending; shape ``(rows,)``."""
    values: NDArray[np.float64]
    """Shape ``(rows, columns)``; NaN where nothing was recorded."""
    is_recorded: NDArray[np.bool_]
    """Where a value was recorded, which may be NaN; shape ``(rows, columns)``."""

    def table(self, columns: Sequence[int]) -> Table:
        """The columns of one statistic, without the rows where they have no value."""
        rows = self.is_recorded[:, columns].any(axis=1)
        values = np.ascontiguousarray(self.values[rows][:, columns].T)
        is_recorded = self.is_recorded[rows][:, columns].T & ~is_undefined(values)
        sites = tuple(self.keys[column].site for column in columns)
        return Table(self.keys[columns[0]]._replace(site=""), sites, self.steps[rows], values, is_recorded)


@dataclass(frozen=True, eq=False)
class Table:
    """One statistic of a kind, sites by steps."""

    name: Key
    """The common part of the keys, with an empty site."""
    sites: tuple[str, ...]
    steps: NDArray[np.int64]
    """Ascending, shape ``(steps,)``; each step has at least one value."""
    values: NDArray[np.float64]
    """Shape ``(sites, steps)``; NaN where nothing was recorded."""
    is_recorded: NDArray[np.bool_]
    """Where a value was recorded, which may be NaN; shape ``(sites, steps)``."""

    @property
    def kind(self) -> str:
        """The kind with prefix and stage: ``validation/activation``."""
        return self.name.full_kind

    @property
    def statistic(self) -> str:
        """Name of the statistic."""
        return self.name.statistic

    def key(self, row: int) -> str:
        """The key of a row."""
        return self.name._replace(site=self.sites[row]).format()


@dataclass(frozen=True, eq=False)
class HistogramMatrix:
    """Histograms of a kind: a row for each record, a column for each key."""

    keys: list[Key]
    """Keys of the columns; each column has at least one histogram."""
    steps: NDArray[np.int64]
    """Steps of the rows, ascending; shape ``(rows,)``."""
    counts: NDArray[np.int64]
    """Counts of the finite elements, shape ``(rows, columns, bins)``; 0 where nothing was recorded."""
    nonfinite: NDArray[np.int64]
    """Number of elements that are ``-inf``, ``inf`` and ``nan``, shape ``(rows, columns, 3)``; 0 where nothing was recorded."""
    edges: NDArray[np.float64]
    """Edges of the bins, shape ``(bins + 1,)``."""


def filled_columns(table: StoredTable) -> NDArray[np.bool_]:
    """Flags of the columns of a table that were ever recorded, shape ``(columns,)``; reads in blocks until all are."""
    filled = np.zeros(len(table.columns), dtype=np.bool_)
    for _first, block in table.blocks(0, _ROWS_PER_READ):
        filled |= schema.is_recorded(block).any(axis=0)
        if filled.all():
            break
    return filled


def _read(
    content: Content, group: str, max_rows: int | None = None
) -> tuple[list[Key], NDArray[np.int64], schema.Values, NDArray[np.bool_]]:
    """Keys, steps, values and ``is_recorded`` of the recorded columns of a group."""
    table = content.table(group)
    if max_rows is None or len(table.steps) <= max_rows:
        steps, values = table.steps, table.read()
    else:
        rows = np.linspace(0, len(table.steps) - 1, max_rows).round().astype(np.int64)
        steps, values = table.steps[rows], np.concatenate([table.read(row, row + 1) for row in rows.tolist()])
    is_recorded = schema.is_recorded(values)
    filled = np.flatnonzero(is_recorded.any(axis=0))
    keys = [Key.parse(schema.join(group, table.columns[index])) for index in filled]
    return keys, steps, values[:, filled], is_recorded[:, filled]


def read_numbers(content: Content, group: str) -> Matrix:
    """The numbers of a group."""
    keys, steps, values, is_recorded = _read(content, group)
    return Matrix(keys, steps, np.where(is_recorded, values, np.nan), is_recorded)


def read_histograms(content: Content, group: str, max_rows: int | None) -> HistogramMatrix:
    """The histograms of a group, or of at most ``max_rows`` of its rows, evenly spaced."""
    keys, steps, rows, is_recorded = _read(content, group, max_rows)
    counts: NDArray[np.int64] = np.where(is_recorded[..., np.newaxis], rows, 0)
    return HistogramMatrix(keys, steps, counts[..., FINITE], counts[..., NOT_FINITE], EDGES.copy())
