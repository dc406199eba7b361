"""What all files of a run have in common: one writer, a name of their own, whole after a kill, never the end of the training."""

from __future__ import annotations

import importlib.metadata
import itertools
import logging
import os
import re
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path

import h5py
from filelock import BaseFileLock

from lightning_module_monitor.record import Record
from lightning_module_monitor.sinks.store import layout, lock
from lightning_module_monitor.sinks.store.inspection import inspect
from lightning_module_monitor.sinks.store.rewrite import Count
from lightning_module_monitor.sinks.store.space import NoSpaceError

_logger = logging.getLogger(__name__)

_DISTRIBUTION = "lightning-module-monitor"


class Writer(ABC):
    """Writes what concerns it of the records of one run to one HDF5 file; the single writer of that file.

    The file comes into being with the first record that concerns it. From then on it can be read at any time, also after a
    ``kill -9``. A writer never raises and never touches a file that is not its own. Where there is no space for a record, one warning
    is logged, and records are tried again at growing distances.

    Args:
        path: Where the file should be; missing folders are made. If a file is there already, the next free numbered name is
            taken instead (``monitor-2.h5``), and said.
        configuration: What this run was configured with; kept in the file's attributes as JSON.
        resumed: The file of the run that is resumed, or whose next loop this is. If it is the one at ``path``, this run goes on in it.
            Otherwise this run begins its own file with a copy of the other one, which is only read.
        resume_from: The first step of this run, if it resumes another. What the other one recorded of this step and later ones moves to the
            group ``superseded`` of a file that is gone on in, and is left out of a copy.
        logger: Gets a warning when another name is taken and when records are lost, and a line when a run is resumed.
    """

    path: Path
    """The file; the name it really has is known when the first record is written."""

    _ITEMS = "rows"
    """What there is a number of in a message."""

    failed: bool
    """Whether any record could not be written."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        configuration: Mapping[str, object],
        resumed: Path | None = None,
        resume_from: int | None = None,
        logger: logging.Logger = _logger,
    ) -> None:
        # Without links: replacing the file at a link's name would leave the file it points to behind.
        self.path = self._wanted = Path(path).resolve()
        self.failed = False
        self._configuration = configuration
        self._resumed = None if resumed is None else resumed.resolve()
        self._resume_from = resume_from
        self._logger = logger
        self._is_closed = False
        self._lock: BaseFileLock | None = None
        """Held from the first record that concerns this file to the end."""
        self.has_begun = False
        """Whether there is a file at the path that this run has begun, or has gone on in."""
        self._num_missing = 0
        """Records that were lost since the last one that was written."""
        self._num_to_skip, self._next_distance = 0, 1

    def write(self, record: Record) -> None:
        """Append what there is of a record, and flush it. Never raises.

        Args:
            record: What one step gave. Nothing is written after :meth:`close`.
        """
        if self._is_closed:
            return
        try:
            if self._concerns(record):
                self._write(record)
        except Exception as error:  # whatever it is, it must not end the training
            self._give_up(error)

    def _write(self, record: Record) -> None:
        if self._num_to_skip:
            self._num_to_skip -= 1
            self._num_missing += 1
            return
        try:
            if self._lock is None:
                self._begin(record)
            self._append(record)
        except OSError as error:
            # Nothing is open before the beginning, and a file whose space was refused is as it was flushed.
            if self._lock is not None and not isinstance(error, NoSpaceError):
                raise
            self._postpone(record.step, error)
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
            self._let_go()

    # -------------------------------------------------------------- what is in the file

    @abstractmethod
    def _concerns(self, record: Record) -> bool:
        """Whether there is anything to do about a record."""

    @abstractmethod
    def _create_content(self, file: h5py.File, record: Record) -> None:
        """Fill a new file with all that is to be there before it is appended to."""

    @abstractmethod
    def _copy(self, source: h5py.File, target: Path, attributes: layout.Attributes, record: Record, *, with_superseded: bool) -> Count:
        """Copy the file of the run that is resumed, so that this run goes on in the copy.

        Args:
            source: The file, open in any mode.
            target: Where the copy should be.
            attributes: Replaces the source's own.
            record: The first one of this run; the copy has room for it.
            with_superseded: Whether the copy has what this run supersedes, and what is superseded already.
        """

    @abstractmethod
    def _put_in_place(self, temporary: Path) -> None:
        """Give a finished file its name, and append to it from here on. A file at the name can be read at any moment."""

    @abstractmethod
    def _append(self, record: Record) -> None:
        """Write a record behind the others; afterwards a kill does it no harm."""

    @abstractmethod
    def _finish(self) -> None:
        """Close the file, if it is open, so that any HDF5 program opens it."""

    def _taken(self, path: Path) -> str:
        """Why a new file cannot be at ``path``; empty if it can."""
        return "it exists" if layout.is_there(path) else ""

    def _sweep(self, path: Path) -> None:
        """Remove what a killed run left beside the file at ``path``."""
        held = lock.acquire(path) if lock.exists(path) else None
        if held is not None:
            layout.temporary_path(path).unlink(missing_ok=True)
            lock.release(held)

    # -------------------------------------------------------------- beginning

    def _begin(self, record: Record) -> None:
        """Open the file to go on in, or a new one; after an error nothing is open."""
        try:
            self._open(record)
        except BaseException:
            self.path = self._wanted
            self._let_go()
            raise
        self.has_begun = True

    def _open(self, record: Record) -> None:
        run: dict[str, object] = {"started": _now(), "first_step": record.step, "configuration": dict(self._configuration)}
        if self._resumed is not None and not layout.is_there(self._resumed):
            self._resumed = None
        reason = self._go_on(run, record) if self._resumed == self.path else ""
        if self._lock is None:
            self._create(run, record, reason)

    def _go_on(self, run: dict[str, object], record: Record) -> str:
        """Go on in the file at ``path``, if that is possible; otherwise return why not."""
        self._lock = lock.acquire(self.path)
        if self._lock is None:
            return "it cannot be resumed: another run is writing to it"
        temporary = layout.temporary_path(self.path)
        try:
            count = self._copy_resumed(temporary, run, record, is_own=True)
        except NoSpaceError:
            raise
        except Exception as error:  # a damaged file fails in any of HDF5's ways; it stays as it is
            self._let_go()
            self._resumed = None
            return f"it cannot be resumed: {_reason(error)}".rstrip(".")
        self._put_in_place(temporary)
        if self._resume_from is not None:
            message = "%s goes on from step %d; %d %s of steps that run again are now in its group superseded."
            self._logger.info(message, self.path, self._resume_from, count.superseded, self._ITEMS)
        return ""

    def _create(self, run: dict[str, object], record: Record, reason: str) -> None:
        """Begin a new file, at ``path`` or beside it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        reason = reason or self._taken(self._wanted) or "another run begins it"
        self.path, self._lock = self._lock_free_name()
        if self.path != self._wanted:
            self._logger.warning("The store at %s is left as it is: %s. This run writes to %s.", self._wanted, reason, self.path)
        temporary = layout.temporary_path(self.path)
        if not self._begin_with_copy(temporary, run, record):
            with layout.new_file(temporary, layout.Attributes(_package_version(), str(run["started"]), [run])) as file:
                self._create_content(file, record)
        self._put_in_place(temporary)

    def _begin_with_copy(self, temporary: Path, run: dict[str, object], record: Record) -> bool:
        """Copy what the file of the resumed run has of earlier steps; returns whether there is one that can be read."""
        if self._resumed is None:
            return False
        try:
            count = self._copy_resumed(temporary, run | {"copied_from": str(self._resumed)}, record, is_own=False)
        except NoSpaceError:
            raise
        except Exception as error:  # see _go_on
            message = "%s begins without a copy of %s, which has the earlier steps of the resumed run, because that cannot be read: %s"
            self._logger.warning(message, self.path, self._resumed, _reason(error))
            return False
        message = "%s goes on from step %s; it begins with a copy of %d %s of earlier steps from %s, which is left as it is."
        self._logger.info(message, self.path, record.step, count.kept, self._ITEMS, self._resumed)
        return True

    def _copy_resumed(self, temporary: Path, run: dict[str, object], record: Record, *, is_own: bool) -> Count:
        assert self._resumed is not None
        with layout.open_store(self._resumed, has_writer=not is_own and lock.has_holder(self._resumed)) as source:
            inspect(source, self._resumed)
            attributes = layout.read_attributes(source)
            attributes.configurations.append(run)
            return self._copy(source, temporary, attributes, record, with_superseded=is_own)

    def _lock_free_name(self) -> tuple[Path, BaseFileLock]:
        """The first free name, at which no other run begins a file while its lock is held."""
        for path in _numbered(self._wanted):
            if self._taken(path):
                self._sweep(path)
            elif (held := lock.acquire(path)) is not None:
                if not self._taken(path):  # by a run that had the lock until now
                    return path, held
                lock.release(held)
        raise AssertionError  # the names do not end

    # -------------------------------------------------------------- ending

    def _postpone(self, step: int, error: OSError) -> None:
        """Lose a record for want of space, and the next ones up to the next trial."""
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
        self._let_go()

    def _let_go(self) -> None:
        """Let others have the file, as it was last flushed."""
        if self._lock is not None:
            lock.release(self._lock)
        self._lock = None


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    for number in itertools.count(2):
        yield path.with_name(f"{path.stem}-{number}{path.suffix}")


def is_name_of(path: Path, wanted: Path) -> bool:
    """Whether a run that asks for a file at ``wanted`` may have got this one: the same, or a numbered one beside it."""
    names = re.escape(wanted.stem) + r"(-\d+)?" + re.escape(wanted.suffix)
    return path.parent == wanted.parent and re.fullmatch(names, path.name) is not None


def _reason(error: Exception) -> str:
    # HDF5's messages are long, and have line ends in them.
    return textwrap.shorten(str(error) or type(error).__name__, 300)


def _package_version() -> str:
    try:
        return importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
