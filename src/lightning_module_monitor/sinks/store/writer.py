"""Writers of a run's files: one writer per file, a name of their own, whole after a kill, never the end of the training."""

from __future__ import annotations

import json
import logging
import os
import re
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from filelock import BaseFileLock
from numpy.typing import NDArray

from lightning_module_monitor.errors import Log, package_version
from lightning_module_monitor.histogram import NUM_COUNTS
from lightning_module_monitor.record import ModuleInfo, Record
from lightning_module_monitor.sinks.store import lock, rewrite, schema, space
from lightning_module_monitor.sinks.store.opening import open_store

_logger = logging.getLogger(__name__)


class Writer(ABC):
    """Writes its part of the records of one run to one HDF5 file; the single writer of that file.

    The first record with such a part creates the file. From then on it can be read at any time, also after a ``kill -9``. A writer never
    raises and never touches another's file. Where there is no space for a record, one warning is logged, and records are tried again at
    growing distances.

    Args:
        path: Where the file should be; missing folders are made. If a file is there already, the next free numbered name is
            taken instead (``monitor-2.h5``), and logged.
        configuration: What this run was configured with; kept in the file's attributes as JSON.
        resumed: The file of the run that is resumed, or whose next loop this is. If it is the one at ``path``, this run goes on in it.
            Otherwise this run begins its own file with a copy of the other one, which is only read.
        resume_from: The first step of this run, if it resumes another. What the other one recorded of this step and later ones moves to the
            group ``superseded`` of a file that is continued, and is left out of a copy.
        logger: Gets a warning when another name is taken and when records are lost, and a line when a run is resumed.
    """

    _ITEMS = "rows"
    """The noun in messages."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        configuration: Mapping[str, object],
        resumed: Path | None = None,
        resume_from: int | None = None,
        logger: Log = _logger,
    ) -> None:
        # Without links: replacing the file at a link's name would leave the file it points to behind.
        self.path = self._wanted = Path(path).resolve()
        """The file; its final name is known when the first record is written."""
        self.failed = False
        """Whether any record could not be written."""
        self._configuration = configuration
        self._resumed = None if resumed is None else resumed.resolve()
        self._resume_from = resume_from
        self._logger = logger
        self._is_closed = False
        self._lock: BaseFileLock | None = None
        """Held from the first record of this file to the end."""
        self.has_begun = False
        """Whether this run has created the file at the path, or continued it."""
        self._num_missing = 0
        """Records that were lost since the last one that was written."""
        self._num_to_skip, self._next_distance = 0, 1

    def write(self, record: Record) -> None:
        """Append a record, and flush it. Never raises; nothing is written after :meth:`close`."""
        try:
            if self._is_closed or not self._concerns(record):
                return
            if self._num_to_skip:
                self._num_to_skip -= 1
                self._num_missing += 1
                return
            if self._lock is None:
                self._begin(record)
            self._append(record)
        except Exception as error:  # whatever it is, it must not end the training
            # Nothing is open before the beginning, and a file whose space was refused is as it was flushed.
            if isinstance(error, space.NoSpaceError) or (self._lock is None and isinstance(error, OSError)):
                self._postpone(record.step, error)
            else:
                self._give_up(error)
        else:
            if self._num_missing:
                self._logger.info("%s is written again from step %d on; %d records are missing.", self.path, record.step, self._num_missing)
            self._num_missing = 0

    def close(self) -> None:
        """Close the file so that any HDF5 program opens it. Never raises; twice does no harm."""
        self._is_closed = True
        try:
            self._finish()
        except Exception as error:  # see write
            self._give_up(error)
        finally:
            self._release()

    # -------------------------------------------------------------- content

    @abstractmethod
    def _concerns(self, record: Record) -> bool:
        """Whether a record has a part for this file."""

    @abstractmethod
    def _append(self, record: Record) -> None:
        """Write a record behind the others; afterwards a kill does it no harm."""

    def _columns(self, record: Record) -> dict[str, list[str]] | None:
        """Columns by group of the tables that the file needs before a record is appended; ``None``: it is for raw tensors."""
        return None

    def _put_in_place(self, temporary: Path) -> None:
        """Give a finished file its name, at which a file can be read at any moment, and append to it from here on."""
        rewrite.replace(temporary, self.path)

    @abstractmethod
    def _finish(self) -> None:
        """Close the file, if it is open, so that any HDF5 program opens it."""

    def _reason_taken(self, path: Path) -> str:
        """The reason why a new file cannot be at ``path``; empty if it can."""
        return "it exists" if rewrite.is_there(path) else ""

    def _remove_leftovers(self, path: Path) -> None:
        """Remove the temporary file that a killed run left beside the file at ``path``."""
        held = lock.acquire(path) if lock.exists(path) else None
        if held is not None:
            rewrite.temporary_path(path).unlink(missing_ok=True)
            lock.release(held)

    # -------------------------------------------------------------- beginning

    def _begin(self, record: Record) -> None:
        """Continue the resumed run's file, or create a new one; after an error no file is open."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        run: dict[str, object] = {"started": now, "first_step": record.step, "configuration": dict(self._configuration)}
        try:
            if self._resumed is not None and not rewrite.is_there(self._resumed):
                self._resumed = None
            reason = self._continue(run, record) if self._resumed == self.path else ""
            if self._lock is None:
                self._create(run, record, reason)
            self._put_in_place(rewrite.temporary_path(self.path))
        except BaseException:
            self.path = self._wanted
            self._release()
            raise
        self.has_begun = True

    def _continue(self, run: dict[str, object], record: Record) -> str:
        """Prepare to continue the file at ``path``; returns the reason if that is not possible, without the lock."""
        self._lock = lock.acquire(self.path)
        if self._lock is None:
            return "it cannot be resumed: another run is writing to it"
        count = self._copy_resumed(run, record, is_own=True)
        if isinstance(count, str):
            self._release()
            self._resumed = None
            return f"it cannot be resumed: {count}".rstrip(".")
        if self._resume_from is not None:
            message = "%s goes on from step %d; %d %s of steps that run again are now in its group superseded."
            self._logger.info(message, self.path, self._resume_from, count.superseded, self._ITEMS)
        return ""

    def _create(self, run: dict[str, object], record: Record, reason: str) -> None:
        """Prepare a new file, to be at ``path`` or beside it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        reason = reason or self._reason_taken(self._wanted) or "another run begins it"
        self.path, self._lock = self._lock_free_name()
        if self.path != self._wanted:
            self._logger.warning("The store at %s is left as it is: %s. This run writes to %s.", self._wanted, reason, self.path)
        if self._resumed is not None:
            count = self._copy_resumed(run | {"copied_from": str(self._resumed)}, record, is_own=False)
            if not isinstance(count, str):
                message = "%s goes on from step %s; it begins with a copy of %d %s of earlier steps from %s, which is left as it is."
                self._logger.info(message, self.path, record.step, count.kept, self._ITEMS, self._resumed)
                return
            message = "%s begins without a copy of %s, which has the earlier steps of the resumed run, because that cannot be read: %s"
            self._logger.warning(message, self.path, self._resumed, count)
        attributes = schema.Attributes(package_version(), str(run["started"]), [run])
        rewrite.new_file(rewrite.temporary_path(self.path), attributes, self._columns(record), record.modules)

    def _copy_resumed(self, run: dict[str, object], record: Record, *, is_own: bool) -> rewrite.Count | str:
        """Copy the file of the resumed run, with columns for the record; returns the reason instead if that is not possible."""
        assert self._resumed is not None
        has_writer = not is_own and lock.has_holder(self._resumed)
        temporary, columns = rewrite.temporary_path(self.path), self._columns(record)
        try:
            with open_store(self._resumed, has_writer=has_writer, is_checked=False) as source:
                attributes = schema.read_attributes(source)
                if columns is not None:  # once: the file of raw tensors has the same configurations
                    self._report_changes(attributes.configurations[-1], record.step)
                attributes.configurations.append(run)
                options: dict[str, Any] = {"attributes": attributes, "before_step": self._resume_from, "with_superseded": is_own}
                return rewrite.rewrite(source, temporary, more=columns or {}, modules=record.modules, **options)
        except space.NoSpaceError:
            raise
        except Exception as error:  # a damaged file fails in any of HDF5's ways; it stays as it is
            return _reason(error)

    def _report_changes(self, before: Mapping[str, Any], step: int) -> None:
        """Report which options the resumed run had with other values."""
        was, now = before["configuration"], json.loads(json.dumps(dict(self._configuration), default=str))
        changes = [
            f"{name} was {textwrap.shorten(json.dumps(was.get(name)), 100)}, is {textwrap.shorten(json.dumps(now.get(name)), 100)}"
            for name in {**was, **now}
            if was.get(name) != now.get(name)
        ]
        if changes:
            message = "The run that is resumed had another configuration (%s). In its store rows from step %d on are of this one."
            self._logger.warning(message, "; ".join(changes), step)

    def _lock_free_name(self) -> tuple[Path, BaseFileLock]:
        """The first free name, at which no other run begins a file while its lock is held."""
        wanted = self._wanted
        for path in rewrite.numbered(wanted):
            if self._reason_taken(path):
                self._remove_leftovers(path)
            elif (held := lock.acquire(path)) is not None:
                if not self._reason_taken(path):  # by a run that held the lock until now
                    return path, held
                lock.release(held)
        raise AssertionError  # the names do not end

    # -------------------------------------------------------------- ending

    def _postpone(self, step: int, error: Exception) -> None:
        """Skip a record for lack of space, and the next ones up to the next trial."""
        if not self._num_missing:
            rest = "what was written before can be read with load_store, and" if self.has_begun else "there is no file yet;"
            message = "The store %s cannot be written at step %d (%s). Training goes on; %s later records are tried again."
            self._logger.log(logging.INFO if self.failed else logging.WARNING, message, self.path, step, _reason(error), rest)
        self.failed = True
        self._num_missing += 1
        self._num_to_skip, self._next_distance = self._next_distance, 2 * self._next_distance

    def _give_up(self, error: Exception) -> None:
        self.failed = self._is_closed = True
        rest = "; what was written before can be read with load_store" if self.has_begun else ""
        self._logger.warning("The store %s stops here (%s). Training goes on%s.", self.path, _reason(error), rest)
        self._release()

    def _release(self) -> None:
        """Release the file, as it was last flushed, for others."""
        if self._lock is not None:
            lock.release(self._lock)
        self._lock = None


class Store(Writer):
    """Writes the values, histograms and findings of the records of one run, one row in each group that a record has any of.

    A second record of a step is merged into the first. Read it with ``load_store``. ``keys`` and ``histogram_keys`` are known to come:
    any other key costs a rewrite of the file. The other arguments are those of :class:`Writer`.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, keys: Iterable[str] = (), histogram_keys: Iterable[str] = (), **options: Any
    ) -> None:
        super().__init__(path, **options)
        self._keys, self._histogram_keys = tuple(keys), tuple(histogram_keys)
        self._file: h5py.File | None = None
        self._tables: list[TableWriter] = []
        self._places: dict[str, int] = {}
        """Index of a key in the row of all numbers."""
        self._histogram_places: dict[str, int] = {}
        """Index of a key in the rows of all histograms."""
        self._last_keys: tuple[str, ...] | None = None
        self._last_places: NDArray[np.int64] = np.empty(0, np.int64)
        self._modules: list[ModuleInfo] = []
        """The modules in the file."""
        self._last_modules: Sequence[ModuleInfo] = ()

    def _concerns(self, record: Record) -> bool:
        return bool(record.values or record.histograms or record.findings)

    def _reason_taken(self, path: Path) -> str:
        # The tensors of a run whose store was deleted would be read as those of the new one.
        beside = rewrite.tensors_path(path)
        return super()._reason_taken(path) or (f"{beside.name} exists" if rewrite.is_there(beside) else "")

    def _remove_leftovers(self, path: Path) -> None:
        super()._remove_leftovers(path)
        super()._remove_leftovers(rewrite.tensors_path(path))

    def _columns(self, record: Record) -> dict[str, list[str]]:
        return schema.columns_by_group((*self._keys, *record.values), (*self._histogram_keys, *record.histograms))

    def _put_in_place(self, temporary: Path) -> None:
        self._file = rewrite.append_in_place(temporary, self.path)
        self._findings, self._last_keys = self._file[schema.FINDINGS], None
        self._facts = self._file[schema.FACTS]
        self._last_facts = next((facts for _step, facts in reversed(schema.read_facts(self._file))), None)
        self._modules = schema.read_modules(self._file)
        self._tables, self._places, self._histogram_places = [], {}, {}
        for group, columns in schema.read_columns(self._file).items():
            places = self._histogram_places if schema.has_histograms(group) else self._places
            start = len(places)
            places |= {schema.join(group, column): start + index for index, column in enumerate(columns)}
            self._tables.append(TableWriter(self._file[group], slice(start, start + len(columns))))

    def _append(self, record: Record) -> None:
        assert self._file is not None
        keys = tuple(record.values)
        if keys != self._last_keys or not record.histograms.keys() <= self._histogram_places.keys():
            self._make_columns(record)
            # Looked up once for all records with the same keys: a quarter of the time that it takes to write 5,000 numbers.
            self._last_keys, self._last_places = keys, np.fromiter(map(self._places.__getitem__, keys), np.int64, len(keys))
        if record.modules is not self._last_modules:
            self._write_modules(record.modules)
        rows, findings = self._rows(record), schema.finding_rows(record.findings)
        for_steps = sum(space.index_bytes(table.num_rows) for table, _row in rows)
        for_values = for_steps + sum(row.nbytes for _table, row in rows)
        facts = schema.fact_rows(record.step, record.facts) if record.facts not in (None, self._last_facts) else findings[:0]
        texts = [(dataset, new) for dataset, new in ((self._findings, findings), (self._facts, facts)) if len(new)]
        for_texts = sum(space.growth(dataset, len(new), len(dataset)) for dataset, new in texts)
        with space.room(self._file, for_values + for_texts + for_steps):
            for table, row in rows:
                table.put_values(record.step, row)
            for dataset, new in texts:
                dataset.resize(len(dataset) + len(new), axis=0)
                dataset[-len(new) :] = new
        self._last_facts = record.facts or self._last_facts
        # The steps last: a row is complete once its step is there, so its values must be on their way before.
        with space.room(self._file, for_steps):
            for table, _row in rows:
                table.put_step(record.step)

    def _rows(self, record: Record) -> list[tuple[TableWriter, schema.Values]]:
        """The tables that get a row, with the row."""
        numbers = np.full(len(self._places), schema.ABSENT)
        numbers[self._last_places] = np.fromiter(record.values.values(), np.float64, len(record.values))
        counts = np.full((len(self._histogram_places) if record.histograms else 0, NUM_COUNTS), schema.NOT_COUNTED, np.int64)
        for key, histogram in record.histograms.items():
            counts[self._histogram_places[key]] = histogram.row
        rows = [(table, (counts if table.values.ndim > 2 else numbers)[table.part]) for table in self._tables]
        return [(table, row) for table, row in rows if schema.is_recorded(row).any()]

    def _make_columns(self, record: Record) -> None:
        """Make a column for each of the record's keys, in a new file that replaces this one."""
        late = [key for key in record.values if key not in self._places]
        late_histograms = [key for key in record.histograms if key not in self._histogram_places]
        new = late + late_histograms
        if new:
            self._logger.info("Step %d brought %d new keys (%s, ...): the store gets columns for them.", record.step, len(new), new[0])
            self._rewrite(more=schema.columns_by_group(late, late_histograms))

    def _write_modules(self, modules: Sequence[ModuleInfo]) -> None:
        """Update the modules in place; those of a resumed run that has other ones take a new file."""
        assert self._file is not None
        known = schema.merged_modules(self._modules, modules)
        if len(known) > len(self._modules):
            self._rewrite(modules=known)
        elif known != self._modules:
            with space.room(self._file, 0):
                self._file[schema.MODULES][...] = schema.module_rows(known)
            self._modules = known
        self._last_modules = modules

    def _rewrite(self, **changes: Any) -> None:
        """Go on in a new file that replaces this one; arguments are those of :func:`rewrite.rewrite`."""
        temporary = rewrite.temporary_path(self.path)
        rewrite.rewrite(self._file, temporary, **changes)
        space.close(self._file)
        self._put_in_place(temporary)

    def _finish(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        temporary, is_rewritten = rewrite.temporary_path(self.path), False
        # After a Ctrl-C, or without space, in the middle of a row there are values without a step, which xarray would not open.
        if any(len(table.values) > table.num_rows for table in self._tables):
            with suppress(space.NoSpaceError):
                rewrite.rewrite(file, temporary)
                is_rewritten = True
        space.close(file)
        if is_rewritten:
            rewrite.replace(temporary, self.path)

    def _release(self) -> None:
        if self._file is not None:
            rewrite.abandon(self._file)
        self._file, self._tables = None, []
        super()._release()


class TableWriter:
    """Appends rows to a group of the open file, behind its last complete row.

    ``part`` are its columns among those of all tables of numbers, or of histograms.
    """

    def __init__(self, group: h5py.Group, part: slice) -> None:
        steps = schema.read_steps(group)
        self.values, self.steps, self.part = group["values"], group["steps"], part
        self.num_rows = len(steps)
        self._last_step = int(steps[-1]) if len(steps) else -1
        self._last_row: schema.Values | None = self.values[len(steps) - 1] if len(steps) else None

    def put_values(self, step: int, row: schema.Values) -> None:
        """Write a row of shape ``(columns,)`` or ``(columns, bins)``; a second one of the same step is merged into the first."""
        if self._last_row is not None and step == self._last_step:
            merged, recorded = self._last_row.copy(), schema.is_recorded(row)
            merged[recorded] = row[recorded]
            _put(self.values, self.num_rows - 1, merged)
            self._last_row = merged
        else:
            _put(self.values, self.num_rows, row)
            self._last_row = row

    def put_step(self, step: int) -> None:
        """Write the step of the row that was written last, which completes it: readers find it, also after a kill."""
        if step != self._last_step or not self.num_rows:
            _put(self.steps, self.num_rows, step)
            self.num_rows += 1
            self._last_step = step


def _put(dataset: h5py.Dataset, index: int, item: object) -> None:
    """Write one item of a dataset that grows along its first axis. ``dataset[index] = item`` takes four times as long."""
    rows = np.array([item], dataset.dtype)
    if len(dataset) <= index:
        dataset.id.set_extent((index + 1, *rows.shape[1:]))
    place = dataset.id.get_space()
    place.select_hyperslab((index, *[0] * (rows.ndim - 1)), rows.shape)
    dataset.id.write(h5py.h5s.create_simple(rows.shape), place, rows)


def is_name_of(path: Path, wanted: Path) -> bool:
    """Whether a path is one that a run with a store at ``wanted`` may have: the same, or a numbered one beside it."""
    names = re.escape(wanted.stem) + r"(-\d+)?" + re.escape(wanted.suffix)
    return path.parent == wanted.parent and re.fullmatch(names, path.name) is not None


def _reason(error: Exception) -> str:
    # HDF5's messages are long, and have line ends in them.
    return textwrap.shorten(str(error) or type(error).__name__, 300)
