"""Base of the writers of a run's files: names, locks, resumed runs, and errors, which never end the training."""

from __future__ import annotations

import json
import logging
import os
import stat
import textwrap
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import h5py

from lightning_module_monitor.errors import Log, package_version
from lightning_module_monitor.health.facts import Facts
from lightning_module_monitor.record import Finding, Record
from lightning_module_monitor.sinks.store import lock, paths, schema
from lightning_module_monitor.sinks.store.read_access import open_store
from lightning_module_monitor.sinks.store.schema import Version
from lightning_module_monitor.sinks.store.successor import NotWrittenError, successor, supersede, take_in

_logger = logging.getLogger(__name__)

REMOVED, REPLACED = "removed or renamed", "replaced"


def now() -> str:
    """The present time: ISO 8601, UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


class Entry(NamedTuple):
    """The data of a step for the files of a run."""

    record: Record
    findings: Sequence[Finding] = ()
    facts: Facts | None = None


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
        resumed_run: Identifier of the resumed run (:attr:`run`), if its checkpoint has it.
        logger: Gets a warning when another name is taken and when records are lost, and a line when a run is resumed.
    """

    _HAS_TENSORS = False
    """Whether it is a file of raw tensors."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        configuration: Mapping[str, object],
        resumed: Path | None = None,
        resume_from: int | None = None,
        resumed_run: str = "",
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
        self._resumed_run = resumed_run
        self._logger = logger
        self._is_closed = False
        self._is_at_work = False
        """Whether the files are being written: a signal's handler, which may save a checkpoint, runs in the middle of it."""
        self._lock: lock.Lock | None = None
        """Held from the first record of this file to the end."""
        self.has_begun = False
        """Whether the file at the path is of this run, which has created or continued it."""
        self._num_missing = 0
        """Records lost since the last written record."""
        self._num_to_skip, self._next_num_to_skip = 0, 1
        """Records to skip until the next attempt to write, and after the next failure."""
        self._items = "tensors" if self._HAS_TENSORS else "rows"
        """The noun in messages."""
        self.run = uuid.uuid4().hex
        """Random identifier of the run."""

    def write(self, record: Record, findings: Sequence[Finding] = (), facts: Facts | None = None) -> None:
        """Write a record, what was found with it, and the facts of its step, so that they survive a kill.

        Never raises; nothing is written after :meth:`close`.
        """
        entry = Entry(record, findings, facts)
        self._is_at_work = True
        try:
            if self._is_closed or not self._concerns(entry):
                return
            if self._num_to_skip:
                self._num_to_skip -= 1
                self._num_missing += 1
                return
            if self._was_lost(f"the records from step {record.step} on are in a new file"):
                self._leave()
                self._resumed = None
            if self._lock is None:
                self._begin(entry)
            else:
                self._append(entry)
        except OSError as error:
            self._postpone(record.step, error)
        except Exception as error:  # no error may end the training
            self._give_up(error)
        else:
            if self._num_missing:
                self._logger.info("%s is written again from step %d on; %d records are missing.", self.path, record.step, self._num_missing)
            self._num_missing = 0
        finally:
            self._is_at_work = False

    def close(self) -> None:
        """End the writing: the file then has all records. Never raises; a second call does nothing."""
        self._is_closed = True
        try:
            if not self._was_lost("its records are not there") and self._lock is not None:
                self._finish()
        except Exception as error:  # see write
            self._give_up(error)
        finally:
            self._leave()

    def _was_lost(self, consequence: str) -> bool:
        """Whether this run's file is no longer at its path, for example because its folder was removed; a warning reports it."""
        change = "" if self._lock is None or not self.has_begun else self._change()
        if not change:
            return False
        message = "The store %s was %s while the run wrote to it: %s. Training goes on."
        self._logger.warning(message, self.path, change, consequence)
        self.has_begun = False
        return True

    # -------------------------------------------------------------- content

    @abstractmethod
    def _concerns(self, entry: Entry) -> bool:
        """Whether an entry has a part for this file."""

    @abstractmethod
    def _fill(self, file: h5py.File, entry: Entry, version: Version) -> None:
        """Write the first entry of this run into the copy or the new file that this run begins with."""

    @abstractmethod
    def _append(self, entry: Entry) -> None:
        """Write a further entry."""

    @abstractmethod
    def _finish(self) -> None:
        """Write what is not in the file yet."""

    def _reason_against(self, version: Version) -> str:
        """The reason why a resumed run's file cannot be continued; empty if it can."""
        return ""

    def _may_take_over(self, held: lock.Lock) -> bool:
        """Whether no other run is known to write to the resumed run's file."""
        return True

    def _change(self) -> str:
        """What happened to the file at the path since this run wrote it; empty if nothing did, or if the folder does not allow to look."""
        try:
            return "" if stat.S_ISREG(self.path.lstat().st_mode) else REMOVED
        except OSError as error:
            return REMOVED if isinstance(error, FileNotFoundError | NotADirectoryError) else ""

    def _reason_taken(self, path: Path) -> str:
        """The reason why ``path`` cannot be used for a new file; empty if it can."""
        return "it exists" if paths.has_content(path) else ""

    def _remove_leftovers(self, path: Path) -> None:
        """Remove the temporary files that a killed run left beside the files of ``path``."""
        for file in (path, paths.tensors_path(path)):
            file_lock = lock.acquire(file) if lock.exists(file) else None
            if file_lock is not None:
                for temporary in (paths.temporary_path(file), paths.temporary_path(paths.journal_path(file))):
                    temporary.unlink(missing_ok=True)
                lock.release(file_lock)

    # -------------------------------------------------------------- beginning

    def _begin(self, entry: Entry) -> None:
        """Continue the resumed run's file, or create a new one, and write the first entry; after an error no file is begun."""
        run: dict[str, object] = {"started": now(), "first_step": entry.record.step, "configuration": dict(self._configuration)}
        try:
            if self._resumed is not None and not paths.has_content(self._resumed):
                self._resumed = None
            reason = self._continue(run, entry) if self._resumed == self.path else ""
            if self._lock is None:
                self._create(run, entry, reason)
        except BaseException:
            self.path = self._wanted
            self._leave()
            raise
        self.has_begun = True

    def _continue(self, run: dict[str, object], entry: Entry) -> str:
        """Continue the file at ``path``; returns the reason, and holds no lock, if that is not possible."""
        self._lock = lock.acquire(self.path, needs_lock=False)
        if self._lock is None or not self._may_take_over(self._lock):
            self._leave()
            return "it cannot be resumed: another run is writing to it"
        outcome = self._copy_resumed(run, entry, is_own=True)
        if isinstance(outcome, str):
            self._leave()
            self._resumed = None
            return f"it cannot be resumed: {outcome}".rstrip(".")
        if self._resume_from is not None:
            num = outcome[1]
            superseded = f"; {num} {self._items} of steps that run again are now in its group superseded" if num else ""
            self._logger.info("%s goes on from step %d%s.", self.path, self._resume_from, superseded)
        return ""

    def _create(self, run: dict[str, object], entry: Entry, reason: str) -> None:
        """Begin a new file with a free name."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        reason = reason or self._reason_taken(self._wanted) or "another run begins it"
        self.path, self._lock = self._lock_free_name()
        if self.path != self._wanted:
            self._logger.warning("The store at %s is left as it is: %s. This run writes to %s.", self._wanted, reason, self.path)
        if self._resumed is not None:
            outcome = self._copy_resumed(run | {"copied_from": str(self._resumed)}, entry, is_own=False)
            if not isinstance(outcome, str):
                message = "%s goes on from step %s; it begins with a copy of %d %s of earlier steps from %s, which is left as it is."
                self._logger.info(message, self.path, entry.record.step, outcome[0], self._items, self._resumed)
                return
            message = "%s begins without a copy of %s, which has the earlier steps of the resumed run, because that cannot be read: %s"
            self._logger.warning(message, self.path, self._resumed, outcome)
        with successor(self.path, None) as file:
            schema.create(file, of_tensors=self._HAS_TENSORS)
            schema.write_attributes(file, schema.Attributes(package_version(), str(run["started"]), [run]))
            self._fill(file, entry, Version(uuid.uuid4().hex, 1, self.run))

    def _copy_resumed(self, run: dict[str, object], entry: Entry, *, is_own: bool) -> tuple[int, int] | str:
        """Begin with a copy of the resumed run's file; returns numbers of rows, or the reason if that is not possible.

        ``is_own`` means that the copy replaces that file: superseded rows stay in it.
        """
        assert self._resumed is not None
        try:
            with open_store(self._resumed, is_checked=False) as source:
                if reason := self._reason_against(source.version):
                    return reason
                attributes = source.attributes()
                changes = _changed_options(attributes.configurations[-1], self._configuration)
                if changes and not self._HAS_TENSORS:  # the store logs them; the file of raw tensors has the same configurations
                    message = "The resumed run had another configuration (%s). In the store, rows from step %d on belong to the new one."
                    self._logger.warning(message, "; ".join(changes), entry.record.step)
                attributes.configurations.append(run)
                with successor(self.path, self._resumed) as file:
                    before = schema.read_version(file)
                    # A run that still writes may have replaced the file since, by one that has the journal.
                    if source.journal is not None and source.version == before:
                        take_in(file, source.journal)
                    counts = supersede(file, self._resume_from, keep=is_own)
                    schema.write_attributes(file, attributes)
                    self._fill(file, entry, Version(before.lineage if is_own else uuid.uuid4().hex, before.generation + 1, self.run))
        except NotWrittenError:
            raise
        except Exception as error:  # HDF5 raises many types of error for a damaged file, which stays unchanged
            return reason_of(error)
        return counts

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
            self._logger.log(logging.INFO if self.failed else logging.WARNING, message, self.path, step, reason_of(error), rest)
        self.failed = True
        self._num_missing += 1
        self._num_to_skip, self._next_num_to_skip = self._next_num_to_skip, 2 * self._next_num_to_skip

    def _give_up(self, error: Exception) -> None:
        self.failed = self._is_closed = True
        rest = "; what was written before can be read with load_store" if self.has_begun else ""
        self._logger.warning("The store %s stops here (%s). Training goes on%s.", self.path, reason_of(error), rest)
        self._leave()

    def _leave(self) -> None:
        """Release the lock; what was written stays."""
        if self._lock is not None:
            lock.release(self._lock)
        self._lock = None


def _changed_options(run: Mapping[str, Any], configuration: Mapping[str, object]) -> list[str]:
    """A text for each option with another value than in a run of ``Attributes.configurations``."""
    before, now = run["configuration"], json.loads(json.dumps(dict(configuration), default=str))
    texts = {name: [textwrap.shorten(json.dumps(options.get(name)), 100) for options in (before, now)] for name in {**before, **now}}
    return [f"{name} was {was}, is {is_now}" for name, (was, is_now) in texts.items() if before.get(name) != now.get(name)]


def reason_of(error: Exception) -> str:
    """The message of an error in one line."""
    # HDF5's messages are long and have several lines.
    return textwrap.shorten(str(error) or type(error).__name__, 300)
