"""How a file of a run comes into being, is changed, and is replaced.

A file is copied into a new one to repair it, to widen it, to supersede rows, and to begin with the rows of another run.
"""

from __future__ import annotations

import io
import itertools
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.record import ModuleInfo
from lightning_module_monitor.sinks.store import lock, schema, space
from lightning_module_monitor.sinks.store.opening import is_in_use, open_store

_BYTES_PER_COPY = 1 << 22
# The oldest format that knows SWMR, so that older HDF5 tools read the files, too.
_LIBVER = ("v110", "v110")


# ------------------------------------------------------------------ names


def temporary_path(path: Path) -> Path:
    """Path at which the successor of a file is prepared; the next rewrite replaces the leftover of a killed one."""
    return path.with_name(f".{path.name}.new")


def tensors_path(path: Path) -> Path:
    """Path of the raw tensors of a store's run: ``monitor.tensors.h5`` beside ``monitor.h5``."""
    return path.with_name(f"{path.name.removesuffix('.h5')}.tensors.h5")


def is_there(path: Path) -> bool:
    """Whether anything but an empty file is at a path."""
    return path.exists() and not (path.is_file() and path.stat().st_size == 0)


# ------------------------------------------------------------------ files


def new_file(
    path: Path, attributes: schema.Attributes, tables: Mapping[str, Sequence[str]] | None, modules: Sequence[ModuleInfo] = ()
) -> None:
    """Write a new file without rows at ``path``; arguments are those of :func:`schema.create`. After an error there is none.

    Raises:
        NoSpaceError: If it cannot be written.
    """
    image = io.BytesIO()  # HDF5 itself must not run out of space
    with h5py.File(image, "w", libver=_LIBVER) as file:
        schema.create(file, attributes, tables, modules)
    try:
        with space.refusals():
            path.write_bytes(image.getbuffer())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary file beside ``path`` for the block to write, which then takes its place; after an error ``path`` is as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path)
    try:
        yield temporary
        replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def numbered(path: Path) -> Iterator[Path]:
    """The path, and then ``name-2``, ``name-3``, ... beside it: what a run takes in turn, so that it writes no other run's file."""
    names = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(2))
    return itertools.chain([path], names)


def free(path: Path) -> Path:
    """The first of :func:`numbered` that does not exist."""
    return next(one for one in numbered(path) if not os.path.exists(one))  # noqa: PTH110  # Path.exists raises in a folder that is not ours


@contextmanager
def changes(path: Path) -> Iterator[h5py.File]:
    """A closed file, open for changes within ``space.room``; afterwards it is closed and on the disk, or removed after an error."""
    file = h5py.File(path, "r+", libver=_LIBVER, locking=False)
    try:
        yield file
        space.close(file)
        # On the disk before it takes the old file's name: after a power cut the name must not stand for an empty file.
        with space.refusals(), path.open("rb+") as written:
            os.fsync(written.fileno())
    except BaseException:
        abandon(file)
        path.unlink()
        raise


@contextmanager
def successor(path: Path) -> Iterator[h5py.File]:
    """A copy of a closed file, open as by :func:`changes`; it then replaces the file, which after an error stays as it was."""
    with whole_file(path) as temporary:
        with space.refusals():
            shutil.copyfile(path, temporary)
        with changes(temporary) as file:
            yield file


def replace(temporary: Path, path: Path) -> None:
    """Give a finished file its name, atomically: a kill leaves this file there or the one before, whole."""
    if path.exists():
        shutil.copymode(path, temporary)
    temporary.replace(path)


def append_in_place(temporary: Path, path: Path) -> h5py.File:
    """Open a finished file for appending and give it its name. From here on others can read it, and a kill does no harm.

    In this order: a file at ``path`` can be read at any moment, also if a kill comes in between.
    """
    if os.name == "nt":  # Windows renames no open file; a kill in between needs HDF5's h5clear tool
        replace(temporary, path)
        temporary = path
    # A flush walks through the cached chunks, and a row is a chunk that is not read again: hardly any are cached.
    file = h5py.File(temporary, "r+", libver=_LIBVER, locking=False, rdcc_nslots=31, rdcc_nbytes=1 << 16)
    try:
        file.swmr_mode = True
        if temporary != path:
            replace(temporary, path)
    except BaseException:
        abandon(file)
        raise
    return file


def abandon(file: h5py.File) -> None:
    """Close a file without another byte to its disk, which stays as it was last flushed.

    For errors in the middle of a change. Should the disk itself have failed, HDF5 tries again when it closes the file, fails again, and
    ends the process with SIGSEGV at exit. So what it still has to write goes into memory that is thrown away.
    """
    with suppress(Exception):
        if file and hasattr(os, "memfd_create"):
            nowhere = os.memfd_create("abandoned-store")
            os.dup2(nowhere, file.id.get_vfd_handle())
            os.close(nowhere)
        file.close()


# ------------------------------------------------------------------ copies


class Count(NamedTuple):
    """Number of rows (of all tables together), or of raw tensors, that a copy has of its source."""

    kept: int
    superseded: int
    """Since this copy."""


class _Part(NamedTuple):
    """Part of a source that goes to one place of the copy: rows of a table or of findings, or a raw tensor as a whole."""

    source: str
    target: str
    rows: NDArray[np.int64]


def rewrite(
    source: h5py.File,
    target: Path,
    *,
    attributes: schema.Attributes | None = None,
    more: Mapping[str, Sequence[str]] = MappingProxyType({}),
    modules: Sequence[ModuleInfo] = (),
    before_step: int | None = None,
    with_superseded: bool = True,
) -> Count:
    """Copy a file, open in any mode, into a new, plain file at ``target``.

    Args:
        source: The file.
        target: Path of the copy; not the source's own.
        attributes: Replaces the source's own.
        more: Columns by group that the copy has besides the source's.
        modules: Modules that the copy has besides the source's, or in their place.
        before_step: Rows of this step and later ones are superseded.
        with_superseded: Whether the copy has the superseded rows, those of earlier resumes too.
    """
    of_tensors, columns = schema.has_tensors(source), schema.read_columns(source, with_superseded=True)
    until = sys.maxsize if before_step is None else before_step
    superseded = f"{schema.SUPERSEDED}/{len(source.get(schema.SUPERSEDED, ())) + 1}"
    parts: list[_Part] = []
    for name, rows, steps in _steps_by_name(source, columns):
        is_kept = (steps < until) | schema.is_superseded(name)
        parts.append(_Part(name, name, rows[is_kept]))
        parts.append(_Part(name, f"{superseded}/{name}", rows[~is_kept]))
    # An empty table is copied as well: it has its columns.
    parts = [part for part in parts if len(part.rows) or (part.source == part.target and not of_tensors)]
    parts = [part for part in parts if with_superseded or not schema.is_superseded(part.target)]
    wider = {part.target: list(dict.fromkeys((*columns.get(part.source, ()), *more.get(part.target, ())))) for part in parts}
    known = schema.merged_modules(schema.read_modules(source), modules)
    new_file(target, attributes or schema.read_attributes(source), None if of_tensors else {**more, **wider}, known)
    with changes(target) as copy:
        for part in parts:
            if of_tensors:
                with space.room(copy, source[part.source].nbytes + space.bytes_beside_tensors(1)):
                    source.copy(part.source, copy, part.target)
            elif part.source in columns:
                for name in ("steps", "values"):
                    _copy_rows(source[part.source][name], copy[part.target][name], part.rows, copy)
            else:
                _copy_rows(source[part.source], copy[part.target], part.rows, copy)
    counted = [part for part in parts if of_tensors or part.source in columns]
    kept = sum(len(part.rows) for part in counted if not schema.is_superseded(part.target))
    return Count(kept, sum(len(part.rows) for part in counted if part.source != part.target))


def _steps_by_name(source: h5py.File, tables: Iterable[str]) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.int64]]]:
    """Rows, and the step of each, of the tables, findings and facts; or of the raw tensors, which count as a row each."""
    for group in tables:
        steps = schema.read_steps(source[group])
        yield group, np.arange(len(steps)), steps
    for name, dataset in schema.datasets(source):
        if schema.has_tensors(source):
            yield name, np.zeros(1, np.int64), np.array([schema.step_of(name)])
        elif schema.has_rows(name):
            whole = np.flatnonzero(dataset[dataset.dtype.names[1]] != b"")  # a kill can leave a row without a text
            yield name, whole, dataset["step"][whole]


def _copy_rows(source: h5py.Dataset, target: h5py.Dataset, rows: NDArray[np.int64], copy: h5py.File) -> None:
    # In blocks, because a store can be larger than memory.
    rows_per_copy = max(1, _BYTES_PER_COPY // space.row_bytes(target))
    for first in range(0, len(rows), rows_per_copy):
        some = rows[first : first + rows_per_copy]
        block = source[some[0] : some[-1] + 1][some - some[0]]
        if block.shape[1:] != target.shape[1:]:  # a wider table begins with the source's own columns, in their order
            narrow, block = block, np.full((len(some), *target.shape[1:]), target.fillvalue, target.dtype)
            block[:, : narrow.shape[1]] = narrow
        with space.room(copy, space.growth(target, len(some), len(rows))):
            target.resize(first + len(some), axis=0)
            target[first:] = block


def repair(path: Path) -> None:
    """Make a store that a kill left half open a plain file; its content stays. Atomic.

    Raises:
        RuntimeError: If a run is still writing to it.
    """
    held = lock.acquire(path)
    if held is None:
        message = f"{str(path)!r} is being written by a live run. Repair it after the run's end; load_store reads it at any time."
        raise RuntimeError(message)
    try:
        if is_in_use(path):
            with whole_file(path) as temporary, open_store(path, has_writer=False) as source:
                rewrite(source, temporary)
    finally:
        lock.release(held)
