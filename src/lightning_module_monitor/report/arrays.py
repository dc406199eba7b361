"""What the checks ask of arrays of shape ``(sites, steps)``."""

from __future__ import annotations

import warnings
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Scalar = TypeVar("Scalar", bound=np.generic)


def early(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The first quarter of the records, at least one; ``(sites, steps)`` to ``(sites, some)``."""
    return values[:, : max(1, values.shape[1] // 4)]


def late(values: NDArray[Scalar]) -> NDArray[Scalar]:
    """The last quarter of the records, at least one; ``(sites, steps)`` to ``(sites, some)``."""
    return values[:, -max(1, values.shape[1] // 4) :]


def typical(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Median of each row's finite values, shape ``(rows,)``; NaN where there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a row without any
        medians: NDArray[np.float64] = np.nanmedian(np.where(np.isfinite(values), values, np.nan), axis=1)
    return medians


def growth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """How many times larger the last quarter's median is than that of the first, shape ``(rows,)``; NaN where that is zero."""
    before, after = typical(early(np.abs(values))), typical(late(np.abs(values)))
    factors: NDArray[np.float64] = np.divide(after, before, out=np.full(len(values), np.nan), where=before > 0)
    return factors


def where(mask: NDArray[np.bool_]) -> list[int]:
    """Indices of the true values of a vector."""
    found: list[int] = np.flatnonzero(mask).tolist()
    return found


def first_true(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Index of the first true value of each row, shape ``(rows,)``; the row's length where there is none."""
    first: NDArray[np.int64] = np.where(mask.any(axis=1), mask.argmax(axis=1), mask.shape[1])
    return first
