"""Exceptions that a non-finite value may have caused: after these alone ``training_step`` is run again, as it may write to a database."""

from __future__ import annotations

import linecache
import re
import traceback
from types import TracebackType

_WORDS = (
    "nan",
    "nans",
    "nan/inf",
    "inf/nan",
    "inf",
    "infinity",
    "non-finite",
    "nonfinite",
    "not finite",
    "invalid values",  # of torch.distributions, which checks its arguments
    "not positive-definite",  # of torch.linalg
    "failed to converge",
)
_SPEAKS_OF_IT = re.compile(rf"(?<![\w/.])(?<!\w-)({'|'.join(_WORDS)})(?![\w/-]|\.\w)", re.IGNORECASE)
"""These words alone: no parts of other words, of paths or of names with a point."""

_CHECKS = re.compile(r"\b(isnan|isfinite|isinf)\b")
"""Functions whose result an ``assert`` or ``if`` tests, and raises an ``AssertionError`` or an ``ArithmeticError``."""


def speaks_of_nonfinite(error: BaseException) -> bool:
    """Whether an exception speaks of a non-finite value: in its message, or in the source that raised it, if that is a check."""
    if _SPEAKS_OF_IT.search(str(error)):
        return True
    if not isinstance(error, AssertionError | ArithmeticError):
        return False
    *_callers, frame = traceback.extract_tb(error.__traceback__) or [None]
    if frame is None or frame.lineno is None:
        return False
    # The condition of a statement that raises is in the line before it.
    return any(_CHECKS.search(linecache.getline(frame.filename, number)) for number in (frame.lineno - 1, frame.lineno))


def was_raised_in(error: BaseException, owner: object, *methods: str) -> bool:
    """Whether an exception has passed through some methods of an object, given by their names."""
    step: TracebackType | None = error.__traceback__
    while step is not None:
        frame = step.tb_frame
        if frame.f_code.co_name in methods and frame.f_locals.get("self") is owner:
            return True
        step = step.tb_next
    return False
