"""One writer per file: a lock that the operating system releases when its holder is killed."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_IS_HELD = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of file systems without locks: Lustre without the mount option ``flock``, NFS without a lock daemon, some FUSE."""


@dataclass(frozen=True)
class Lock:
    """The right to write to a file, until it is released or its process ends."""

    file: Path
    """The hidden file that is locked."""
    descriptor: int
    is_exclusive: bool
    """Whether it keeps others from writing: not where the file system has no locks."""


def acquire(path: Path, *, needs_lock: bool = True) -> Lock | None:
    """Acquire the lock for writing to ``path``, without waiting.

    HDF5 drops its own lock in SWMR mode, so this lock is on a hidden file beside the store.

    Args:
        path: The file that is to be written.
        needs_lock: Whether a file system without locks counts as one on which another writer holds the lock. If not, the result is not
            exclusive there.

    Returns:
        The lock; ``None`` if another writer, in this or another process, holds it.

    Raises:
        OSError: If no file can be created there.
    """
    file = _file_of(path)
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            is_exclusive = _lock(descriptor)
            # The last holder may have removed the file after it was opened here.
            has_name = not is_exclusive or _has_name(descriptor, file)
        except OSError as error:
            os.close(descriptor)
            if error.errno in _IS_HELD:
                return None
            raise
        if has_name and (is_exclusive or not needs_lock):
            return Lock(file, descriptor, is_exclusive)
        os.close(descriptor)
        if has_name:
            return None


def exists(path: Path) -> bool:
    """Whether there is a hidden file for ``path``, left by an open or a killed writer."""
    return _file_of(path).exists()


def release(lock: Lock) -> None:
    """Remove the hidden file and release the lock.

    The file is removed before: a process that opened it and locks it afterwards finds that it has no name any more.
    """
    with suppress(OSError):  # for example on Windows, which removes no open file: the file stays, and does no harm
        lock.file.unlink()
    if lock.is_exclusive:
        _unlock(lock.descriptor)  # a process that was forked has the same open file, and would keep the lock
    os.close(lock.descriptor)


if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> bool:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        return True

    def _unlock(descriptor: int) -> None:
        with suppress(OSError):
            msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _lock(descriptor: int) -> bool:
        """Lock an open file; returns whether there are locks."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            raise
        return True

    def _unlock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _has_name(descriptor: int, file: Path) -> bool:
    """Whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def _file_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")
