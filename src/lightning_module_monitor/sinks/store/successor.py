"""Changes a run's files: a changed copy replaces the file as a whole, so that at any moment a closed, plain file is at its path."""

from __future__ import annotations

import io
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import h5py
import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.sinks.store import paths, rows, schema
from lightning_module_monitor.sinks.store.content import Content
from lightning_module_monitor.sinks.store.journal import Journal
from lightning_module_monitor.sinks.store.tensor_paths import step_of

# Checksums for all metadata; HDF5 1.10 and later read it.
_LIBVER = ("v110", "v110")


class NotWrittenError(OSError):
    """A file could not be written, for example because of a full disk, a quota, or a limit. It is as it was."""


@contextmanager
def successor(path: Path, source: Path | None) -> Iterator[h5py.File]:
    """Give the block a copy of a closed file for changes, which then replaces the file at ``path``.

    Args:
        path: The file to replace. After an error it is unchanged.
        source: The file to copy; ``None`` for an empty file.

    Raises:
        NotWrittenError: If the copy cannot be written or put in place. Errors of the block are raised as they are.
    """
    in_block: BaseException | None = None
    try:
        with _signals_deferred(), paths.whole_file(path) as temporary:
            if source is not None:
                shutil.copyfile(source, temporary)
            with _Disk(temporary, "w+" if source is None else "r+") as disk:
                file = h5py.File(disk, "w" if source is None else "r+", libver=_LIBVER)
                try:
                    yield file
                except BaseException as error:  # raised when HDF5 has closed the file
                    in_block, disk.drops = error, True
                file.close()
                if in_block or disk.error:
                    raise disk.error or in_block  # type: ignore[misc]  # one of them is an exception
                os.fsync(disk.fileno())  # before it is renamed: after a power cut an empty file could have the name
    except OSError as error:
        if error is in_block:
            raise
        raise NotWrittenError(error.errno, error.strerror or str(error)) from error


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Let the handlers of signals wait for the end of the block.

    HDF5 calls :class:`_Disk`, and ends the process if an exception comes out of it, such as the ``KeyboardInterrupt`` of Ctrl-C.
    """
    if threading.current_thread() is not threading.main_thread():  # handlers run in the main thread
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []
    is_deferred = True
    handlers: dict[int, Callable[[int, FrameType | None], object]] = {}

    def receive(number: int, frame: FrameType | None) -> None:
        # Passes on later signals, too: a handler can raise an exception before all handlers are back in place.
        if is_deferred:
            waiting.append((number, frame))
        else:
            handlers[number](number, frame)

    for valid in signal.valid_signals():
        handler = signal.getsignal(valid)
        if callable(handler):
            handlers[valid] = handler
    try:
        for number in handlers:
            signal.signal(number, receive)
        yield
    finally:
        is_deferred = False
        with ExitStack() as stack:  # runs all of them, also after an exception of one
            for number, frame in reversed(waiting):
                stack.callback(handlers[number], number, frame)
            for number, handler in handlers.items():
                stack.callback(signal.signal, number, handler)


class _Disk(io.FileIO):
    """A file to which HDF5's every write succeeds.

    A write that fails within HDF5 ends the process with SIGSEGV, at the latest at its exit, even if the error is caught. So the first error
    is kept, and what HDF5 writes from there on is dropped.
    """

    error: BaseException | None = None
    drops = False

    def fail(self, error: BaseException) -> None:
        """Keep an error. Its traceback would keep HDF5's buffer, which is read again when HDF5 has freed it."""
        self.error, self.drops = error.with_traceback(None), True

    def write(self, data: memoryview) -> int:  # type: ignore[override]  # h5py hands over a memoryview
        """Write all of the data."""
        try:
            rest = memoryview(data)
            while rest and not self.drops:
                rest = rest[super().write(rest) :]
        except BaseException as error:  # whatever it is, it must not pass through HDF5
            self.fail(error)
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        """Set the length."""
        try:
            return size or 0 if self.drops else super().truncate(size)
        except BaseException as error:  # see write
            self.fail(error)
            return size or 0


def take_in(file: h5py.File, journal: Journal) -> None:
    """Add what a journal has to a store's file."""
    content = Content(file, journal)
    for group, table in {group: content.table(group) for group in journal.index.tables}.items():
        target = schema.require_table(file, group, table.columns)
        for first, block in table.blocks(table.first_changed, schema.rows_per_block(target["values"])):
            _put(target["values"], first, block)
        _put(target["steps"], table.num_in_file, table.steps[table.num_in_file :])
    schema.write_modules(file, content.modules())
    _append(file[rows.FINDINGS], rows.finding_rows(journal.index.findings))
    for step, facts in journal.index.facts:
        _append(file[rows.FACTS], rows.fact_rows(step, facts))
    if journal.index.last_record:
        file[schema.LAST_RECORD][()] = journal.index.last_record.encode()


def supersede(file: h5py.File, before_step: int | None, *, keep: bool) -> tuple[int, int]:
    """Take rows or raw tensors of step ``before_step`` and later out of a file: into a group ``superseded``, with earlier ones, if kept.

    Returns:
        Numbers of rows of tables, or of raw tensors, that stay, and that are taken out.
    """
    superseded = f"{schema.SUPERSEDED}/{len(file.get(schema.SUPERSEDED, ())) + 1}"
    if not keep and schema.SUPERSEDED in file:
        del file[schema.SUPERSEDED]
    until = np.inf if before_step is None else before_step
    if schema.has_tensors(file):
        names = [name for name, _dataset in schema.datasets(file) if not schema.is_superseded(name)]
        moved = [name for name in names if step_of(name) >= until]
        for name in moved:
            if keep:
                file.move(name, f"{superseded}/{name}")
            else:
                del file[name]
        return len(names) - len(moved), len(moved)
    num_kept = num_moved = 0
    for group, columns in schema.read_columns(file).items():
        is_moved = schema.read_steps(file[group]) >= until
        target = schema.require_table(file, f"{superseded}/{group}", columns) if keep and is_moved.any() else None
        for name in ("values", "steps"):
            _move(file[group][name], None if target is None else target[name], is_moved)
        num_kept, num_moved = num_kept + int((~is_moved).sum()), num_moved + int(is_moved.sum())
    for name in (rows.FINDINGS, rows.FACTS):
        is_moved = file[name]["step"] >= until
        target = schema.create_rows(file, f"{superseded}/{name}") if keep and is_moved.any() else None
        _move(file[name], target, is_moved)
    return num_kept, num_moved


def _move(source: h5py.Dataset, target: h5py.Dataset | None, is_moved: NDArray[np.bool_]) -> None:
    """Move rows to the end of another dataset; the rest closes up."""
    if not is_moved.any():
        return
    end = int(np.argmax(is_moved))
    rows_per_block = schema.rows_per_block(source)
    for first in range(end, len(is_moved), rows_per_block):
        selected = is_moved[first : first + rows_per_block]
        block = source[first : first + len(selected)]
        if target is not None:
            _append(target, block[selected])
        kept = block[~selected]
        _put(source, end, kept)
        end += len(kept)
    source.resize(end, axis=0)


def _append(dataset: h5py.Dataset, block: NDArray[np.generic]) -> None:
    _put(dataset, len(dataset), block)


def _put(dataset: h5py.Dataset, first: int, block: NDArray[np.generic]) -> None:
    """Write rows from a place on; the dataset grows if they reach beyond it."""
    if len(block):
        dataset.resize(max(len(dataset), first + len(block)), axis=0)
        dataset[first : first + len(block)] = block
