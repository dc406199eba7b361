"""What the subcommands have in common: a store to open, and a file to write."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_module_monitor.errors import ConfigError

if TYPE_CHECKING:
    from lightning_module_monitor.sinks.store.reader import StoreReader


def add_store(parser: argparse.ArgumentParser) -> None:
    """Add the path of a store."""
    parser.add_argument(
        "store", metavar="STORE", type=Path, help="path of a run's monitor.h5; the run may be going on, or have been killed"
    )


def open_store(path: Path) -> StoreReader:
    """A store's reader.

    Raises:
        ConfigError: If there is none, or none that this version can read.
    """
    from lightning_module_monitor.sinks.store.reader import load_store

    try:
        return load_store(path)
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error


def output_path(wanted: Path | None, store: Path, suffix: str) -> Path:
    """Where to write: what was asked for, or beside the store.

    Raises:
        ConfigError: If there is no such folder, or the file would be the store itself.
    """
    path = store.with_suffix(suffix) if wanted is None else wanted
    with writing(path):
        is_in_folder, is_folder, is_store = path.parent.is_dir(), path.is_dir(), path.resolve() == store.resolve()
    if not is_in_folder:
        raise ConfigError(f"{str(path)!r} cannot be written: there is no folder {str(path.parent)!r}.")
    if is_folder or is_store:
        raise ConfigError(f"{str(path)!r} cannot be written: it is {'a folder' if is_folder else 'the store itself'}.")
    return path


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within the block a file is written.

    Raises:
        ConfigError: If the system does not let it be.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror or error}.") from error


def size_of(path: Path) -> str:
    """A file's size, for people."""
    num_bytes = path.stat().st_size
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.0f} kB"
