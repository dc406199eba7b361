"""Reserves disk space before HDF5 writes: a write that fails within HDF5 ends the process with SIGSEGV, even if the error is caught."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py

_BYTES_AHEAD = 1 << 20
"""Reserved in addition, so that few records need to reserve space."""

_BYTES_PER_WRITE = 1 << 20
_NOT_SUPPORTED = {errno.EOPNOTSUPP, errno.EINVAL}


class NoSpaceError(OSError):
    """A file cannot grow, because of a full disk, a quota, or a limit. HDF5 was not called, so writing can be tried again."""


@contextmanager
def room(file: h5py.File, num_bytes: int) -> Iterator[None]:
    """Reserve ``num_bytes``, the most that the block writes to an open, flushed file, and flush it after the block.

    Raises:
        NoSpaceError: If the file cannot grow by so much. Then nothing is written.
    """
    descriptor = file.id.get_vfd_handle()
    reserved, end = os.fstat(descriptor).st_size, file.id.get_filesize() + num_bytes
    if end > reserved:
        try:
            _reserve(file, reserved, end - reserved + _BYTES_AHEAD)
        except OSError:
            with refusals():  # there may be space for this change alone
                _reserve(file, reserved, end - reserved)
    if num_bytes and hasattr(os, "pwrite"):
        with refusals():  # a limit may have been lowered after the reservation; HDF5 has not used the last byte yet
            os.pwrite(descriptor, b"\0", end - 1)
    yield
    file.flush()


def growth(dataset: h5py.Dataset, num_new: int, num_rows: int) -> int:
    """The most bytes that ``num_new`` more rows of a dataset take, which has ``num_rows`` rows afterwards."""
    num_chunked: int = num_new + dataset.chunks[0] - 1
    return row_bytes(dataset) * num_chunked + index_bytes(num_rows, num_new)


def row_bytes(dataset: h5py.Dataset) -> int:
    """Size of one row of a dataset."""
    return int(dataset.dtype.itemsize * math.prod(dataset.shape[1:]))


def index_bytes(num_rows: int, num_new: int = 1) -> int:
    """The most bytes that HDF5's metadata for new rows takes, with the rest of a chunk of steps.

    Measured for one row: 5 KB at first, 20 KB at 100,000 rows.
    """
    return 8192 + 64 * num_new + 512 * math.isqrt(num_rows)


def bytes_beside_tensors(num_tensors: int) -> int:
    """The most bytes that HDF5's metadata for new tensors takes; measured: 14 KB for one."""
    return (1 << 16) + (1 << 14) * num_tensors


def close(file: h5py.File) -> None:
    """Close a file and free its unused reserved space. If the file was flushed, only bytes within it change."""
    file.flush()
    os.ftruncate(file.id.get_vfd_handle(), file.id.get_filesize())
    file.close()


@contextmanager
def refusals() -> Iterator[None]:
    """Raise an ``OSError`` of the block as ``NoSpaceError``, with the system's reason."""
    try:
        yield
    except OSError as error:
        raise NoSpaceError(error.errno, error.strerror or str(error)) from error


def _reserve(file: h5py.File, start: int, num_bytes: int) -> None:
    descriptor = file.id.get_vfd_handle()
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, start, num_bytes)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
        else:
            return
    # macOS, Windows and some file systems do not support it: zeros take the same space.
    if os.name == "nt":  # without pwrite; the file keeps the name that it was opened with
        with Path(file.filename).open("r+b") as other:
            other.seek(start)
            other.write(bytes(num_bytes))
        return
    while num_bytes:
        written = os.pwrite(descriptor, bytes(min(num_bytes, _BYTES_PER_WRITE)), start)
        start, num_bytes = start + written, num_bytes - written
