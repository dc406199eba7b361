"""A store's file that is open for appending: its tables, findings, facts and modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import NamedTuple

import h5py
import numpy as np

from lightning_module_monitor.health.facts import Facts
from lightning_module_monitor.histogram import Histogram
from lightning_module_monitor.record import Finding, ModuleInfo, RawTensor
from lightning_module_monitor.sinks.store import rows, schema, space


def now() -> str:
    """The present time: ISO 8601, UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


class Entry(NamedTuple):
    """What a record brings to a file."""

    step: int
    values: Mapping[str, float]
    histograms: Mapping[str, Histogram]
    tensors: Sequence[RawTensor]
    modules: Sequence[ModuleInfo]
    findings: Sequence[Finding]
    facts: Facts | None


class OpenFile:
    """A store's file that is open for appending."""

    def __init__(self, file: h5py.File) -> None:
        self.file = file
        self.numbers, self.histograms = _Tables(file, histograms=False), _Tables(file, histograms=True)
        self._findings, self._facts = file[rows.FINDINGS], file[rows.FACTS]
        self._last_record = file[schema.LAST_RECORD]
        self._last_facts = next((facts for _step, facts in reversed(rows.read_facts(file))), None)
        self._modules: Sequence[ModuleInfo] = rows.read_modules(file)
        self._last_modules: Sequence[ModuleInfo] = ()

    def update_modules(self, modules: Sequence[ModuleInfo]) -> bool:
        """Write shapes and dtypes of outputs in place, once they are known.

        Returns:
            Whether the file has a row for each module: not after the resume of a run with fewer. Without, nothing is written.
        """
        if modules is not self._last_modules:
            merged = rows.merged_modules(self._modules, modules)
            if len(merged) > len(self._modules):
                return False
            if merged != self._modules:
                with space.room(self.file, 0):
                    self.file[rows.MODULES][...] = rows.module_rows(merged)
            self._modules, self._last_modules = merged, modules
        return True

    def append(self, record: Entry) -> None:
        """Append a record whose keys and modules are in the file."""
        new_rows = self.numbers.rows(record.values, np.fromiter(record.values.values(), np.float64, len(record.values)))
        if record.histograms:
            counts = np.concatenate([histogram.row for histogram in record.histograms.values()])
            new_rows += self.histograms.rows(record.histograms, counts.reshape(len(record.histograms), -1))
        texts = [(self._findings, rows.finding_rows(record.findings))] if record.findings else []
        if record.facts not in (None, self._last_facts):
            texts.append((self._facts, rows.fact_rows(record.step, record.facts)))
        for_steps = sum(space.index_bytes(table.num_rows) for table, _row in new_rows)
        for_values = for_steps + sum(row.nbytes for _table, row in new_rows)
        for_texts = sum(space.growth(dataset, len(new), len(dataset)) for dataset, new in texts)
        with space.room(self.file, for_values + for_texts + for_steps):
            for table, row in new_rows:
                table.put_values(record.step, row)
            for dataset, new in texts:
                dataset.resize(len(dataset) + len(new), axis=0)
                dataset[-len(new) :] = new
        self._last_facts = record.facts or self._last_facts
        # The steps last: a row is complete once its step is written, so its values must be flushed before.
        with space.room(self.file, for_steps):
            for table, _row in new_rows:
                table.put_step(record.step)
            self._last_record[()] = now().encode()


class _Tables:
    """All tables of numbers, or all tables of histograms, of an open file. All columns together make one row."""

    def __init__(self, file: h5py.File, *, histograms: bool) -> None:
        self.tables: list[_TableWriter] = []
        self._index_by_key: dict[str, int] = {}
        for group, columns in schema.read_columns(file, histograms=histograms).items():
            start = len(self._index_by_key)
            self._index_by_key |= {schema.join(group, column): start + index for index, column in enumerate(columns)}
            self.tables.append(_TableWriter(file[group], slice(start, start + len(columns))))
        self._empty_row = np.concatenate([table.empty_row for table in self.tables]) if self.tables else np.empty(0)
        self._last_keys: list[str] = []
        self._indices = np.empty(0, np.int64)
        self._tables_with_keys: list[_TableWriter] = []

    def missing(self, keys: Iterable[str]) -> list[str]:
        """The keys without a column."""
        return [] if [*keys] == self._last_keys else [key for key in keys if key not in self._index_by_key]

    def rows(self, keys: Iterable[str], values: schema.Values) -> list[tuple[_TableWriter, schema.Values]]:
        """The tables that have a column of one of the keys, each with its row."""
        if (keys := [*keys]) != self._last_keys:
            # Looked up once for all records with the same keys: a quarter of the time that it takes to write 5,000 numbers.
            self._last_keys, self._indices = keys, np.array([self._index_by_key[key] for key in keys], np.int64)
            starts = [table.columns.start for table in self.tables]
            self._tables_with_keys = [self.tables[index] for index in np.unique(np.searchsorted(starts, self._indices, "right") - 1)]
        row = self._empty_row.copy()
        row[self._indices] = values
        return [(table, row[table.columns]) for table in self._tables_with_keys]


class _TableWriter:
    """Appends rows to a group of the open file, behind its last complete row.

    ``columns`` are its columns in the row of all tables.
    """

    def __init__(self, group: h5py.Group, columns: slice) -> None:
        steps = schema.read_steps(group)
        self.values, self.steps, self.columns = group["values"], group["steps"], columns
        self.empty_row = np.full(self.values.shape[1:], self.values.fillvalue)
        self.num_rows = len(steps)
        self._last_step = int(steps[-1]) if len(steps) else -1

    def put_values(self, step: int, row: schema.Values) -> None:
        """Write a row of shape ``(columns,)`` or ``(columns, bins)``; merge a second row of the same step into the first."""
        if self.num_rows and step == self._last_step:
            merged, recorded = self.values[self.num_rows - 1], schema.is_recorded(row)
            merged[recorded] = row[recorded]
            _put(self.values, self.num_rows - 1, merged)
        else:
            _put(self.values, self.num_rows, row)

    def put_step(self, step: int) -> None:
        """Write the step of the last row, which completes it: readers find it, also after a kill."""
        if step != self._last_step or not self.num_rows:
            _put(self.steps, self.num_rows, step)
            self.num_rows += 1
            self._last_step = step


def _put(dataset: h5py.Dataset, index: int, item: object) -> None:
    """Write one item of a dataset that grows along its first axis. ``dataset[index] = item`` takes four times as long."""
    rows = np.array([item], dataset.dtype)
    if len(dataset) <= index:
        dataset.id.set_extent((index + 1, *rows.shape[1:]))
    target = dataset.id.get_space()
    target.select_hyperslab((index, *[0] * (rows.ndim - 1)), rows.shape)
    dataset.id.write(h5py.h5s.create_simple(rows.shape), target, rows)
