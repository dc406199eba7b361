"""The store: one HDF5 file a run, appended to while training, read while it grows, whole after a kill."""

from __future__ import annotations

import json
import logging
import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.record import Histogram, Record
from lightning_module_monitor.sinks.store import findings, layout, space, writer
from lightning_module_monitor.sinks.store.rewrite import Count, rewrite

_logger = logging.getLogger(__name__)


@dataclass
class _Table:
    """A group of the open file."""

    values: h5py.Dataset
    steps: h5py.Dataset
    num_rows: int = 0
    last_step: int = -1
    last_row: layout.Values | None = None

    def put_values(self, step: int, row: layout.Values) -> None:
        """Write a row of shape ``(columns,)`` or ``(columns, bins)``; a second one of the same step is merged into the first."""
        if self.last_row is not None and step == self.last_step:
            row = np.where(layout.is_absent(row), self.last_row, row)
            _put(self.values, self.num_rows - 1, row)
        else:
            _put(self.values, self.num_rows, row)
        self.last_row = row

    def put_step(self, step: int) -> None:
        """Write the step of the row that was written last: for readers, and after a kill, it is there from now on."""
        if step != self.last_step or not self.num_rows:
            _put(self.steps, self.num_rows, step)
            self.num_rows += 1
            self.last_step = step


@dataclass(kw_only=True)
class _NumberTable(_Table):
    """A kind's numbers, and where its columns are in the row of all numbers."""

    part: slice


@dataclass(kw_only=True)
class _HistogramTable(_Table):
    """A kind's histograms, and the column of each."""

    column_by_key: dict[str, int]

    def row(self, histograms: Mapping[str, Histogram]) -> NDArray[np.int64] | None:
        """Those that belong here, shape ``(columns, bins)``; ``None`` if none does."""
        mine = [key for key in histograms if key in self.column_by_key]
        if not mine:
            return None
        row = np.full(self.values.shape[1:], layout.NOT_COUNTED, np.int64)
        for key in mine:
            row[self.column_by_key[key]] = histograms[key].row
        return row


class Store(writer.Writer):
    """Writes the values, histograms and findings of the records of one run, one row in each group that a record has any of.

    A second record of a step is merged into the first. Read it with ``load_store``.

    Args:
        path: Where the file should be; for it, and for ``resumed``, see :class:`~lightning_module_monitor.sinks.store.writer.Writer`.
        configuration: What this run was configured with; kept in the file's attributes as JSON.
        keys: Keys of numbers that are known to come. One that turns up later costs a rewrite of the file.
        histogram_keys: Likewise of histograms.
        resumed: The file of the run that is resumed, or whose next loop this is.
        resume_from: The first step of this run, if it resumes another.
        logger: Gets a warning when another name is taken and when the store stops, and word of late keys.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        configuration: Mapping[str, object],
        keys: Iterable[str] = (),
        histogram_keys: Iterable[str] = (),
        resumed: Path | None = None,
        resume_from: int | None = None,
        logger: logging.Logger = _logger,
    ) -> None:
        super().__init__(path, configuration=configuration, resumed=resumed, resume_from=resume_from, logger=logger)
        self._keys, self._histogram_keys = tuple(keys), tuple(histogram_keys)
        self._file: h5py.File | None = None
        self._tables: list[_NumberTable] = []
        self._histogram_tables: list[_HistogramTable] = []
        self._place_by_key: dict[str, int] = {}
        self._last_keys: tuple[str, ...] | None = None
        self._last_places: NDArray[np.int64] = np.empty(0, np.int64)

    def _concerns(self, record: Record) -> bool:
        return bool(record.values or record.histograms or record.findings)

    def _taken(self, path: Path) -> str:
        # The tensors of a run whose store is gone would be read as those of the new one.
        beside = layout.tensors_path(path)
        return super()._taken(path) or (f"{beside.name} exists" if layout.is_there(beside) else "")

    def _sweep(self, path: Path) -> None:
        super()._sweep(path)
        super()._sweep(layout.tensors_path(path))

    def _columns(self, record: Record) -> dict[str, list[str]]:
        return layout.columns_by_group((*self._keys, *record.values), (*self._histogram_keys, *record.histograms))

    def _create_content(self, file: h5py.File, record: Record) -> None:
        layout.create_tables(file, self._columns(record))

    def _copy(self, source: h5py.File, target: Path, attributes: layout.Attributes, record: Record, *, with_superseded: bool) -> Count:
        self._tell_changes(attributes.configurations[-2], record.step)
        columns = self._columns(record)
        return rewrite(source, target, attributes=attributes, more=columns, before_step=self._resume_from, with_superseded=with_superseded)

    def _tell_changes(self, before: Mapping[str, Any], step: int) -> None:
        """Say what a run that is resumed was configured with, if that was something else."""
        was, now = before["configuration"], json.loads(json.dumps(dict(self._configuration), default=str))
        changes = [
            f"{name} was {textwrap.shorten(json.dumps(was.get(name)), 100)}, is {textwrap.shorten(json.dumps(now.get(name)), 100)}"
            for name in {**was, **now}
            if was.get(name) != now.get(name)
        ]
        if changes:
            message = "The run that is resumed had another configuration (%s). In its store rows from step %d on are of this one."
            self._logger.warning(message, "; ".join(changes), step)

    def _put_in_place(self, temporary: Path) -> None:
        self._file = file = layout.append_in_place(temporary, self.path)
        self._place_by_key, self._last_keys = {}, None
        self._tables, self._histogram_tables = [], []
        for group, columns in layout.read_columns(file).items():
            keys = [layout.join(group, column) for column in columns]
            if layout.has_histograms(group):
                places = {key: column for column, key in enumerate(keys)}
                self._histogram_tables.append(_HistogramTable(**_at_end(file[group]), column_by_key=places))
            else:
                start = len(self._place_by_key)
                self._place_by_key |= {key: start + index for index, key in enumerate(keys)}
                self._tables.append(_NumberTable(**_at_end(file[group]), part=slice(start, start + len(columns))))

    def _append(self, record: Record) -> None:
        assert self._file is not None
        self._make_columns(record)
        rows = list(self._rows(record))
        for_steps = sum(space.index_bytes(table.num_rows) for table, _row in rows)
        with space.room(self._file, sum(row.nbytes for _table, row in rows) + findings.num_bytes(record.findings) + 2 * for_steps):
            for table, row in rows:
                table.put_values(record.step, row)
            findings.append(self._file, record.findings)
        # The steps last: a row is complete once its step is there, so its values must be on their way before.
        with space.room(self._file, for_steps):
            for table, _row in rows:
                table.put_step(record.step)

    def _rows(self, record: Record) -> Iterator[tuple[_Table, layout.Values]]:
        """The tables that get a row, and what it is."""
        numbers = np.full(len(self._place_by_key), layout.ABSENT)
        numbers[self._places(record)] = np.fromiter(record.values.values(), np.float64, len(record.values))
        for table in self._tables:
            if not layout.is_absent(numbers[table.part]).all():
                yield table, numbers[table.part]
        for histograms in self._histogram_tables:
            row = histograms.row(record.histograms)
            if row is not None:
                yield histograms, row

    def _places(self, record: Record) -> NDArray[np.int64]:
        """Where the record's values belong in the row of all keys; looked up anew only if other keys came than last time."""
        keys = tuple(record.values)
        if keys != self._last_keys:
            self._last_places = np.fromiter(map(self._place_by_key.__getitem__, keys), np.int64, len(keys))
            self._last_keys = keys
        return self._last_places

    def _make_columns(self, record: Record) -> None:
        """A column for each of the record's keys."""
        numbers = record.values if tuple(record.values) != self._last_keys else ()
        late = [key for key in numbers if key not in self._place_by_key]
        late_histograms = [key for key in record.histograms if not any(key in table.column_by_key for table in self._histogram_tables)]
        if late or late_histograms:
            new = late + late_histograms
            self._logger.info("Step %d brought %d new keys (%s, ...): the store gets columns for them.", record.step, len(new), new[0])
            self._widen(layout.columns_by_group(late, late_histograms))

    def _widen(self, columns: Mapping[str, list[str]]) -> None:
        temporary = layout.temporary_path(self.path)
        rewrite(self._file, temporary, more=columns)
        space.close(self._file)
        self._put_in_place(temporary)

    def _finish(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        successor = None
        # After a Ctrl-C, or without space, in the middle of a row there are values without a step, which xarray would not open.
        if any(len(table.values) > table.num_rows for table in (*self._tables, *self._histogram_tables)):
            with suppress(space.NoSpaceError):
                rewrite(file, layout.temporary_path(self.path))
                successor = layout.temporary_path(self.path)
        space.close(file)
        if successor is not None:
            layout.replace(successor, self.path)

    def _let_go(self) -> None:
        if self._file is not None:
            layout.abandon(self._file)
        self._file = None
        self._tables, self._histogram_tables = [], []
        super()._let_go()


def _at_end(group: h5py.Group) -> dict[str, Any]:
    """What a table is made with, to go on behind its last row."""
    steps = layout.read_steps(group)
    end: dict[str, Any] = {"values": group["values"], "steps": group["steps"], "num_rows": len(steps)}
    if len(steps):
        end |= {"last_step": int(steps[-1]), "last_row": group["values"][len(steps) - 1]}
    return end


def _put(dataset: h5py.Dataset, index: int, item: object) -> None:
    """Write one item of a dataset that grows along its first axis. ``dataset[index] = item`` takes four times as long."""
    rows = np.array([item], dataset.dtype)
    if len(dataset) <= index:
        dataset.id.set_extent((index + 1, *rows.shape[1:]))
    place = dataset.id.get_space()
    place.select_hyperslab((index, *[0] * (rows.ndim - 1)), rows.shape)
    dataset.id.write(h5py.h5s.create_simple(rows.shape), place, rows)
