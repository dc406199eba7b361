"""Exceptions, parts of messages, and what is installed.

Internal: it may change in any version.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

Log: TypeAlias = "logging.Logger | logging.LoggerAdapter[logging.Logger]"
"""Receives messages."""


class ConfigError(ValueError):
    """A wrong configuration. The message names the value, what was expected, and how to correct it."""


class MonitorError(RuntimeError):
    """Something could not be measured, and errors are raised (``on_error: raise``)."""


class NonfiniteError(MonitorError):
    """A value of the training is not finite, with ``health: {nonfinite: stop}``. The message names the module that made it."""


class RanksLostError(MonitorError):
    """Another rank did not take part in a collective of the monitor's: nothing can be recorded of all ranks together any more."""


def shortened(names: Sequence[str], limit: int = 3) -> str:
    """The first of many names, and how many more there are; each once.

    >>> shortened(["a", "b", "c", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    once = list(dict.fromkeys(names))
    return ", ".join(once[:limit]) + (f" and {len(once) - limit} more" if len(once) > limit else "")


def printable(text: str) -> str:
    r"""A text in one line for the terminal: control characters, which names in a file may have, are replaced.

    >>> printable("fc\x1b[2J")
    'fc\ufffd[2J'
    """
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def in_bytes(count: int) -> str:
    """A number of bytes in a readable unit.

    >>> in_bytes(1536)
    '1.5 KiB'
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise an ``OSError`` of the block as a ``ConfigError`` about the file."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror or error}.") from error


def require(module: str, extra: str) -> ModuleType:
    """Import a package that only an extra of this one installs.

    Raises:
        ImportError: If it is not installed; the message holds the pip command.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        message = f"{module.partition('.')[0]} is not installed. Install it with: pip install 'lightning-module-monitor[{extra}]'"
        raise ImportError(message) from error


def package_version() -> str:
    """The version of this package in its metadata, which pyproject.toml gives."""
    try:
        return importlib.metadata.version("lightning-module-monitor")
    except importlib.metadata.PackageNotFoundError:  # a folder of sources on the path
        return "unknown"
