"""Creates, changes, copies and replaces a run's files.

A file is copied to repair it, to add columns, to supersede rows, and to begin with the rows of another run.
"""

from __future__ import annotations

import io
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
from lightning_module_monitor.sinks.store.paths import replace, whole_file
from lightning_module_monitor.sinks.store.read_access import is_in_use, open_store
from lightning_module_monitor.sinks.store.rows import merged_modules, read_modules
from lightning_module_monitor.sinks.store.tensor_paths import step_of

_BYTES_PER_COPY = 1 << 22
# The oldest format with SWMR: older HDF5 tools read it, too.
_LIBVER = ("v110", "v110")


# ------------------------------------------------------------------ files


def new_file(
    path: Path, attributes: schema.Attributes, tables: Mapping[str, Sequence[str]] | None, modules: Sequence[ModuleInfo] = ()
) -> None:
    """Write a new file without rows at ``path``; arguments as for :func:`schema.create`. After a ``NoSpaceError`` there is no file."""
    image = io.BytesIO()  # HDF5 itself must not run out of disk space
    with h5py.File(image, "w", libver=_LIBVER) as file:
        schema.create(file, attributes, tables, modules)
    try:
        with space.refusals():
            path.write_bytes(image.getbuffer())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


@contextmanager
def changes(path: Path) -> Iterator[h5py.File]:
    """Open a closed file for changes within ``space.room``; then close it and flush it to the disk, or remove it after an error."""
    file = h5py.File(path, "r+", libver=_LIBVER, locking=False)
    try:
        yield file
        space.close(file)
        # On the disk before it is renamed: after a power cut an empty file could have the name.
        with space.refusals(), path.open("rb+") as written:
            os.fsync(written.fileno())
    except BaseException:
        abandon(file)
        path.unlink()
        raise


@contextmanager
def successor(path: Path) -> Iterator[h5py.File]:
    """Open a copy of a closed file as :func:`changes` does; the copy then replaces the file. After an error the file is unchanged."""
    with whole_file(path) as temporary:
        with space.refusals():
            shutil.copyfile(path, temporary)
        with changes(temporary) as file:
            yield file


def append_in_place(temporary: Path, path: Path) -> h5py.File:
    """Open a finished file for appending, then rename it to ``path``: a file there is readable at any moment, also after a kill."""
    if os.name == "nt":  # Windows renames no open file; after a kill in between, the file needs HDF5's h5clear tool
        replace(temporary, path)
        temporary = path
    # A flush visits every cached chunk, and a written row is rarely read again: a small cache.
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
    """Close a file without another write to the disk, where it stays as it was last flushed.

    For errors in the middle of a change. If the disk has failed, HDF5 writes again when it closes the file, fails again, and ends the
    process with SIGSEGV at exit. Therefore its remaining writes go to memory that is discarded.
    """
    with suppress(Exception):
        if file and hasattr(os, "memfd_create"):
            nowhere = os.memfd_create("abandoned-store")
            os.dup2(nowhere, file.id.get_vfd_handle())
            os.close(nowhere)
        file.close()


# ------------------------------------------------------------------ copies


class _Selection(NamedTuple):
    """Rows of a table or dataset of the source, or a whole raw tensor, with its path in the copy."""

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
) -> tuple[int, int]:
    """Copy a file, open in any mode, into a new, plain file at ``target``.

    Args:
        source: The file.
        target: Path of the copy; not the source's own.
        attributes: Replaces the source's own.
        more: Columns by group to add to those of the source.
        modules: Modules to add to those of the source, or to replace modules of the same name.
        before_step: Rows of this step and later ones are superseded.
        with_superseded: Whether to copy superseded rows, also those of earlier resumes.

    Returns:
        Numbers of rows (of all tables together), or of raw tensors, that are kept, and that this copy supersedes.
    """
    has_tensors, columns = schema.has_tensors(source), schema.read_columns(source, with_superseded=True)
    until = sys.maxsize if before_step is None else before_step
    superseded = f"{schema.SUPERSEDED}/{len(source.get(schema.SUPERSEDED, ())) + 1}"
    parts: list[_Selection] = []
    for name, rows, steps in _steps_by_name(source, columns):
        is_kept = (steps < until) | schema.is_superseded(name)
        parts += [_Selection(name, name, rows[is_kept]), _Selection(name, f"{superseded}/{name}", rows[~is_kept])]
    # An empty table is copied for its columns.
    parts = [part for part in parts if len(part.rows) or (part.source == part.target and not has_tensors)]
    parts = [part for part in parts if with_superseded or not schema.is_superseded(part.target)]
    wider = {part.target: list(dict.fromkeys((*columns.get(part.source, ()), *more.get(part.target, ())))) for part in parts}
    all_modules = merged_modules(read_modules(source), modules)
    new_file(target, attributes or schema.read_attributes(source), None if has_tensors else {**more, **wider}, all_modules)
    with changes(target) as copy:
        for part in parts:
            if has_tensors:
                with space.room(copy, source[part.source].nbytes + space.bytes_beside_tensors(1)):
                    source.copy(part.source, copy, part.target)
            elif part.source in columns:
                for name in ("steps", "values"):
                    _copy_rows(source[part.source][name], copy[part.target][name], part.rows, copy)
            else:
                _copy_rows(source[part.source], copy[part.target], part.rows, copy)
    counted = [part for part in parts if has_tensors or part.source in columns]
    kept = sum(len(part.rows) for part in counted if not schema.is_superseded(part.target))
    return kept, sum(len(part.rows) for part in counted if part.source != part.target)


def _steps_by_name(source: h5py.File, tables: Iterable[str]) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.int64]]]:
    """Name, row indices and their steps of each table, of findings and facts; or of each raw tensor, which counts as a row."""
    for group in tables:
        steps = schema.read_steps(source[group])
        yield group, np.arange(len(steps)), steps
    for name, dataset in schema.datasets(source):
        if schema.has_tensors(source):
            yield name, np.zeros(1, np.int64), np.array([step_of(name)])
        elif schema.has_findings_or_facts(name):
            complete = np.flatnonzero(dataset[dataset.dtype.names[1]] != b"")  # a kill can leave a row without a text
            yield name, complete, dataset["step"][complete]


def _copy_rows(source: h5py.Dataset, target: h5py.Dataset, rows: NDArray[np.int64], copy: h5py.File) -> None:
    # In blocks: a store can be larger than memory.
    rows_per_copy = max(1, _BYTES_PER_COPY // space.row_bytes(target))
    for first in range(0, len(rows), rows_per_copy):
        indices = rows[first : first + rows_per_copy]
        block = source[indices[0] : indices[-1] + 1][indices - indices[0]]
        if block.shape[1:] != target.shape[1:]:  # a wider table begins with the source's columns, in their order
            narrow, block = block, np.full((len(indices), *target.shape[1:]), target.fillvalue, target.dtype)
            block[:, : narrow.shape[1]] = narrow
        with space.room(copy, space.growth(target, len(indices), len(rows))):
            target.resize(first + len(indices), axis=0)
            target[first:] = block


def repair(path: Path) -> None:
    """Do what ``StoreReader.repair`` describes."""
    path_lock = lock.acquire(path, needs_lock=False)
    if path_lock is None:
        message = f"{str(path)!r} is being written by a live run. Repair it after the run's end; load_store reads it at any time."
        raise RuntimeError(message)
    try:
        if is_in_use(path):
            with whole_file(path) as temporary, open_store(path, has_writer=False) as source:
                rewrite(source, temporary)
    finally:
        lock.release(path_lock)
