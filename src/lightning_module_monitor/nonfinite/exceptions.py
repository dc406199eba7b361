"""Exceptions that a non-finite value may have caused: after these alone ``training_step`` is run again, as it may write to a database."""

from __future__ import annotations

import ast
import linecache
import re
import traceback
from collections.abc import Sequence
from types import TracebackType

_WORDS = (
    "nan",
    "nans",
    "nan/inf",
    "inf/nan",
    "inf",
    "infs",
    "infinity",
    "infinite values",
    "non-finite",
    "non finite",
    "nonfinite",
    "not finite",
    "invalid values",  # of torch.distributions, which checks its arguments
    "invalid value encountered",  # of numpy, whose warnings may be errors
    "not positive-definite",  # of torch.linalg
    "not positive definite",
    "failed to converge",
)
_SPEAKS_OF_IT = re.compile(rf"(?<![\w/.\\])(?<!\w-)({'|'.join(_WORDS)})(?![\w/\\=&-]|\.\w)", re.IGNORECASE)
"""These words alone: no parts of other words, of paths, of queries or of names with a point."""

_CHECKS = {"isnan", "isfinite", "isinf"}
"""Functions whose result a statement tests, which raises an ``AssertionError`` or an ``ArithmeticError``."""


def speaks_of_nonfinite(error: BaseException) -> bool:
    """Whether an exception speaks of a non-finite value: in its message, or in the source that raised it, if that is a check.

    Files, addresses and keys may have any name: what is not found or cannot be read never speaks of one.
    """
    if isinstance(error, OSError | LookupError | ImportError):
        return False
    if _SPEAKS_OF_IT.search(str(error)):
        return True
    return isinstance(error, AssertionError | ArithmeticError) and _is_of_check(error)


def _is_of_check(error: BaseException) -> bool:
    """Whether the statement that raised an error is a check, or a call that does nothing else has reached it, as of ``torch._assert``."""
    for number, frame in enumerate(reversed(traceback.extract_tb(error.__traceback__))):
        around = _statements(frame)
        if number > 0 and not (around and isinstance(around[-1], ast.Expr)):
            return False
        if any(_names(node) & _CHECKS for node in _tested(around)):
            return True
    return False


def _statements(frame: traceback.FrameSummary) -> list[ast.stmt]:
    """The statements that a line of a frame is in, the innermost last; none without source."""
    try:
        tree = ast.parse("".join(linecache.getlines(frame.filename)))
    except (SyntaxError, ValueError):
        return []
    line = frame.lineno or 0
    return [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)]


def _tested(around: Sequence[ast.stmt]) -> list[ast.AST]:
    """The code that the innermost statement tests: the condition of an ``assert``, that of the ``if`` around a ``raise``, or all of it."""
    match around:
        case [*_, ast.Assert(test=test)]:
            return [test]
        case [*outer, ast.Raise()]:
            return [node.test for node in outer[-1:] if isinstance(node, ast.If)]
        case [*_, ast.Expr() | ast.Assign() | ast.AnnAssign() | ast.AugAssign() | ast.Return() as statement]:
            return [statement]
    return []


def _names(node: ast.AST) -> set[str]:
    """All names in an expression, also those of attributes; none of strings and comments."""
    return {part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "") for part in ast.walk(node)}


def was_raised_in(error: BaseException, owner: object, *methods: str) -> bool:
    """Whether an exception has passed through some methods of an object, given by their names."""
    step: TracebackType | None = error.__traceback__
    while step is not None:
        frame = step.tb_frame
        if frame.f_code.co_name in methods and frame.f_locals.get("self") is owner:
            return True
        step = step.tb_next
    return False
