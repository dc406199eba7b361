"""One writer per file: a lock that the operating system releases when its holder is killed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout


def acquire(path: Path) -> BaseFileLock | None:
    """Acquire the lock for writing to ``path``; ``None`` if another writer, in this or another process, holds it.

    HDF5 drops its own lock in SWMR mode, so this lock is on a hidden file beside the store.
    """
    file = _file_of(path)
    file.touch()  # raises an OSError if no file can be created: filelock would try again for ever on some file systems
    lock = FileLock(file, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        return None
    return lock


def has_holder(path: Path) -> bool:
    """Whether a writer, in this or another process, holds the lock of ``path``; true if that is unknown."""
    try:
        lock = acquire(path) if exists(path) else None
    except OSError:  # for example a folder without permission
        return True
    if lock is not None:
        release(lock)
    return exists(path)


def exists(path: Path) -> bool:
    """Whether there is a hidden file for ``path``, left by an open or a killed writer."""
    return _file_of(path).exists()


def release(lock: BaseFileLock) -> None:
    """Remove the hidden file and release the lock.

    The file is removed before: a process that opened it and locks it afterwards finds that it has no name any more.
    """
    with suppress(OSError):  # for example on Windows, which removes no open file: the file stays, and does no harm
        Path(lock.lock_file).unlink()
    lock.release()


def _file_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")
