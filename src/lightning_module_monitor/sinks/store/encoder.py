"""Makes the frames of a run's records: where each number and each histogram stands in the rows of the store's tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.health.facts import Facts
from lightning_module_monitor.histogram import Histogram
from lightning_module_monitor.keys import Columns
from lightning_module_monitor.record import Finding, ModuleInfo, Record, is_absent
from lightning_module_monitor.sinks.store import schema
from lightning_module_monitor.sinks.store.journal import Part, record_frame


def now() -> str:
    """The present time: ISO 8601, UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


class Entry(NamedTuple):
    """What a step brings to the files of a run."""

    record: Record
    findings: Sequence[Finding] = ()
    facts: Facts | None = None


class _Place(NamedTuple):
    """Some of the numbers of a record, and where they stand in the row of a table."""

    group: str
    numbers: NDArray[np.intp]
    columns: NDArray[np.intp]


class Encoder:
    """Makes the frames of records.

    Args:
        columns: The columns that the store has, by table.
        keys: Keys of numbers that get columns with the first record, in this order, whether it has them or not.
        histogram_keys: Keys of histograms, likewise.
    """

    def __init__(self, columns: Mapping[str, Sequence[str]], keys: Iterable[str] = (), histogram_keys: Iterable[str] = ()) -> None:
        self._columns = {group: {name: index for index, name in enumerate(names)} for group, names in columns.items()}
        self._new: dict[str, list[str]] = {}
        """Columns that no written frame has brought yet."""
        self._bound: tuple[Columns | None, int] = None, 0
        self._places: list[_Place] = []
        for group, column in (*map(schema.split, keys), *map(schema.split_histogram, histogram_keys)):
            self._column(group, column)
        self._last_facts: Facts | None = None
        self._last_modules: Sequence[ModuleInfo] = ()

    def new_keys(self) -> list[str]:
        """The keys whose columns the last frame brings."""
        return [schema.join(group, column) for group, columns in self._new.items() for column in columns]

    def frame(self, entry: Entry) -> bytes:
        """The frame of a record; call :meth:`note_written` once it is in the journal or in the file."""
        record, rows = entry.record, {}
        for group, numbers, columns in self._places_of(record):
            taken = record.numbers[numbers]
            if not is_absent(taken).all():
                row = schema.empty_rows(group, 1, len(self._columns[group]))[0]
                row[columns] = taken
                rows[group] = row
        rows |= self._rows_of_histograms(record.histograms)
        facts = entry.facts if entry.facts != self._last_facts else None
        modules = record.modules if record.modules is not self._last_modules else ()
        return record_frame(Part(int(record.step), now(), entry.findings, facts, modules), self._new, rows)

    def note_written(self, entry: Entry) -> None:
        """The frame of an entry was written: later frames leave out what it brought."""
        self._new = {}
        self._last_facts = entry.facts or self._last_facts
        self._last_modules = entry.record.modules

    def _places_of(self, record: Record) -> list[_Place]:
        """Looked up once for all records with the same columns."""
        bound = record.columns, len(record.numbers)
        if self._bound[0] is not bound[0] or self._bound[1] != bound[1]:
            by_group: dict[str, tuple[list[int], list[int]]] = {}
            for number, key in enumerate(record.columns.texts[: len(record.numbers)]):
                group, column = schema.split(key)
                numbers, columns = by_group.setdefault(group, ([], []))
                numbers.append(number)
                columns.append(self._column(group, column))
            self._places = [_Place(group, np.array(numbers), np.array(columns)) for group, (numbers, columns) in by_group.items()]
            self._bound = bound
        return self._places

    def _rows_of_histograms(self, histograms: Mapping[str, Histogram]) -> dict[str, schema.Values]:
        places = [(*schema.split_histogram(key), histogram) for key, histogram in histograms.items()]
        indices = [self._column(group, column) for group, column, _histogram in places]
        groups = dict.fromkeys(group for group, _column, _histogram in places)
        rows = {group: schema.empty_rows(group, 1, len(self._columns[group]))[0] for group in groups}
        for (group, _column, histogram), index in zip(places, indices, strict=True):
            rows[group][index] = histogram.row
        return rows

    def _column(self, group: str, name: str) -> int:
        """The index of a column, which is added if there is none."""
        columns = self._columns.setdefault(group, {})
        if name not in columns:
            columns[name] = len(columns)
            self._new.setdefault(group, []).append(name)
        return columns[name]
