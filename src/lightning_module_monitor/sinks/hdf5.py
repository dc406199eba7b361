"""The store: one HDF5 file a run, appended to while training, read while it grows, whole after a kill."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.record import Record
from lightning_module_monitor.sinks import layout, writer

_logger = logging.getLogger(__name__)


@dataclass
class _Table:
    """A group of the open file, and where its columns are in the row of all keys."""

    values: h5py.Dataset
    steps: h5py.Dataset
    part: slice
    num_rows: int = 0
    last_step: int = -1
    last_row: NDArray[np.float64] | None = None

    def put_values(self, step: int, row: NDArray[np.float64]) -> None:
        """Write a row of shape ``(columns,)``; a second one of the same step is merged into the first."""
        if self.last_row is not None and step == self.last_step:
            row = np.where(layout.is_absent(row), self.last_row, row)
            writer.put(self.values, self.num_rows - 1, row)
        else:
            writer.put(self.values, self.num_rows, row)
        self.last_row = row

    def put_step(self, step: int) -> None:
        """Write the step of the row that was written last: for readers, and after a kill, it is there from now on."""
        if step != self.last_step or not self.num_rows:
            writer.put(self.steps, self.num_rows, step)
            self.num_rows += 1
            self.last_step = step


class Store(writer.Writer):
    """Writes the values of the records of one run, one row in each group that a record has values of.

    A second record of a step is merged into the first. Read it with ``load_store``.

    Args:
        path: Where the file should be; see :class:`~lightning_module_monitor.sinks.writer.Writer`.
        configuration: What this run was configured with; kept in the file's attributes as JSON.
        keys: Keys that are known to come. One that turns up later costs a rewrite of the file.
        resume_from: The first step of a resumed run: it goes on in the file at ``path``, whose rows of this step and later ones
            are taken out when the first record comes. ``None``: a new run.
        logger: Gets a warning when another name is taken and when the store stops, and word of late keys.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        configuration: Mapping[str, object],
        keys: Iterable[str] = (),
        resume_from: int | None = None,
        logger: logging.Logger = _logger,
    ) -> None:
        super().__init__(path, configuration=configuration, resume_from=resume_from, logger=logger)
        self._keys = tuple(keys)
        self._tables: list[_Table] = []
        self._place_by_key: dict[str, int] = {}
        self._last_keys: tuple[str, ...] = ()
        self._last_places: NDArray[np.int64] = np.empty(0, np.int64)

    def _concerns(self, record: Record) -> bool:
        return bool(record.values)

    def _taken(self, path: Path) -> str:
        # The tensors of a run whose store is gone would be read as those of the new one.
        return super()._taken(path) or (f"{layout.tensors_path(path).name} exists" if layout.tensors_path(path).exists() else "")

    def _columns(self, record: Record) -> dict[str, list[str]]:
        return layout.columns_by_group((*self._keys, *record.values))

    def _create_content(self, file: h5py.File, record: Record) -> None:
        layout.create_tables(file, self._columns(record))

    def _rewrite(self, source: h5py.File, target: Path, attributes: layout.Attributes | None = None, record: Record | None = None) -> None:
        if record is None:
            layout.rewrite(source, target, attributes=attributes)
        else:
            layout.rewrite(source, target, attributes=attributes, more=self._columns(record), before_step=self._resume_from)

    def _adopt(self, file: h5py.File) -> None:
        self._file, self._tables, self._place_by_key, self._last_keys = file, [], {}, ()
        for group, columns in layout.read_columns(file).items():
            start = len(self._place_by_key)
            self._place_by_key |= {layout.join(group, column): start + index for index, column in enumerate(columns)}
            self._tables.append(_table_at_end(file[group], slice(start, start + len(columns))))

    def _append(self, record: Record) -> None:
        assert self._file is not None
        self._make_room(record)
        row = np.full(len(self._place_by_key), layout.ABSENT)
        row[self._places(record)] = np.fromiter(record.values.values(), np.float64, len(record.values))
        writer.require_space(self.path.parent, 2 * row.nbytes)
        touched = [table for table in self._tables if not layout.is_absent(row[table.part]).all()]
        for table in touched:
            table.put_values(record.step, row[table.part])
        # The steps last: a row is complete once its step is there, so its values must be on their way before.
        self._file.flush()
        for table in touched:
            table.put_step(record.step)
        self._file.flush()

    def _places(self, record: Record) -> NDArray[np.int64]:
        """Where the record's values belong in the row of all keys; looked up anew only if other keys came than last time."""
        keys = tuple(record.values)
        if keys != self._last_keys:
            self._last_places = np.fromiter(map(self._place_by_key.__getitem__, keys), np.int64, len(keys))
            self._last_keys = keys
        return self._last_places

    def _make_room(self, record: Record) -> None:
        """A column for each of the record's keys."""
        if tuple(record.values) != self._last_keys and (late := [key for key in record.values if key not in self._place_by_key]):
            self._logger.info("Step %d brought %d new keys (%s, ...): the store gets columns for them.", record.step, len(late), late[0])
            self._widen(late)

    def _widen(self, late: list[str]) -> None:
        temporary = layout.temporary_path(self.path)
        writer.require_space(self.path.parent, writer.bytes_to_copy(self.path))
        layout.rewrite(self._file, temporary, more=layout.columns_by_group(late))
        # All of it was flushed, and its successor has it all.
        layout.abandon(self._file)
        self._adopt(writer.append_in_place(temporary, self.path))

    def _has_rests(self) -> bool:
        """A Ctrl-C in the middle of a row left values without a step, which xarray would not open."""
        return any(len(table.values) > table.num_rows for table in self._tables)

    def _let_go(self) -> None:
        super()._let_go()
        self._tables = []


def _table_at_end(group: h5py.Group, part: slice) -> _Table:
    steps = layout.read_steps(group)
    table = _Table(group["values"], group["steps"], part, len(steps))
    if table.num_rows:
        table.last_step, table.last_row = int(steps[-1]), table.values[table.num_rows - 1]
    return table
