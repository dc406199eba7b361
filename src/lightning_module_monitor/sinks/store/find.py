"""Which store a path means: the file itself, or the newest run in a folder."""

from __future__ import annotations

import logging
from pathlib import Path

from lightning_module_monitor.sinks.store import schema
from lightning_module_monitor.sinks.store.opening import ForeignFileError, open_store

_logger = logging.getLogger("lightning.pytorch.module_monitor")
"""Without Lightning it has no handler, and Python prints its warnings to the standard error."""

_MAX_LISTED = 10


def find_store(path: Path) -> Path:
    """The file of a run.

    Args:
        path: The file, a run's folder, or a log directory with several runs: then the one that was written to last. The others are
            listed in one warning.

    Raises:
        FileNotFoundError: If the folder has no store.
    """
    if not path.is_dir():
        return path
    newest_first = sorted(filter(_is_of_run, path.rglob("*.h5")), key=lambda file: (file.stat().st_mtime_ns, file), reverse=True)
    if not newest_first:
        message = f"There is no store at {str(path)!r}. Neither in this folder nor below it is a run's .h5 file; give the path of one."
        raise FileNotFoundError(message)
    newest, *others = newest_first
    if others:
        listed = [str(file) for file in others[:_MAX_LISTED]]
        more = [f"and {len(others) - _MAX_LISTED} more"] if len(others) > _MAX_LISTED else []
        words = "%s has %d runs; the newest is used: %s. Give the path of a file for another one:\n  %s"
        _logger.warning(words, path, len(newest_first), newest, "\n  ".join([*listed, *more]))
    return newest


def _is_of_run(path: Path) -> bool:
    """Whether a file is a store, also a damaged one: the newest run must not be skipped without an error."""
    try:
        with open_store(path) as file:
            return not schema.has_tensors(file)
    except ForeignFileError:
        return False
    except (OSError, ValueError):
        return path.is_file() and path.stat().st_size > 0
