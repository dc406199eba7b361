"""The store: one HDF5 file a run, appended to while training, read while it grows, whole after a kill."""

from __future__ import annotations

import importlib.metadata
import itertools
import logging
import os
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from filelock import BaseFileLock
from numpy.typing import NDArray

from lightning_module_monitor.bins import Histogram
from lightning_module_monitor.record import Record
from lightning_module_monitor.sinks import layout, lock

_logger = logging.getLogger(__name__)

_DISTRIBUTION = "lightning-module-monitor"
_SPARE_BYTES = 8 * 2**20
"""Free space the disk must have besides what is about to be written: HDF5's own bookkeeping, and others who write to it."""


class _NoSpaceError(OSError):
    """The disk is about to be full."""


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


def _put(dataset: h5py.Dataset, index: int, item: layout.Values | int) -> None:
    if len(dataset) <= index:
        dataset.resize(index + 1, axis=0)
    dataset[index] = item


class Store:
    """Writes the records of one run to one HDF5 file; the single writer of that file.

    The file comes into being with the first record. From then on it can be read with ``load_store`` at any time, also after
    a ``kill -9``. A store never raises and never touches a file that is not its own: trouble is said once, training goes on.

    Args:
        path: Where the file should be; missing folders are made. If a file is there already, the next free numbered name is
            taken instead (``monitor-2.h5``), and said.
        configuration: What this run was configured with; kept in the file's attributes as JSON.
        keys: Keys of numbers that are known to come. One that turns up later costs a rewrite of the file.
        histogram_keys: Likewise of histograms.
        resume_from: The first step of a resumed run: it goes on in the file at ``path``, whose rows of this step and later ones
            are taken out when the first record comes. ``None``: a new run.
        logger: Gets a warning when another name is taken and when the store stops, and word of late keys.
    """

    path: Path
    """The file; the name it really has is known when the first record is written."""

    failed: bool
    """Whether the store has stopped writing, because of a full disk or another trouble."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        configuration: Mapping[str, object],
        keys: Iterable[str] = (),
        histogram_keys: Iterable[str] = (),
        resume_from: int | None = None,
        logger: logging.Logger = _logger,
    ) -> None:
        # Without links: replacing the file at a link's name would leave the file it points to behind.
        self.path = Path(path).resolve()
        self.failed = False
        self._configuration = configuration
        self._keys, self._histogram_keys = tuple(keys), tuple(histogram_keys)
        self._resume_from = resume_from
        self._logger = logger
        self._closed = False
        self._file: h5py.File | None = None
        self._lock: BaseFileLock | None = None
        self._tables: list[_NumberTable] = []
        self._histogram_tables: list[_HistogramTable] = []
        self._place_by_key: dict[str, int] = {}
        self._last_keys: tuple[str, ...] | None = None
        self._last_places: NDArray[np.int64] = np.empty(0, np.int64)

    def write(self, record: Record) -> None:
        """Append a record, one row in each group it has values or histograms of, and flush it. Never raises.

        Args:
            record: What there is of one step. A second record of the same step is merged into the first. Nothing is written
                after :meth:`close`.
        """
        if self.failed or self._closed or not (record.values or record.histograms):
            return
        try:
            self._make_room(record)
            self._append(record)
        except Exception as error:  # whatever it is, it must not end the training
            self._give_up(error)

    def close(self) -> None:
        """Close the file so that any HDF5 program opens it. Never raises; twice does no harm."""
        self._closed = True
        try:
            self._close_file()
        except Exception as error:  # see write
            self._give_up(error)
        finally:
            self._let_go()

    # -------------------------------------------------------------- rows

    def _append(self, record: Record) -> None:
        assert self._file is not None
        rows = list(self._rows(record))
        _require_space(self.path.parent, 2 * sum(row.nbytes for _table, row in rows))
        for table, row in rows:
            table.put_values(record.step, row)
        # The steps last: a row is complete once its step is there, so its values must be on their way before.
        self._file.flush()
        for table, _row in rows:
            table.put_step(record.step)
        self._file.flush()

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

    def _make_room(self, record: Record) -> None:
        """The file open, with a column for each of the record's keys."""
        if self._file is None:
            self._begin(record)
            return
        numbers = record.values if tuple(record.values) != self._last_keys else ()
        late = [key for key in numbers if key not in self._place_by_key]
        late_histograms = [key for key in record.histograms if not any(key in table.column_by_key for table in self._histogram_tables)]
        if late or late_histograms:
            new = late + late_histograms
            self._logger.info("Step %d brought %d new keys (%s, ...): the store gets columns for them.", record.step, len(new), new[0])
            self._widen(layout.columns_by_group(late, late_histograms))

    def _widen(self, columns: Mapping[str, list[str]]) -> None:
        temporary = layout.temporary_path(self.path)
        _require_space(self.path.parent, _bytes_to_copy(self.path))
        layout.rewrite(self._file, temporary, more=columns)
        # All of it was flushed, and its successor has it all.
        layout.abandon(self._file)
        self._adopt(_append_in_place(temporary, self.path))

    def _adopt(self, file: h5py.File) -> None:
        """Make an open file the one that is written to."""
        self._file, self._place_by_key, self._last_keys = file, {}, None
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

    # -------------------------------------------------------------- beginning

    def _begin(self, record: Record) -> None:
        """Open the file to go on in, or a new one."""
        run: dict[str, object] = {"started": _now(), "first_step": record.step, "configuration": dict(self._configuration)}
        columns = layout.columns_by_group((*self._keys, *record.values), (*self._histogram_keys, *record.histograms))
        reason = "it exists"
        if self._resume_from is not None and self.path.exists():
            reason = self._resume(run, columns)
        if self._file is None:
            self._create(run, columns, reason)

    def _resume(self, run: dict[str, object], columns: Mapping[str, list[str]]) -> str:
        """Go on in the file at ``path``, if that is possible; otherwise say why not."""
        self._lock = lock.acquire(self.path)
        if self._lock is None:
            return "it cannot be resumed: another run is writing to it"
        temporary = layout.temporary_path(self.path)
        _require_space(self.path.parent, _bytes_to_copy(self.path))
        try:
            with layout.open_store(self.path, has_writer=False) as source:
                attributes = layout.read_attributes(source)
                attributes.configurations.append(run)
                layout.rewrite(source, temporary, attributes=attributes, more=columns, before_step=self._resume_from)
        except Exception as error:  # a damaged file fails in any of HDF5's ways; it stays as it is
            self._let_go()
            return f"it cannot be resumed: {textwrap.shorten(str(error), 300)}".rstrip(".")
        self._adopt(_append_in_place(temporary, self.path))
        return ""

    def _create(self, run: dict[str, object], columns: Mapping[str, list[str]], reason: str) -> None:
        """Begin a new file, at ``path`` or beside it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _require_space(self.path.parent, 0)
        wanted = self.path
        self.path, self._lock = _reserve(wanted)
        if self.path != wanted:
            self._logger.warning("The store at %s is left as it is: %s. This run writes to %s.", wanted, reason, self.path)
        temporary = layout.temporary_path(self.path)
        try:
            with layout.new_file(temporary, layout.Attributes(_package_version(), str(run["started"]), [run]), columns):
                pass  # the rows come later
            self._adopt(_append_in_place(temporary, self.path))
        except BaseException:
            self.path.unlink()
            raise

    # -------------------------------------------------------------- ending

    def _close_file(self) -> None:
        if self._file is None:
            return
        _require_space(self.path.parent, 0)
        if any(len(table.values) > table.num_rows for table in (*self._tables, *self._histogram_tables)):
            self._take_out_unfinished_rows()
        self._file.close()
        self._file = None

    def _take_out_unfinished_rows(self) -> None:
        """A Ctrl-C in the middle of a row left values without a step, which xarray would not open."""
        temporary = layout.temporary_path(self.path)
        _require_space(self.path.parent, _bytes_to_copy(self.path))
        layout.rewrite(self._file, temporary)
        layout.abandon(self._file)
        layout.replace(temporary, self.path)

    def _give_up(self, error: Exception) -> None:
        self.failed = True
        # HDF5's messages are long, and have line ends in them.
        reason = textwrap.shorten(str(error) or type(error).__name__, 300)
        message = "The store %s stops here (%s). Training goes on; what was written before can be read with load_store."
        self._logger.warning(message, self.path, reason)
        self._let_go()

    def _let_go(self) -> None:
        """Forget the file, as it was last flushed, and let others have it."""
        if self._file is not None:
            layout.abandon(self._file)
        if self._lock is not None:
            lock.release(self._lock)
        self._file, self._lock, self._tables, self._histogram_tables = None, None, [], []


def _at_end(group: h5py.Group) -> dict[str, Any]:
    """What a table is made with, to go on behind its last row."""
    steps = layout.read_steps(group)
    end: dict[str, Any] = {"values": group["values"], "steps": group["steps"], "num_rows": len(steps)}
    if len(steps):
        end |= {"last_step": int(steps[-1]), "last_row": group["values"][len(steps) - 1]}
    return end


def _append_in_place(temporary: Path, path: Path) -> h5py.File:
    """Open a finished file for appending and give it its name.

    In this order: a file at ``path`` can be read at any moment, also if a kill comes in between.
    """
    if os.name == "nt":  # Windows renames no open file; a kill in between needs HDF5's h5clear tool
        layout.replace(temporary, path)
        return layout.open_for_appending(path)
    file = layout.open_for_appending(temporary)
    try:
        layout.replace(temporary, path)
    except BaseException:
        layout.abandon(file)
        raise
    return file


def _reserve(wanted: Path) -> tuple[Path, BaseFileLock]:
    """The first free name, made an empty file so that no other program takes it, and its lock."""
    for path in _numbered(wanted):
        if path.exists() or (held := lock.acquire(path)) is None:
            continue
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            lock.release(held)
            continue
        except BaseException:
            lock.release(held)
            raise
        return path, held
    raise AssertionError  # the names do not end


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    for number in itertools.count(2):
        yield path.with_name(f"{path.stem}-{number}{path.suffix}")


def _require_space(folder: Path, num_bytes: int) -> None:
    # Before, not after: HDF5 does not survive a failed write (see layout.abandon).
    free = shutil.disk_usage(folder).free
    if free < num_bytes + _SPARE_BYTES:
        message = f"the disk is full: {free / 2**20:.1f} MiB are free in {folder}, {(num_bytes + _SPARE_BYTES) / 2**20:.1f} MiB are needed"
        raise _NoSpaceError(message)


def _bytes_to_copy(path: Path) -> int:
    return path.stat().st_size * 5 // 4  # a union of columns is a little larger than its parts


def _package_version() -> str:
    try:
        return importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
