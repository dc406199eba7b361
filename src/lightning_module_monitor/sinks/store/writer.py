"""Writers of a run's files. A file has one writer and is readable at any moment; an error of a writer never ends the training."""

from __future__ import annotations

import json
import logging
import os
import stat
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_module_monitor.display import counted
from lightning_module_monitor.errors import Log, package_version, shortened
from lightning_module_monitor.health.facts import Facts
from lightning_module_monitor.record import Finding, Record
from lightning_module_monitor.sinks.store import lock, open_file, paths, rewrite, schema, space
from lightning_module_monitor.sinks.store.open_file import Entry
from lightning_module_monitor.sinks.store.read_access import open_store

_logger = logging.getLogger(__name__)


class Writer(ABC):
    """The single writer of one HDF5 file: writes its part of each record of a run.

    The first record with such a part creates the file. It can then be read at any time, also after a ``kill -9``. A writer never raises
    and never changes another writer's file. Without space for a record it logs one warning, and tries again at growing intervals.

    Args:
        path: Path of the file; missing folders are created. If the file exists, the next free numbered name is used instead
            (``monitor-2.h5``), and logged.
        configuration: The configuration of this run, stored in the file's attributes as JSON.
        resumed: The file of the resumed run, or of an earlier loop of the same Trainer. If it is ``path``, this run continues the file.
            Otherwise this run begins its own file with a copy of it.
        resume_from: The first step of this run, if it resumes another. Rows of this step and later ones move to the group ``superseded``
            of a continued file, and are left out of a copy.
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
        # Without links: a rename to a link's name would replace the link and not its target.
        self.path = self._wanted = Path(path).resolve()
        """The file; its final name is known when the first record is written."""
        self.failed = False
        """Whether any record could not be written."""
        self._configuration = configuration
        self._resumed = None if resumed is None else resumed.resolve()
        self._resume_from = resume_from
        self._logger = logger
        self._is_closed = False
        self._lock: lock.Lock | None = None
        """Held from the first record of this file to the end."""
        self.has_begun = False
        """Whether the file at the path is of this run, which has created or continued it."""
        self._num_missing = 0
        """Records lost since the last written record."""
        self._num_to_skip, self._next_num_to_skip = 0, 1
        """Records to skip until the next attempt to write, and after the next failure."""

    def write(self, record: Record, findings: Sequence[Finding] = (), facts: Facts | None = None) -> None:
        """Append a record, what was found with it, and the facts of its step, and flush them.

        Never raises; nothing is written after :meth:`close`.
        """
        try:
            entry = Entry(record.step, record.values, record.histograms, record.tensors, record.modules, findings, facts)
            if self._is_closed or not self._concerns(entry):
                return
            if self._num_to_skip:
                self._num_to_skip -= 1
                self._num_missing += 1
                return
            if self._was_removed(f"the records from step {record.step} on are in a new file"):
                self._finish()
                self._release()
                self._resumed = None
            if self._lock is None:
                self._begin(entry)
            self._append(entry)
        except Exception as error:  # no error may end the training
            # Before the beginning no file is open; without space nothing was written since the last flush.
            if isinstance(error, space.NoSpaceError) or (self._lock is None and isinstance(error, OSError)):
                self._postpone(record.step, error)
            else:
                self._give_up(error)
        else:
            if self._num_missing:
                self._logger.info("%s is written again from step %d on; %d records are missing.", self.path, record.step, self._num_missing)
            self._num_missing = 0

    def close(self) -> None:
        """Close the file so that any HDF5 program opens it. Never raises; a second call does nothing."""
        self._is_closed = True
        try:
            self._was_removed("its records are not there")
            self._finish()
        except Exception as error:  # see write
            self._give_up(error)
        finally:
            self._release()

    def _was_removed(self, consequence: str) -> bool:
        """Whether this run's open file is no longer at its path, for example because its folder was removed; a warning reports it."""
        if self._lock is None or not self.has_begun or not _is_removed(self.path):
            return False
        message = "The store %s was removed or renamed while the run wrote to it: %s. Training goes on."
        self._logger.warning(message, self.path, consequence)
        self.has_begun = False
        return True

    # -------------------------------------------------------------- content

    @abstractmethod
    def _concerns(self, record: Entry) -> bool:
        """Whether a record has a part for this file."""

    @abstractmethod
    def _append(self, record: Entry) -> None:
        """Write and flush a record: it survives a kill."""

    def _columns(self, record: Entry) -> dict[str, list[str]] | None:
        """Columns by group that the file needs for a record; ``None`` for a file of raw tensors."""
        return None

    def _put_in_place(self, temporary: Path) -> None:
        """Rename a finished file to ``path``, where a file is readable at any moment, and open it for appending."""
        paths.replace(temporary, self.path)

    @abstractmethod
    def _finish(self) -> None:
        """Close the file, if it is open, so that any HDF5 program opens it."""

    def _reason_taken(self, path: Path) -> str:
        """The reason why ``path`` cannot be used for a new file; empty if it can."""
        return "it exists" if paths.has_content(path) else ""

    def _remove_leftovers(self, path: Path) -> None:
        """Remove the temporary files that a killed run left beside the files of ``path``."""
        for file in (path, paths.tensors_path(path)):
            file_lock = lock.acquire(file) if lock.exists(file) else None
            if file_lock is not None:
                paths.temporary_path(file).unlink(missing_ok=True)
                lock.release(file_lock)

    # -------------------------------------------------------------- beginning

    def _begin(self, record: Entry) -> None:
        """Continue the resumed run's file, or create a new one; after an error no file is open."""
        run: dict[str, object] = {"started": open_file.now(), "first_step": record.step, "configuration": dict(self._configuration)}
        try:
            if self._resumed is not None and not paths.has_content(self._resumed):
                self._resumed = None
            reason = self._continue(run, record) if self._resumed == self.path else ""
            if self._lock is None:
                self._create(run, record, reason)
            self._put_in_place(paths.temporary_path(self.path))
        except BaseException:
            self.path = self._wanted
            self._release()
            raise
        self.has_begun = True

    def _continue(self, run: dict[str, object], record: Entry) -> str:
        """Prepare to continue the file at ``path``; returns the reason, and holds no lock, if that is not possible."""
        self._lock = lock.acquire(self.path, needs_lock=False)
        if self._lock is None:
            return "it cannot be resumed: another run is writing to it"
        outcome = self._copy_resumed(run, record, is_own=True)
        if isinstance(outcome, str):
            self._release()
            self._resumed = None
            return f"it cannot be resumed: {outcome}".rstrip(".")
        if self._resume_from is not None:
            num = outcome[1]
            superseded = f"; {num} {self._ITEMS} of steps that run again are now in its group superseded" if num else ""
            self._logger.info("%s goes on from step %d%s.", self.path, self._resume_from, superseded)
        return ""

    def _create(self, run: dict[str, object], record: Entry, reason: str) -> None:
        """Prepare a new file with a free name."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        reason = reason or self._reason_taken(self._wanted) or "another run begins it"
        self.path, self._lock = self._lock_free_name()
        if self.path != self._wanted:
            self._logger.warning("The store at %s is left as it is: %s. This run writes to %s.", self._wanted, reason, self.path)
        if self._resumed is not None:
            outcome = self._copy_resumed(run | {"copied_from": str(self._resumed)}, record, is_own=False)
            if not isinstance(outcome, str):
                message = "%s goes on from step %s; it begins with a copy of %d %s of earlier steps from %s, which is left as it is."
                self._logger.info(message, self.path, record.step, outcome[0], self._ITEMS, self._resumed)
                return
            message = "%s begins without a copy of %s, which has the earlier steps of the resumed run, because that cannot be read: %s"
            self._logger.warning(message, self.path, self._resumed, outcome)
        attributes = schema.Attributes(package_version(), str(run["started"]), [run])
        rewrite.new_file(paths.temporary_path(self.path), attributes, self._columns(record), record.modules)

    def _copy_resumed(self, run: dict[str, object], record: Entry, *, is_own: bool) -> tuple[int, int] | str:
        """Copy the file of the resumed run, with columns for the record; returns numbers of rows, or the reason if that is not possible.

        ``is_own`` means that the copy replaces that file: superseded rows stay in it.
        """
        assert self._resumed is not None
        has_writer = not is_own and lock.has_holder(self._resumed)
        temporary, columns = paths.temporary_path(self.path), self._columns(record)
        try:
            with open_store(self._resumed, has_writer=has_writer, is_checked=False) as source:
                attributes = schema.read_attributes(source)
                changes = _changed_options(attributes.configurations[-1], self._configuration)
                if changes and columns is not None:  # the store logs them; the file of raw tensors has the same configurations
                    message = "The resumed run had another configuration (%s). In the store, rows from step %d on belong to the new one."
                    self._logger.warning(message, "; ".join(changes), record.step)
                attributes.configurations.append(run)
                options: dict[str, Any] = {"attributes": attributes, "before_step": self._resume_from, "with_superseded": is_own}
                return rewrite.rewrite(source, temporary, more=columns or {}, modules=record.modules, **options)
        except space.NoSpaceError:
            raise
        except Exception as error:  # HDF5 raises many types of error for a damaged file, which stays unchanged
            return _reason(error)

    def _lock_free_name(self) -> tuple[Path, lock.Lock]:
        """The first free name, with its lock, which keeps other runs from using the name."""
        for path in paths.numbered_paths(self._wanted):
            if self._reason_taken(path):
                self._remove_leftovers(path)
            elif (path_lock := lock.acquire(path, needs_lock=False)) is not None:
                if not self._reason_taken(path):  # a run that held the lock until now may have used the name
                    return path, path_lock
                lock.release(path_lock)
        raise AssertionError  # numbered_paths never ends

    # -------------------------------------------------------------- ending

    def _postpone(self, step: int, error: Exception) -> None:
        """Skip this record, for lack of space, and the next records, twice as many after each failure."""
        if not self._num_missing:
            rest = "what was written before can be read with load_store, and" if self.has_begun else "there is no file yet;"
            message = "The store %s cannot be written at step %d (%s). Training goes on; %s later records are tried again."
            self._logger.log(logging.INFO if self.failed else logging.WARNING, message, self.path, step, _reason(error), rest)
        self.failed = True
        self._num_missing += 1
        self._num_to_skip, self._next_num_to_skip = self._next_num_to_skip, 2 * self._next_num_to_skip

    def _give_up(self, error: Exception) -> None:
        self.failed = self._is_closed = True
        rest = "; what was written before can be read with load_store" if self.has_begun else ""
        self._logger.warning("The store %s stops here (%s). Training goes on%s.", self.path, _reason(error), rest)
        self._release()

    def _release(self) -> None:
        """Close the file as it was last flushed, and release its lock."""
        if self._lock is not None:
            lock.release(self._lock)
        self._lock = None


class Store(Writer):
    """Writes the values, histograms and findings of the records of one run: a row in each group for which the record has a key.

    A second record of a step is merged into the first. Read it with ``load_store``. ``keys`` and ``histogram_keys`` get their columns
    at the start: any other key costs a rewrite of the file. The other arguments are those of :class:`Writer`.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, keys: Iterable[str] = (), histogram_keys: Iterable[str] = (), **options: Any
    ) -> None:
        super().__init__(path, **options)
        self._keys, self._histogram_keys = tuple(keys), tuple(histogram_keys)
        self._open_file: open_file.OpenFile | None = None

    def _concerns(self, record: Entry) -> bool:
        return bool(record.values or record.histograms or record.findings)

    def _reason_taken(self, path: Path) -> str:
        # If only the store of an earlier run was deleted, its tensors would be read as those of this run.
        beside = paths.tensors_path(path)
        return super()._reason_taken(path) or (f"{beside.name} exists" if paths.has_content(beside) else "")

    def _columns(self, record: Entry) -> dict[str, list[str]]:
        return schema.columns_by_group((*self._keys, *record.values), (*self._histogram_keys, *record.histograms))

    def _begin(self, record: Entry) -> None:
        super()._begin(record)
        if self._lock is not None and not self._lock.is_exclusive:
            message = "%s: its file system has no locks (flock), so that a second run with the same path would not be noticed."
            self._logger.info(message, self.path)

    def _put_in_place(self, temporary: Path) -> None:
        self._open_file = open_file.OpenFile(rewrite.append_in_place(temporary, self.path))

    def _append(self, record: Entry) -> None:
        assert self._open_file is not None
        late, late_histograms = self._open_file.numbers.missing(record.values), self._open_file.histograms.missing(record.histograms)
        if new := late + late_histograms:
            self._logger.info("Step %d brought %s (%s).", record.step, counted(len(new), "new key"), shortened(new))
        if new or not self._open_file.update_modules(record.modules):
            temporary = paths.temporary_path(self.path)
            columns = schema.columns_by_group(late, late_histograms)
            rewrite.rewrite(self._open_file.file, temporary, more=columns, modules=record.modules)
            space.close(self._open_file.file)
            self._put_in_place(temporary)
        self._open_file.append(record)

    def _finish(self) -> None:
        opened, self._open_file = self._open_file, None
        if opened is None:
            return
        temporary, is_rewritten = paths.temporary_path(self.path), False
        # A row interrupted by Ctrl-C or by lack of space has values without a step, which xarray does not open.
        if any(len(table.values) > table.num_rows for table in (*opened.numbers.tables, *opened.histograms.tables)):
            with suppress(space.NoSpaceError):
                rewrite.rewrite(opened.file, temporary)
                is_rewritten = True
        space.close(opened.file)
        if is_rewritten:
            paths.replace(temporary, self.path)

    def _release(self) -> None:
        if self._open_file is not None:
            rewrite.abandon(self._open_file.file)
        self._open_file = None
        super()._release()


def _changed_options(run: Mapping[str, Any], configuration: Mapping[str, object]) -> list[str]:
    """A text for each option with another value than in a run of ``Attributes.configurations``."""
    before, now = run["configuration"], json.loads(json.dumps(dict(configuration), default=str))
    texts = {name: [textwrap.shorten(json.dumps(options.get(name)), 100) for options in (before, now)] for name in {**before, **now}}
    return [f"{name} was {was}, is {is_now}" for name, (was, is_now) in texts.items() if before.get(name) != now.get(name)]


def _is_removed(path: Path) -> bool:
    """Whether there is no file at a path; false if the folder does not allow to look.

    Another file there is not noticed: on some network file systems a file has no number that stays.
    """
    try:
        return not stat.S_ISREG(path.lstat().st_mode)
    except OSError as error:
        return isinstance(error, FileNotFoundError | NotADirectoryError)


def _reason(error: Exception) -> str:
    # HDF5's messages are long and have several lines.
    return textwrap.shorten(str(error) or type(error).__name__, 300)
