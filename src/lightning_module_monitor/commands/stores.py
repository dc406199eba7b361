"""What the subcommands have in common: a store to open, and a file to write."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_module_monitor.errors import ConfigError

if TYPE_CHECKING:
    from lightning_module_monitor.sinks.reader import StoreReader


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
    from lightning_module_monitor.sinks.reader import load_store

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
    if not path.parent.is_dir():
        raise ConfigError(f"{str(path)!r} cannot be written: there is no folder {str(path.parent)!r}.")
    if path.is_dir() or path.resolve() == store.resolve():
        raise ConfigError(f"{str(path)!r} cannot be written: it is {'a folder' if path.is_dir() else 'the store itself'}.")
    return path


def size_of(path: Path) -> str:
    """A file's size, for people."""
    num_bytes = path.stat().st_size
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.0f} kB"
