"""The squares of the terms of a layer that normalizes every token, as machine code; see ``statistics/compiled_terms.py``.

A token is normalized while it is in the first-level cache, and what it is normalized to is never written down. The weight is a
diagonal, so that what it has changed by is applied without a further run of the layer. Sums are of float32, as those of
``torch.nn.functional.layer_norm`` are, and of float64 where that is not as good.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from lightning_module_monitor.statistics.compiled import ELEMENT_BYTES, ELEMENTS, NUM_FIELDS, SQUARES
from lightning_module_monitor.statistics.compiled_terms import (
    BIAS,
    INPUT,
    LEAST_QUICK,
    NUM_PARTS,
    REFERENCE_BIAS,
    REFERENCE_INPUT,
    REFERENCE_WEIGHT,
    WEIGHT,
    _subtract,
)
from lightning_module_monitor.statistics.compiled_vectors import ANY_ORDER, pointer

# What is measured of a token: the input, its change, and what they are normalized to; the update with the change of the bias, and
# without it; the propagating update.
TOKEN, TOKEN_CHANGE, NORMALIZED, NORMALIZED_CHANGE, EFFECTIVE, EFFECTIVE_ALONE, PROPAGATING = range(7)
NUM_FORMS = 7

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


@njit(error_model="numpy")
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
def _squares(  # machine code
    own: np.ndarray,
    other: np.ndarray,
    by: tuple[np.float32, np.float32],
    other_by: tuple[np.float32, np.float32],
    weights: tuple[np.ndarray, np.ndarray, np.ndarray],
    totals: np.ndarray,
) -> None:
    """Sums in float32. ``by``: what is taken from a token, and what the rest is multiplied by."""
    center, factor = by
    other_center, other_factor = other_by
    weight, weight_change, bias_change = weights
    of_own = of_change = of_normalized = of_normalized_change = of_effective = of_effective_alone = of_propagating = np.float32(0.0)
    for i in range(own.size):
        of_own += own[i] * own[i]
        change = own[i] - other[i]
        of_change += change * change
        normalized = (own[i] - center) * factor
        of_normalized += normalized * normalized
        change = normalized - (other[i] - other_center) * other_factor
        of_normalized_change += change * change
        change *= weight[i]
        of_propagating += change * change
        update = normalized * weight_change[i]
        of_effective_alone += update * update
        update += bias_change[i]
        of_effective += update * update
    totals[TOKEN], totals[TOKEN_CHANGE] = of_own, of_change
    totals[NORMALIZED], totals[NORMALIZED_CHANGE] = of_normalized, of_normalized_change
    totals[EFFECTIVE], totals[EFFECTIVE_ALONE], totals[PROPAGATING] = of_effective, of_effective_alone, of_propagating


@njit(error_model="numpy")
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
def _wide_squares(
    own: np.ndarray,
    other: np.ndarray,
    is_centered: bool,
    epsilon: float,
    weights: tuple[np.ndarray, np.ndarray, np.ndarray],
    totals: np.ndarray,
) -> None:
    """Sums in float64."""
    weight, weight_change, bias_change = weights
    center, factor = _wide_normalization(own, is_centered, epsilon)
    other_center, other_factor = _wide_normalization(other, is_centered, epsilon)
    totals[:] = 0.0
    for i in range(own.size):
        value, subtracted = np.float64(own[i]), np.float64(other[i])
        normalized = (value - center) * factor
        change = normalized - (subtracted - other_center) * other_factor
        update = normalized * weight_change[i]
        totals[TOKEN] += value * value
        totals[TOKEN_CHANGE] += (value - subtracted) ** 2
        totals[NORMALIZED] += normalized * normalized
        totals[NORMALIZED_CHANGE] += change * change
        totals[PROPAGATING] += (change * weight[i]) ** 2
        totals[EFFECTIVE_ALONE] += update * update
        totals[EFFECTIVE] += (update + bias_change[i]) ** 2


@njit(error_model="numpy")
def _measure(
    own: np.ndarray,
    other: np.ndarray,
    is_compared: bool,
    is_centered: bool,
    epsilon: float,
    weights: tuple[np.ndarray, np.ndarray, np.ndarray],
    is_zero: np.ndarray,
    quick: np.ndarray,
    squares: np.ndarray,
) -> None:
    """The squares of one token; in float64 where float32 is not good enough for all of them.

    ``is_zero``: which are zero, whatever the token. ``quick``: float32, to work with. ``squares``: gets the results, float64.
    """
    one = np.float32(1.0)
    center, root, is_good = _normalization(own, is_centered, epsilon)
    other_center, other_root, other_is_good = _normalization(other, is_centered, epsilon)
    _squares(own, other, (center, one / root), (other_center, one / other_root), weights, quick)
    is_good = is_good and other_is_good
    # Of an input that has not changed the changes are zero: exactly so, whatever order the compiler has found for them.
    is_unchanged = not is_compared or (quick[TOKEN_CHANGE] == 0.0 and _is_same(own, other))
    if is_unchanged:
        quick[TOKEN_CHANGE] = quick[NORMALIZED_CHANGE] = quick[PROPAGATING] = np.float32(0.0)
    elif not quick[NORMALIZED_CHANGE] > np.float32(LEAST_CHANGE) * quick[NORMALIZED]:
        is_good = False
    for form in range(NUM_FORMS):
        squares[form] = quick[form]
        if not (is_zero[form] or (is_unchanged and form in (TOKEN_CHANGE, NORMALIZED_CHANGE, PROPAGATING))):
            is_good = is_good and LEAST_QUICK < quick[form] < np.inf
    if not is_good:
        _wide_squares(own, other, is_centered, epsilon, weights, squares)


@njit("void(int64, int64, int64, int64, int64, boolean, float64, int64)", cache=True)
def add_normalized(  # machine code
    parts: int, forms: int, num_terms: int, num_tokens: int, features: int, is_centered: bool, epsilon: float, totals: int
) -> None:
    """Add the squares of a layer's terms to their totals.

    Args:
        parts: As for ``compiled_terms.add_terms``; of the reference's input 0 where no change is asked for.
        forms: Address of what each term is, int64.
        num_terms: Number of terms.
        num_tokens: At least 1.
        features: Of a token, which is normalized by itself.
        is_centered: Whether the mean is taken from a token first.
        epsilon: What is added to the mean square before its root is divided by.
        totals: Address of a row for each term.
    """
    places = carray(pointer(parts), (NUM_PARTS,), np.int64)
    weight = carray(pointer(places[REFERENCE_WEIGHT]), (features,), np.float32)
    weight_change, bias_change = np.empty(features, np.float32), np.empty(features, np.float32)
    _subtract(places[WEIGHT], places[REFERENCE_WEIGHT], weight_change)
    _subtract(places[BIAS], places[REFERENCE_BIAS], bias_change)
    weights = (weight, weight_change, bias_change)
    is_zero = np.zeros(NUM_FORMS, np.bool_)
    is_zero[EFFECTIVE_ALONE] = not weight_change.any()
    is_zero[EFFECTIVE] = is_zero[EFFECTIVE_ALONE] and not bias_change.any()
    sums, quick, squares = np.zeros(NUM_FORMS), np.zeros(NUM_FORMS, np.float32), np.zeros(NUM_FORMS)
    for token in range(num_tokens):
        start = token * features * ELEMENT_BYTES
        own = carray(pointer(places[INPUT] + start), (features,), np.float32)
        other = own if places[REFERENCE_INPUT] == 0 else carray(pointer(places[REFERENCE_INPUT] + start), (features,), np.float32)
        _measure(own, other, places[REFERENCE_INPUT] != 0, is_centered, epsilon, weights, is_zero, quick, squares)
        sums += squares
    of_terms = carray(pointer(forms), (num_terms,), np.int64)
    rows = carray(pointer(totals), (num_terms, NUM_FIELDS), np.float64)
    for i in range(num_terms):
        rows[i, ELEMENTS] += num_tokens * features
        rows[i, SQUARES] += sums[of_terms[i]]
