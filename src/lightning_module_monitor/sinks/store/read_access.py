"""Finds a store and opens it for reading: while it is written, after a kill, after its end; damaged, or of another program."""

from __future__ import annotations

import io
import logging
import math
import os
import struct
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import h5py
import numpy as np

from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.histogram import EDGES, LABELS
from lightning_module_monitor.sinks.store import rows, schema
from lightning_module_monitor.sinks.store.space import NoSpaceError

_logger = logging.getLogger(__name__)
"""Without Lightning it has no handler, and Python prints its warnings to the standard error."""

_MAX_LISTED = 10

_ATTEMPTS = 3
"""A run can begin or end between the check of a file and its opening."""

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
    newest_first = sorted(filter(_is_of_run, path.rglob("*.h5")), key=lambda file: (file.stat().st_mtime_ns, file), reverse=True)
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


def _is_of_run(path: Path) -> bool:
    """Whether a file is a store. A damaged file counts: the newest run must not be skipped without an error."""
    try:
        with open_store(path) as file:
            return not schema.has_tensors(file)
    except ForeignFileError:
        return False
    except (OSError, ValueError):
        return path.is_file() and path.stat().st_size > 0


@contextmanager
def open_store(path: Path, *, has_writer: bool = True, is_checked: bool = True) -> Iterator[h5py.File]:
    """A store's file opened for reading.

    Args:
        path: The file.
        has_writer: Whether another run may be writing to it. If not, damage by a crash of the machine is an error at once; with a writer
            HDF5 waits for the writer to complete the file.
        is_checked: Whether the content was checked before; otherwise it is checked now.

    Raises:
        FileNotFoundError: If there is no file.
        ValueError: If it is not a store that this version can read, or if reading fails in the block.
    """
    if not path.is_file():
        raise FileNotFoundError(f"There is no store at {str(path)!r}.")
    flags, end = _flags_and_end(path)
    # HDF5 would read a plain file that was cut short, as by an interrupted copy, as if it were growing.
    is_cut = flags != 0 and end > path.stat().st_size
    with ExitStack() as stack:
        view = stack.enter_context(ClosedView(path)) if is_cut or (not has_writer and is_in_use(path)) else None
        file = stack.enter_context(_open(path, view))
        try:
            _check_version(file, path)
            if not is_checked:
                _check_content(file, path)
            yield file
        except (FileNotFoundError, ConfigError, AbsentKeyError, NoSpaceError):
            raise
        except Exception as error:  # h5py, numpy and json raise different exceptions for a damaged file
            damage = "cut short: the requested data lies behind its end" if is_cut else "damaged: the requested data cannot be read"
            cause = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
            raise ConfigError(f"{str(path)!r} is {damage} ({cause}). Give a complete copy of it.") from error


def _open(path: Path, view: ClosedView | None) -> h5py.File:
    for _ in range(_ATTEMPTS):
        with suppress(OSError):
            # Without HDF5's lock: a reader's shared lock would make the writer fail. Writers use lock.py.
            return h5py.File(view, "r") if view else h5py.File(path, "r", swmr=is_in_use(path), locking=False)
    path.open("rb").close()  # raises the reason if the file may not be read at all
    message = f"{str(path)!r} is not a readable HDF5 file: damaged, cut short, or of another kind. Give the path of a monitor's store."
    raise ValueError(message)


def _check_version(file: h5py.File, path: Path) -> None:
    version = file.attrs.get("format_version")
    if not isinstance(version, int | np.integer) or version < 1 or "configurations" not in file.attrs:
        message = f"{str(path)!r} is an HDF5 file of another program: it has no 'format_version'. Give the path of a monitor's store."
        raise ForeignFileError(message)
    if version > schema.FORMAT_VERSION:
        remedy = "Update lightning-module-monitor to read it."
        raise ConfigError(f"{str(path)!r} has format version {version}, newer than {schema.FORMAT_VERSION}. {remedy}")


def _check_content(file: h5py.File, path: Path) -> None:
    """Check that a file holds all of its data itself, and that its tables are consistent.

    HDF5 follows links out of a file to any file of the machine, whose content would be exported as if it were recorded.
    """
    num_bytes = path.stat().st_size
    items = list(schema.walk(file))
    for name, item in items:
        if item is None or (isinstance(item, h5py.Dataset) and (item.external or item.is_virtual)):
            message = f"{str(path)!r} has data outside of itself, at {name!r}. A store holds all of its data; do not trust this file."
            raise ConfigError(message)
    for name, item in items:
        name.encode()  # fails for a name that is not a text
        if isinstance(item, h5py.Dataset):  # memory is allocated by its shape
            size = math.prod(item.shape or ()) * item.dtype.itemsize
            if size > num_bytes * (_MAX_COMPRESSION if item.compression else 1):
                raise ValueError(f"{name!r} has the shape {item.shape}, of {size} bytes; the file has {num_bytes}")
    schema.read_attributes(file)
    rows.read_modules(file)
    for group, columns in schema.read_columns(file, with_superseded=True).items():
        _check_table(file[group], columns, schema.is_of_histograms(group))
    for name, _item in items:
        if schema.has_findings_or_facts(name):
            rows.read_findings(file[name].parent)
            rows.read_facts(file[name].parent)


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


# Files that a kill left in SWMR mode
#
# HDF5 opens such a file only as if its writer were alive: it reads metadata that it cannot parse again and again, and waits twice as long
# each time for the writer to complete it. After a crash of the machine that never ends. So such a file is read as if it had been closed.

# Superblock version 3: signature, version, sizes of offsets and lengths, flags; base address, extension's address, end of file,
# root group's address; then a checksum. HDF5 File Format Specification, section II.A.
_SUPERBLOCK = struct.Struct("<11sBQQQQ")
_SIZE = _SUPERBLOCK.size + 4
_SIGNATURE_3 = b"\x89HDF\r\n\x1a\n\x03"
_WORD = 0xFFFF_FFFF


class ClosedView(io.FileIO):
    """A store's file as if it had been closed: not in use, and of its actual length. For ``h5py.File``, for reading only."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "r")
        self._head = _closed(super().read(_SIZE), os.fstat(self.fileno()).st_size)

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # h5py hands over a memoryview
        """Read from the current position; the superblock is that of a closed file."""
        position = self.tell()
        count = super().readinto(buffer)
        if position < len(self._head):
            end = min(count, len(self._head) - position)
            buffer[:end] = self._head[position : position + end]
        return count


def is_in_use(path: Path) -> bool:
    """Whether a file is marked as open for writing, by a live or a killed writer."""
    return _flags_and_end(path)[0] != 0


def _flags_and_end(path: Path) -> tuple[int, int]:
    """The flags of a file's superblock, and the length of the file by it; zeros for a superblock of another version."""
    with path.open("rb") as file:
        head = file.read(_SIZE)
    fields = _SUPERBLOCK.unpack_from(head) if len(head) == _SIZE and head.startswith(_SIGNATURE_3) else (b"", 0, 0, 0, 0, 0)
    return fields[1], fields[4]


def _closed(head: bytes, num_bytes: int) -> bytes:
    """The superblock without flags and with this end of file; any other head is unchanged, for HDF5 to report."""
    # A damaged superblock must not get a valid checksum.
    if len(head) < _SIZE or _lookup3(head[:-4]) != int.from_bytes(head[-4:], "little"):
        return head
    constants, _, base, extension, _, root = _SUPERBLOCK.unpack_from(head)
    closed = _SUPERBLOCK.pack(constants, 0, base, extension, num_bytes, root)
    return closed + _lookup3(closed).to_bytes(4, "little")


def _lookup3(data: bytes) -> int:
    """HDF5's checksum of metadata: Bob Jenkins' ``lookup3``, ``hashlittle`` with start value 0; for at least 1 byte."""
    a = b = c = (0xDEAD_BEEF + len(data)) & _WORD
    blocks: list[tuple[int, ...]] = list(struct.iter_unpack("<III", data + bytes(-len(data) % 12)))
    for x, y, z in blocks[:-1]:
        a, b, c = (a + x) & _WORD, (b + y) & _WORD, (c + z) & _WORD
        for bits in (4, 6, 8, 16, 19, 4):
            # One line of the original, then the three are rotated.
            a, c = ((a - c) & _WORD) ^ _rotate(c, bits), (c + b) & _WORD
            a, b, c = b, c, a
    a, b, c = ((word + more) & _WORD for word, more in zip((a, b, c), blocks[-1], strict=True))
    for bits in (14, 11, 25, 16, 4, 14, 24):
        c = ((c ^ b) - _rotate(b, bits)) & _WORD
        a, b, c = b, c, a
    return b


def _rotate(word: int, bits: int) -> int:
    return ((word << bits) | (word >> (32 - bits))) & _WORD
