"""One writer per store: a lock that the operating system takes back when its holder is killed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout


def acquire(path: Path) -> BaseFileLock | None:
    """The right to write to ``path``, or ``None`` if another store, in this or another process, has it.

    HDF5's own lock is dropped in SWMR mode, so this one is on a hidden file beside the store.

    Raises:
        OSError: If there cannot be such a file.
    """
    file = _file_of(path)
    file.touch()  # raises an OSError where no file can be made: filelock would try again for ever on some file systems
    lock = FileLock(file, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        return None
    return lock


def has_holder(path: Path) -> bool:
    """Whether a store, in this or another process, has the right to write to ``path``; true if that cannot be known."""
    try:
        lock = acquire(path) if exists(path) else None
    except OSError:  # e.g. a folder that is not ours
        return True
    if lock is not None:
        release(lock)
    return exists(path)


def exists(path: Path) -> bool:
    """Whether there is a hidden file for ``path``: of a store that is open, or of a run that was killed."""
    return _file_of(path).exists()


def release(lock: BaseFileLock) -> None:
    """Give the right back and remove the hidden file.

    It is removed while it is held: a process that opened it before and locks it afterwards finds that it has no name any more.
    """
    with suppress(OSError):  # e.g. Windows, which removes no open file: it stays, and does no harm
        Path(lock.lock_file).unlink()
    lock.release()


def _file_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")
