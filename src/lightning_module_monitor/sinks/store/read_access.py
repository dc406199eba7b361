"""Finds a store and opens it for reading: while it is written, after a kill, after its end; damaged, or of another program."""

from __future__ import annotations

import logging
import math
import os
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import h5py
import numpy as np

from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.histogram import EDGES, LABELS
from lightning_module_monitor.sinks.store import paths, rows, schema
from lightning_module_monitor.sinks.store.content import Content
from lightning_module_monitor.sinks.store.journal import Journal, read_head
from lightning_module_monitor.sinks.store.successor import NotWrittenError

_logger = logging.getLogger(__name__)
"""Without Lightning it has no handler, and Python prints its warnings to the standard error."""

_MAX_LISTED = 10

_ATTEMPTS = 3
_MAX_COMPRESSION = 1032
"""Largest compression factor of deflate, the only filter that the store uses (zlib's own figure)."""


class ForeignFileError(ConfigError):
    """An HDF5 file is not a store."""


class AbsentKeyError(KeyError):
    """A file has no such name; it is not damaged."""

    __str__ = Exception.__str__  # a KeyError shows its message in quotes


def find_store(path: Path) -> Path:
    """The file of a run: ``path`` itself, or the newest file below a folder, with a warning that lists the others; or an error."""
    if not path.is_dir():
        return path
    newest_first = sorted(filter(_is_of_run, path.rglob("*.h5")), key=lambda file: (_modified(file), file), reverse=True)
    if not newest_first:
        message = f"There is no store at {str(path)!r}. No folder from here down has a run's .h5 file; give the path of a store."
        raise FileNotFoundError(message)
    newest, *others = newest_first
    if others:
        listed = [str(file) for file in others[:_MAX_LISTED]]
        more = [f"and {len(others) - _MAX_LISTED} more"] if len(others) > _MAX_LISTED else []
        message = "%s has %d runs; the newest is used: %s. Give the path of a file for another run:\n  %s"
        _logger.warning(message, path, len(newest_first), newest, "\n  ".join([*listed, *more]))
    return newest


def _modified(path: Path) -> int:
    """When a store was written to, in nanoseconds."""
    journal = paths.journal_path(path)
    return max(path.stat().st_mtime_ns, journal.stat().st_mtime_ns if journal.exists() else 0)


def _is_of_run(path: Path) -> bool:
    """Whether a file is a store. A damaged file counts: the newest run must not be skipped without an error."""
    try:
        with open_store(path) as content:
            return not schema.has_tensors(content.file)
    except ForeignFileError:
        return False
    except (OSError, ValueError):
        return path.is_file() and path.stat().st_size > 0


@contextmanager
def open_store(path: Path, *, is_checked: bool = True, known: Journal | None = None) -> Iterator[Content]:
    """A store's file and its journal, or a file of raw tensors, opened for reading.

    Args:
        path: The file.
        is_checked: Whether the content was checked before; otherwise it is checked now.
        known: Its journal when it was read before.

    Raises:
        FileNotFoundError: If there is no file.
        ValueError: If it is not a store that this version can read, or if reading fails in the block.
    """
    if not path.is_file():
        raise FileNotFoundError(f"There is no store at {str(path)!r}.")
    with ExitStack() as stack:
        try:
            content = _open(path, stack, known)
            if not is_checked:
                _check_content(content, path)
            yield content
        except (FileNotFoundError, ConfigError, AbsentKeyError, NotWrittenError):
            raise
        except Exception as error:  # h5py, numpy and json raise different exceptions for a damaged file
            cause = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
            message = f"{str(path)!r} is damaged: the requested data cannot be read ({cause}). Give a complete copy of it."
            raise ConfigError(message) from error


def _open(path: Path, stack: ExitStack, known: Journal | None) -> Content:
    """The file with its journal, if that goes on from this file.

    The journal is opened first. A writer replaces the file first: so a file of a later generation has what this journal has.
    """
    for _ in range(_ATTEMPTS):
        journal = _open_journal(path, stack)
        file = stack.enter_context(_open_file(path))
        version = schema.read_version(file)
        try:
            head = None if journal is None else read_head(journal)
            if journal is None or head is None or head.lineage != version.lineage or head.generation < version.generation:
                return Content(file)
            if head.generation == version.generation:
                return Content(file, Journal(journal, known))
        except ConfigError:
            raise
        except Exception as error:  # a stranger's journal can have anything
            cause = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
            message = f"{str(paths.journal_path(path))!r} is damaged ({cause}). Remove it to read the store without its latest records."
            raise ConfigError(message) from error
        stack.close()  # both were replaced in between
    message = "%s is older than its journal, which is not read: records are missing. Give the file that the journal goes on from."
    _logger.warning(message, path)
    return Content(stack.enter_context(_open_file(path)))


def _open_journal(path: Path, stack: ExitStack) -> BinaryIO | None:
    try:
        journal = stack.enter_context(paths.journal_path(path).open("rb"))
    except FileNotFoundError:
        return None
    return journal if os.fstat(journal.fileno()).st_size else None  # after a power cut it can be empty


def _open_file(path: Path) -> h5py.File:
    try:
        # Without HDF5's lock, which some file systems do not have: a file is never changed, only replaced.
        file = h5py.File(path, "r", locking=False)
    except OSError as error:
        path.open("rb").close()  # raises the reason if the file may not be read at all
        if "h5clear" in str(error):
            message = f"{str(path)!r} was not closed, by a program that wrote into it. HDF5's own tool closes it: h5clear -s {str(path)!r}"
            raise ConfigError(message) from error
        message = f"{str(path)!r} is not a readable HDF5 file: damaged, cut short, or of another kind. Give the path of a monitor's store."
        raise ConfigError(message) from error
    try:
        _check_version(file, path)
    except BaseException:
        file.close()
        raise
    return file


def _check_version(file: h5py.File, path: Path) -> None:
    version = file.attrs.get("format_version")
    if not isinstance(version, int | np.integer) or version < 1 or "configurations" not in file.attrs:
        message = f"{str(path)!r} is an HDF5 file of another program: it has no 'format_version'. Give the path of a monitor's store."
        raise ForeignFileError(message)
    if version > schema.FORMAT_VERSION:
        remedy = "Update lightning-module-monitor to read it."
        raise ConfigError(f"{str(path)!r} has format version {version}, newer than {schema.FORMAT_VERSION}. {remedy}")


def _check_content(content: Content, path: Path) -> None:
    """Check that a file holds all of its data itself, and that its tables are consistent.

    HDF5 follows links out of a file to any file of the machine, whose content would be exported as if it were recorded.
    """
    file, num_bytes = content.file, path.stat().st_size
    items = list(schema.walk(file))
    for name, item in items:
        if item is None or (isinstance(item, h5py.Dataset) and (item.external or item.is_virtual)):
            message = f"{str(path)!r} has data outside of itself, at {name!r}. A store holds all of its data; do not trust this file."
            raise ConfigError(message)
    for name, item in items:
        name.encode()  # fails for a name that is not a text
        if isinstance(item, h5py.Dataset):  # memory is allocated by its shape
            size = math.prod(item.shape or ()) * item.dtype.itemsize
            # A chunk in which nothing was recorded takes no space.
            if size > num_bytes * (_MAX_COMPRESSION if item.chunks else 1):
                raise ValueError(f"{name!r} has the shape {item.shape}, of {size} bytes; the file has {num_bytes}")
    schema.read_attributes(file)
    rows.read_modules(file)
    for group, columns in schema.read_columns(file, with_superseded=True).items():
        _check_table(file[group], columns, schema.is_of_histograms(group))
    for name, _item in items:
        if schema.has_findings_or_facts(name):
            rows.read_findings(file[name].parent)
            rows.read_facts(file[name].parent)
    if content.journal is not None:
        for group in content.journal.index.tables:
            content.table(group)
        if content.journal.index.damaged_at is not None:
            message = "The journal of %s is damaged at byte %d: the records from there on cannot be read."
            _logger.warning(message, path, content.journal.index.damaged_at)


def _check_table(group: h5py.Group, columns: list[str], histograms: bool) -> None:
    values, steps = group["values"], group["steps"]
    shape = (len(columns), len(LABELS)) if histograms else (len(columns),)
    expected = {
        "columns": len(columns) > 0,
        "values": values.shape[1:] == shape and values.dtype == (np.int64 if histograms else np.float64),
        "steps": steps.ndim == 1 and steps.dtype == np.int64,
        "edges": not histograms or np.array_equal(values.attrs["edges"], EDGES),
    }
    for name, is_as_expected in expected.items():
        if not is_as_expected:
            raise ValueError(f"{name!r} of {group.name!r} has another form than the store writes")
