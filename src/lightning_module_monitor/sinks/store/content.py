"""The content of a store: its file, and the records that its journal added since."""

from __future__ import annotations

from collections.abc import Iterator

import h5py
import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.health.facts import Facts
from lightning_module_monitor.record import Finding, ModuleInfo
from lightning_module_monitor.sinks.store import rows, schema
from lightning_module_monitor.sinks.store.journal import Journal, JournalRows


class StoredTable:
    """The rows of a table: those of the file, then those of the journal, merged into the row before if that is of the same step.

    Args:
        file: The file.
        journal: Its journal; ``None`` without one.
        group: The name of the table.
    """

    def __init__(self, file: h5py.File, journal: Journal | None, group: str) -> None:
        self._group, self._journal = group, journal
        self.columns = schema.read_columns_of(file, group)
        self._values = file[group]["values"] if self.columns else None
        self.steps: NDArray[np.int64] = schema.read_steps(file[group]) if self.columns else np.empty(0, np.int64)
        """Shape ``(rows,)``."""
        self.num_in_file = len(self.steps)
        """Number of the rows in the file."""
        self._row_of: NDArray[np.intp] = np.empty(0, np.intp)
        """The row to which each of the journal's belongs, ascending."""
        added = None if journal is None else journal.index.tables.get(group)
        if added is None:
            return
        self.columns = _with_new(self.columns, added)
        num_added = len(added.widths)  # another thread may add some
        widest = max(added.widths, default=0)
        if widest > len(self.columns):
            raise ValueError(f"the journal's table {group!r} has rows of {widest} columns, and not {len(self.columns)}")
        steps = np.array(added.steps[:num_added], np.int64)
        is_new = np.ones(len(steps), np.bool_)
        is_new[1:] = steps[1:] != steps[:-1]
        is_new[:1] &= steps[:1] != self.steps[-1:] if self.num_in_file else True
        self._row_of = self.num_in_file - 1 + np.cumsum(is_new)
        self.steps = np.concatenate([self.steps, steps[is_new]])

    @property
    def first_changed(self) -> int:
        """The first row that the journal changes or adds."""
        return int(self._row_of[0]) if len(self._row_of) else len(self.steps)

    def read(self, first: int = 0, last: int | None = None, columns: slice = slice(None)) -> schema.Values:
        """The rows from ``first`` to before ``last``, of shape ``(rows, columns)`` or ``(rows, columns, bins)``."""
        last = len(self.steps) if last is None else last
        start, stop, _ = columns.indices(len(self.columns))
        block = schema.empty_rows(self._group, last - first, stop - start)
        if self._values is not None and first < self.num_in_file:
            in_file = self._values[first : min(last, self.num_in_file), start:stop]
            block[: len(in_file), : in_file.shape[1]] = in_file
        for entry in range(*np.searchsorted(self._row_of, (first, last)).tolist()):
            assert self._journal is not None
            row = self._journal.read(self._group, entry, start, stop)
            recorded = schema.is_recorded(row)
            block[self._row_of[entry] - first, : len(row)][recorded] = row[recorded]
        return block

    def blocks(self, first: int, rows_per_block: int) -> Iterator[tuple[int, schema.Values]]:
        """The rows from ``first`` on, each block with its first row; all but the first block begin at a multiple of ``rows_per_block``."""
        while first < len(self.steps):
            last = min((first // rows_per_block + 1) * rows_per_block, len(self.steps))
            yield first, self.read(first, last)
            first = last


def _with_new(columns: list[str], added: JournalRows) -> list[str]:
    # An interrupt right after a frame was written lets the next one bring its columns once more.
    return list(dict.fromkeys([*columns, *added.new_columns])) if added.new_columns else columns


class Content:
    """The content of a store."""

    def __init__(self, file: h5py.File, journal: Journal | None = None) -> None:
        self.file = file
        self.journal = journal
        self.version = schema.read_version(file)

    def columns(self, *, histograms: bool | None = None) -> dict[str, list[str]]:
        """The columns of every table, of those of histograms, or of the others, by group."""
        columns = schema.read_columns(self.file, histograms=histograms)
        if self.journal is not None:
            for group, table in self.journal.index.tables.items():
                if histograms in (None, schema.is_of_histograms(group)):
                    columns[group] = _with_new(columns.get(group, []), table)
        return {group: columns[group] for group in sorted(columns, key=schema.order_of)}

    def table(self, group: str) -> StoredTable:
        """A table."""
        return StoredTable(self.file, self.journal, group)

    def findings(self) -> list[Finding]:
        """The findings, in the order in which they were written."""
        return rows.read_findings(self.file) + ([] if self.journal is None else self.journal.index.findings)

    def facts(self) -> list[tuple[int, Facts]]:
        """The facts of training, each with the first step that they hold for."""
        return rows.read_facts(self.file) + ([] if self.journal is None else self.journal.index.facts)

    def modules(self) -> list[ModuleInfo]:
        """The modules of the model, in its order."""
        modules = rows.read_modules(self.file)
        return modules if self.journal is None else rows.merged_modules(modules, self.journal.index.modules)

    def attributes(self) -> schema.Attributes:
        """The attributes."""
        attributes = schema.read_attributes(self.file)
        if self.journal is not None and self.journal.index.last_record:
            attributes.configurations[-1]["last_record"] = self.journal.index.last_record
        return attributes
