"""Numbers as the page holds them: few columns, four digits, few bytes."""

from __future__ import annotations

import base64
import zlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.report.run import Table

MANTISSA_BITS = 12
"""Of float32's 23: a relative error of 1.2e-4 at most."""
ABSENT_BITS = 0x7FC0_0001
"""The NaN for "not recorded", as in data.js."""

_DROPPED_BITS = 23 - MANTISSA_BITS
_LARGEST = 3.4e38


class Condensed(NamedTuple):
    """A table with fewer steps."""

    first_steps: NDArray[np.int64]
    last_steps: NDArray[np.int64]
    """The first and last step of each column, shape ``(columns,)``."""
    values: NDArray[np.float64]
    """Shape ``(sites, columns)``."""
    is_recorded: NDArray[np.bool_]
    """Shape ``(sites, columns)``."""


def condense(table: Table, max_columns: int) -> Condensed:
    """Let a column stand for several steps: for each site the value of largest magnitude; one that is not finite takes precedence.

    Args:
        table: The table.
        max_columns: Largest number of columns; a table with no more steps stays as it is.
    """
    num_sites, num_steps = table.values.shape
    each = -(-num_steps // max_columns)
    if each == 1:
        return Condensed(table.steps, table.steps, table.values, table.is_recorded)
    columns = -(-num_steps // each)
    missing = columns * each - num_steps
    blocks = np.pad(table.values, ((0, 0), (0, missing)), constant_values=np.nan).reshape(num_sites, columns, each)
    recorded = np.pad(table.is_recorded, ((0, 0), (0, missing))).reshape(blocks.shape)
    importance = np.where(recorded, np.where(np.isfinite(blocks), np.abs(blocks), np.inf), -1.0)
    chosen = importance.argmax(axis=2, keepdims=True)
    last = np.minimum(np.arange(1, columns + 1) * each, num_steps) - 1
    return Condensed(
        table.steps[::each], table.steps[last], np.take_along_axis(blocks, chosen, axis=2)[..., 0], np.asarray(recorded.any(axis=2))
    )


def pack(values: NDArray[np.float64], is_recorded: NDArray[np.bool_] | None = None) -> str:
    """Numbers as text: rounded to ``MANTISSA_BITS``, byte planes of float32, deflated, in base64.

    Infinities and NaN stay; what is too large for float32 becomes its largest number.

    Args:
        values: Any shape.
        is_recorded: Where there is a value, of the same shape; default: everywhere.

    Returns:
        ASCII text, which ``unpack`` of data.js undoes.
    """
    with np.errstate(over="ignore", under="ignore"):
        single = np.where(np.isfinite(values), np.clip(values, -_LARGEST, _LARGEST), values).astype("<f4")
    bits = single.view(np.uint32).copy()
    finite = np.isfinite(single)
    # Half of what is dropped, so that it rounds.
    bits[finite] = (bits[finite] + np.uint32(1 << (_DROPPED_BITS - 1))) & np.uint32(~((1 << _DROPPED_BITS) - 1) & 0xFFFF_FFFF)
    if is_recorded is not None:
        bits[~is_recorded] = ABSENT_BITS
    planes = np.ascontiguousarray(bits.reshape(-1, 1).view(np.uint8).T)  # bytes of one significance are alike
    return base64.b64encode(zlib.compress(planes.tobytes(), 6)).decode()
