"""Squares of an input and of what it is normalized to, of two models, as machine code; see ``statistics/compiled.py``.

A token is normalized while it is in the first-level cache, and what it is normalized to is never written down. Sums are of
float32, as those of ``torch.nn.functional.layer_norm`` are, and of float64 where that is not as good.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from lightning_module_monitor.statistics.compiled import (
    ANY_ORDER,
    ELEMENT_BYTES,
    ELEMENTS,
    LEAST_QUICK,
    NUM_FIELDS,
    SQUARES,
    _merge,
    _pointer,
)

# What is measured of a token.
INPUT, INPUT_CHANGE, NORMALIZED, NORMALIZED_CHANGE = range(4)
NUM_FORMS = 4

MAX_CENTER = 4.0
"""Times the standard deviation: a mean that is larger cannot be taken from a token in float32 without losing digits."""

LEAST_CHANGE = 1e-8
"""Times the square of what is normalized: that of a change which is smaller is made of what float32 has rounded away."""


@njit(fastmath=ANY_ORDER)
def _sum(values: np.ndarray) -> Any:  # noqa: ANN401  # a float32, as numba finds
    total = np.float32(0.0)
    for i in range(values.size):
        total += values[i]
    return total


@njit(fastmath=ANY_ORDER)
def _squares_about(values: np.ndarray, center: np.float32) -> Any:  # noqa: ANN401  # as above
    total = np.float32(0.0)
    for i in range(values.size):
        deviation = values[i] - center
        total += deviation * deviation
    return total


@njit
def _normalization(token: np.ndarray, is_centered: bool, epsilon: float) -> tuple[np.float32, np.float32, bool]:
    """What is taken from a token, what the rest is divided by, and whether float32 was good enough for them."""
    center = np.float32(_sum(token) / np.float32(token.size)) if is_centered else np.float32(0.0)
    squares = _squares_about(token, center)
    root = np.sqrt(np.float64(squares) / token.size + epsilon)
    is_good = LEAST_QUICK < squares < np.inf and np.float64(center) ** 2 * token.size <= MAX_CENTER**2 * squares
    return center, np.float32(root), is_good


@njit
def _is_same(own: np.ndarray, other: np.ndarray) -> bool:
    differing = np.int32(0)
    for i in range(own.size):
        differing = np.int32(differing + np.int32(own[i] != other[i]))
    return bool(differing == 0)


@njit(fastmath=ANY_ORDER)
def _squares(
    own: np.ndarray,
    other: np.ndarray,
    center: np.float32,
    factor: np.float32,
    other_center: np.float32,
    other_factor: np.float32,
    totals: np.ndarray,
) -> None:  # machine code
    """Sums in float32."""
    of_own = of_change = of_normalized = of_normalized_change = np.float32(0.0)
    for i in range(own.size):
        of_own += own[i] * own[i]
        change = own[i] - other[i]
        of_change += change * change
        normalized = (own[i] - center) * factor
        of_normalized += normalized * normalized
        change = normalized - (other[i] - other_center) * other_factor
        of_normalized_change += change * change
    totals[INPUT], totals[INPUT_CHANGE] = of_own, of_change
    totals[NORMALIZED], totals[NORMALIZED_CHANGE] = of_normalized, of_normalized_change


@njit
def _wide_normalization(token: np.ndarray, is_centered: bool, epsilon: float) -> tuple[float, float]:
    """What is taken from a token, and what the rest is multiplied by, in float64."""
    center = 0.0
    if is_centered:
        for i in range(token.size):
            center += np.float64(token[i])
    center /= token.size
    square = 0.0
    for i in range(token.size):
        square += (np.float64(token[i]) - center) ** 2 / token.size
    return center, 1.0 / np.sqrt(square + epsilon)


@njit
def _wide_squares(own: np.ndarray, other: np.ndarray, is_centered: bool, epsilon: float, totals: np.ndarray) -> None:
    """Sums in float64."""
    center, factor = _wide_normalization(own, is_centered, epsilon)
    other_center, other_factor = _wide_normalization(other, is_centered, epsilon)
    totals[:] = 0.0
    for i in range(own.size):
        value, subtracted = np.float64(own[i]), np.float64(other[i])
        normalized = (value - center) * factor
        totals[INPUT] += value * value
        totals[INPUT_CHANGE] += (value - subtracted) ** 2
        totals[NORMALIZED] += normalized * normalized
        totals[NORMALIZED_CHANGE] += (normalized - (subtracted - other_center) * other_factor) ** 2


@njit
def _measure(
    own: np.ndarray, other: np.ndarray, is_compared: bool, is_centered: bool, epsilon: float, quick: np.ndarray, squares: np.ndarray
) -> None:
    """The squares of one token; in float64 where float32 is not good enough for all of them.

    ``quick``: float32, to work with. ``squares``: gets the results, float64.
    """
    one = np.float32(1.0)
    center, root, is_good = _normalization(own, is_centered, epsilon)
    other_center, other_root, other_is_good = _normalization(other, is_centered, epsilon)
    _squares(own, other, center, one / root, other_center, one / other_root, quick)
    is_good = is_good and other_is_good
    # Of an input that has not changed the changes are zero: exactly so, whatever order the compiler has found for them.
    is_unchanged = not is_compared or (quick[INPUT_CHANGE] == 0.0 and _is_same(own, other))
    for form in range(NUM_FORMS):
        squares[form] = quick[form]
        if form in (INPUT, NORMALIZED) or not is_unchanged:
            is_good = is_good and LEAST_QUICK < quick[form] < np.inf
    if is_unchanged:
        squares[INPUT_CHANGE] = squares[NORMALIZED_CHANGE] = 0.0
    elif not squares[NORMALIZED_CHANGE] > LEAST_CHANGE * squares[NORMALIZED]:
        is_good = False
    if not is_good:
        _wide_squares(own, other, is_centered, epsilon, squares)


@njit("void(int64, int64, int64, int64, boolean, float64, int64[:, ::1], float64[:, ::1])", cache=True)
def add_normalized(
    address: int, other: int, num_elements: int, features: int, is_centered: bool, epsilon: float, targets: np.ndarray, rows: np.ndarray
) -> None:
    """Merge squares of an input, of its change, of what it is normalized to, and of the change of that, into rows.

    Args:
        address: Of the first of ``num_elements`` float32 elements of the input that lie one after the other.
        other: Of those of the reference's input; 0 where no change is asked for.
        num_elements: At least 1; a multiple of ``features``.
        features: Of a token, which is normalized by itself.
        is_centered: Whether the mean is taken from a token first.
        epsilon: What is added to the mean square before its root is divided by.
        targets: Which of the four goes into which row: pairs of the number of a row and that of the form.
        rows: As for ``compiled.add``.
    """
    totals = np.zeros((NUM_FORMS, NUM_FIELDS))
    quick, squares = np.zeros(NUM_FORMS, np.float32), np.zeros(NUM_FORMS)
    for start in range(0, num_elements, features):
        own = carray(_pointer(address + start * ELEMENT_BYTES), (features,), np.float32)
        against = own if other == 0 else carray(_pointer(other + start * ELEMENT_BYTES), (features,), np.float32)
        _measure(own, against, other != 0, is_centered, epsilon, quick, squares)
        totals[:, SQUARES] += squares
    for row, form in targets:
        totals[form, ELEMENTS] = num_elements
        _merge(totals[form], rows[row])
