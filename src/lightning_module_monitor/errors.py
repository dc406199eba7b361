"""What is said when the configuration is wrong or an extra is not installed."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Sequence
from types import ModuleType


class ConfigError(ValueError):
    """A wrong configuration: the message says what was wrong, what was expected, and how to mend it."""


class MonitorError(RuntimeError):
    """Something could not be measured, and the user asked for an error (``on_error: raise``)."""


class NonfiniteError(MonitorError):
    """A value of the training is not finite, and the user asked for an end then (``health: {nonfinite: stop}``); says who made it."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name most like ``name``, capitals aside, as the end of a sentence. Empty if nothing is known.

    >>> nearest("RMS", ["zero_fraction", "rms"])
    "; nearest: 'rms'"
    """
    by_lower_case = {one.lower(): one for one in known}
    found = difflib.get_close_matches(name.lower(), by_lower_case, n=1, cutoff=0.0)
    return f"; nearest: {by_lower_case[found[0]]!r}" if found else ""


def shortened(names: Sequence[str], limit: int = 3) -> str:
    """The first of many names, and how many more there are; each once.

    >>> shortened(["a", "b", "c", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    once = list(dict.fromkeys(names))
    return ", ".join(once[:limit]) + (f" and {len(once) - limit} more" if len(once) > limit else "")


def printable(text: str) -> str:
    r"""A text in one line for the terminal: characters that control it, as a stranger's names may have, are replaced.

    >>> printable("fc\x1b[2J")
    'fc\ufffd[2J'
    """
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def require(module: str, extra: str) -> ModuleType:
    """Import a package that only an extra brings.

    Args:
        module: Import path, e.g. ``"pandas"``.
        extra: The extra of this package that installs it.

    Returns:
        The imported module.

    Raises:
        ImportError: If it is not installed; the message holds the pip command.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        message = f"{module} is not installed. Install it with: pip install 'lightning-module-monitor[{extra}]'"
        raise ImportError(message) from error
