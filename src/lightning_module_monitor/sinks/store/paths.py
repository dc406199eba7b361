"""Names of a run's files, and files that are replaced as a whole. Without h5py."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def temporary_path(path: Path) -> Path:
    """Path at which the successor of a file is prepared; it replaces what a killed process left there."""
    return path.with_name(f".{path.name}.new")


def tensors_path(path: Path) -> Path:
    """Path of the raw tensors of a store's run: ``monitor.tensors.h5`` beside ``monitor.h5``."""
    return path.with_name(f"{path.name.removesuffix('.h5')}.tensors.h5")


def journal_path(path: Path) -> Path:
    """Path of the journal of a store: ``monitor.h5.journal`` beside ``monitor.h5``."""
    return path.with_name(f"{path.name}.journal")


def has_content(path: Path) -> bool:
    """Whether there is anything but an empty file at a path."""
    return path.exists() and not (path.is_file() and path.stat().st_size == 0)


def numbered_paths(path: Path) -> Iterator[Path]:
    """The path, then ``name-2``, ``name-3``, ... beside it: names that a run tries in order."""
    yield path
    yield from (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(2))


def is_numbered_path_of(path: Path, wanted: Path) -> bool:
    """Whether ``path`` is one of the :func:`numbered_paths` of ``wanted``."""
    names = re.escape(wanted.stem) + r"(-\d+)?" + re.escape(wanted.suffix)
    return path.parent == wanted.parent and re.fullmatch(names, path.name) is not None


def first_free_path(path: Path) -> Path:
    """The first of :func:`numbered_paths` that does not exist."""
    # Path.exists raises an error in a folder without permission.
    return next(candidate for candidate in numbered_paths(path) if not os.path.exists(candidate))  # noqa: PTH110


def replace(temporary: Path, path: Path) -> None:
    """Rename a finished file to ``path``, atomically: after a kill the old or the new file is there, whole."""
    if path.exists():
        shutil.copymode(path, temporary)
    temporary.replace(path)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give the block a temporary path beside ``path`` to write to, then rename that file; after an error ``path`` is unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path)
    try:
        yield temporary
        replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
