"""Writes a store: a plain HDF5 file, which is replaced as a whole, and the journal of what came since."""

from __future__ import annotations

import io
import logging
import os
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.display import counted
from lightning_module_monitor.errors import shortened
from lightning_module_monitor.health.facts import Facts
from lightning_module_monitor.histogram import Histogram
from lightning_module_monitor.keys import Columns
from lightning_module_monitor.record import ModuleInfo, Record, is_absent
from lightning_module_monitor.sinks.store import file_writer, journal, lock, owner, paths, schema
from lightning_module_monitor.sinks.store.file_writer import REMOVED, REPLACED, Entry, Writer, reason_of
from lightning_module_monitor.sinks.store.journal import Journal, JournalFile, Part, record_frame
from lightning_module_monitor.sinks.store.schema import Version
from lightning_module_monitor.sinks.store.successor import successor, take_in

_SMALL = 16 << 20
"""Bytes at which a journal is merged into the file; or when it is as large as the file, whichever is later."""
_AGE_S = 600.0
_MAX_SHARE = 0.01
"""A smaller journal is taken in when it is so old, as long as that took less than this share of the run's time."""


class Store(Writer):
    """Writes the values, histograms and findings of the records of one run: a row in each table for which the record has a key.

    A second record of a step is merged into the first. Read it with ``load_store``. ``keys`` and ``histogram_keys`` get their columns
    at the start, in this order. The other arguments are those of :class:`~lightning_module_monitor.sinks.store.file_writer.Writer`.

    The first record creates the file. Later records are in the journal beside it, until the file is replaced by one that has them:
    when the journal is as large as the file (at least 16 MiB), when it is ten minutes old, at a checkpoint, and at the end.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, keys: Iterable[str] = (), histogram_keys: Iterable[str] = (), **options: Any
    ) -> None:
        super().__init__(path, **options)
        self._keys, self._histogram_keys = tuple(keys), tuple(histogram_keys)
        self._version = Version("", 0, self.run)
        self._signature: tuple[int, ...] = ()
        """Of the file as this run wrote it."""
        self._encoder = Encoder({})
        self._journal: JournalFile | None = None
        """Begun with the first record after the file was written."""
        self._renewal: owner.Renewal | None = None
        self._begun_at = self._written_at = time.monotonic()
        self._seconds = 0.0
        """Time that it took to replace the file."""
        self._due_size = 0
        """Length of the journal at which the file is replaced."""
        self._has_failed_to_replace = False

    def checkpoint(self) -> None:
        """Bring the file up to date for a checkpoint, if that is cheap, and nothing is being written. Never raises."""
        if self._is_at_work:
            return
        self._is_at_work = True
        try:
            if self._journal is not None and not self._is_closed and self._journal.has_records:
                with suppress(OSError):  # a file that was removed is reported with the next record
                    if self._journal.size + self.path.stat().st_size <= _SMALL or self._is_cheap():
                        self._replace_file()
        finally:
            self._is_at_work = False

    # -------------------------------------------------------------- content

    def _concerns(self, entry: Entry) -> bool:
        record = entry.record
        return bool(record.is_recorded.any() or record.histograms or entry.findings)

    def _reason_taken(self, path: Path) -> str:
        # If only the store of an earlier run was deleted, its tensors would be read as those of this run.
        beside = paths.tensors_path(path)
        return super()._reason_taken(path) or (f"{beside.name} exists" if paths.has_content(beside) else "")

    def _begin(self, entry: Entry) -> None:
        self._journal = None
        super()._begin(entry)
        self._note_file()
        self._encoder.note_written(entry)
        if self._lock is not None and not self._lock.is_exclusive:
            message = "%s: its file system has no locks (flock); the journal beside it tells other runs that this one writes."
            self._logger.info(message, self.path)
            self._renewal = owner.Renewal(paths.journal_path(self.path))
        with suppress(OSError):  # tried again, and reported, with the next record
            self._begin_journal()

    def _fill(self, file: h5py.File, entry: Entry, version: Version) -> None:
        self._encoder = Encoder(schema.read_columns(file), self._keys, self._histogram_keys)
        frames = journal.head_frame(owner.head(version)) + self._encoder.frame(entry)
        take_in(file, Journal(io.BytesIO(frames)))
        schema.write_version(file, version)
        self._version = version

    def _append(self, entry: Entry) -> None:
        opened = self._journal or self._begin_journal()
        opened.append(self._encoder.frame(entry))
        if new := self._encoder.new_keys():
            self._logger.info("Step %d brought %s (%s).", entry.record.step, counted(len(new), "new key"), shortened(new))
        self._encoder.note_written(entry)
        now = time.monotonic()
        is_old = now - self._written_at >= _AGE_S and self._is_cheap()
        if is_old or opened.size >= self._due_size or not opened.is_at_path():
            self._replace_file()

    def _finish(self) -> None:
        if self._journal is not None and self._journal.has_records and not self._replace_file():
            with suppress(OSError):
                self._journal.append(journal.END_FRAME)
        else:
            journal.remove(paths.journal_path(self.path), self._version.lineage)

    # -------------------------------------------------------------- file and journal

    def _begin_journal(self) -> JournalFile:
        path = paths.journal_path(self.path)
        kept = journal.set_aside(path, self._version.lineage)
        if kept is not None:
            self._logger.warning("The journal %s belongs to another file than %s; it is now %s.", path, self.path, kept)
        self._journal = JournalFile(path, owner.head(self._version))
        return self._journal

    def _replace_file(self) -> bool:
        """Replace the file by one that has the journal; if that is not possible, the journal goes on."""
        assert self._journal is not None
        begin, version = time.monotonic(), self._version._replace(generation=self._version.generation + 1)
        try:
            with self._journal.opened() as opened, successor(self.path, self.path) as file:
                if schema.read_version(file) != self._version:  # reported with the next record
                    raise ValueError("another file is in its place")  # noqa: TRY301  # the copy is dropped as after any other error
                journal_of_run = Journal(opened)
                if journal_of_run.index.damaged_at is not None:
                    self._logger.warning("The journal of %s is damaged: records since its last replacement are lost.", self.path)
                take_in(file, journal_of_run)
                schema.write_version(file, version)
        except Exception as error:  # HDF5 raises many types of error
            if self._is_closed or not self._has_failed_to_replace:
                # A warning at the end, if there was none about records that are lost: until then nothing is missing.
                level = logging.WARNING if self._is_closed and not self.failed else logging.INFO
                message = "The store %s cannot be replaced by one with its latest records (%s). They stay in %s; load_store reads both."
                self._logger.log(level, message, self.path, reason_of(error), paths.journal_path(self.path))
            self._has_failed_to_replace = True
            return False
        else:
            self._close_journal()
            self._version = version
            self._note_file()
            return True
        finally:
            self._written_at = time.monotonic()
            self._seconds += self._written_at - begin
            self._due_size = max(self._due_size, 0 if self._journal is None else self._journal.size + _SMALL)

    def _is_cheap(self) -> bool:
        return self._seconds < _MAX_SHARE * (time.monotonic() - self._begun_at)

    def _note_file(self) -> None:
        """Remember the file as it was written."""
        self._signature = _signature(self.path)
        self._due_size = max(_SMALL, self.path.stat().st_size)

    def _change(self) -> str:
        try:
            signature = _signature(self.path)
        except (FileNotFoundError, NotADirectoryError):
            change = REMOVED
        except OSError:  # the folder does not allow to look
            change = ""
        else:
            change = "" if signature == self._signature else self._change_of_content(signature)
        if change and self._journal is not None and self._journal.is_at_path():
            # The file may be elsewhere, without its last records.
            kept = journal.set_aside(paths.journal_path(self.path), "") if self._journal.has_records else None
            if kept is not None:
                self._logger.warning("The last records of %s are in its journal, which is now %s.", self.path, kept)
            else:
                journal.remove(paths.journal_path(self.path), self._version.lineage)
        return change

    def _change_of_content(self, signature: tuple[int, ...]) -> str:
        """Whether another file is at the path. On some network file systems a file has no number that stays, and its time is coarse."""
        if not signature:
            return REMOVED
        try:
            with h5py.File(self.path, "r", locking=False) as file:
                version = schema.read_version(file)
        except Exception:  # see _replace_file
            return REPLACED
        if (version.lineage, version.run) != (self._version.lineage, self._version.run):
            return REPLACED
        if version != self._version:  # an interrupt came right after the file was replaced
            self._close_journal()
        self._version, self._signature = version, signature
        return ""

    def _close_journal(self) -> None:
        opened, self._journal = self._journal, None
        if opened is not None:
            opened.close()

    def _leave(self) -> None:
        self._close_journal()
        if self._renewal is not None:
            self._renewal.end()
        super()._leave()

    def _reason_against(self, version: Version) -> str:
        return "" if version.lineage else "it was written by an earlier version, whose files are read, but not continued"

    def _may_take_over(self, held: lock.Lock) -> bool:
        return held.is_exclusive or owner.has_ended(paths.journal_path(self.path), held.file, self._resumed_run)


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
        """The columns that the places are of, and how many of them."""
        self._texts: list[str] = []
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
        return record_frame(Part(int(record.step), file_writer.now(), entry.findings, facts, modules), self._new, rows)

    def note_written(self, entry: Entry) -> None:
        """The frame of an entry was written: later frames leave out what it brought."""
        self._new = {}
        self._last_facts = entry.facts or self._last_facts
        self._last_modules = entry.record.modules

    def _places_of(self, record: Record) -> list[_Place]:
        """Looked up once for all records with the same columns."""
        bound = record.columns, len(record.numbers)
        if self._bound[0] is not bound[0] or self._bound[1] != bound[1]:
            texts = record.columns.texts[: len(record.numbers)]
            if texts == self._texts:  # of a record with columns of its own
                self._bound = bound
                return self._places
            by_group: dict[str, tuple[list[int], list[int]]] = {}
            for number, key in enumerate(texts):
                group, column = schema.split(key)
                numbers, columns = by_group.setdefault(group, ([], []))
                numbers.append(number)
                columns.append(self._column(group, column))
            self._places = [_Place(group, np.array(numbers), np.array(columns)) for group, (numbers, columns) in by_group.items()]
            self._bound, self._texts = bound, texts
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


def _signature(path: Path) -> tuple[int, ...]:
    """Tells a file from another at its path; empty for what is no file."""
    status = path.lstat()
    return (status.st_ino, status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else ()
