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
    LANES,
    LEAST_QUICK,
    NUM_PARTS,
    REFERENCE_BIAS,
    REFERENCE_INPUT,
    REFERENCE_WEIGHT,
    WEIGHT,
    _subtract,
)
from lightning_module_monitor.statistics.compiled_vectors import in_wide_vectors, pointer, summing_loop

# What is measured of a token: the input, its change, and what they are normalized to; the update with the change of the bias, and
# without it; the propagating update.
TOKEN, TOKEN_CHANGE, NORMALIZED, NORMALIZED_CHANGE, EFFECTIVE, EFFECTIVE_ALONE, PROPAGATING = range(7)
NUM_FORMS = 7

MAX_CENTER = 4.0
"""Times the standard deviation: a mean that is larger cannot be taken from a token in float32 without losing digits."""

LEAST_CHANGE = 1e-4
"""Times the square of the token's change, as it is divided: what is left of that where a token has only been scaled is what float32 has
rounded away."""

BLOCK = 1024
"""Elements of a token that are summed in float32; blocks are in float64."""


def _token_and_change(builder: Any, read: list[Any], _numbers: list[Any]) -> list[Any]:  # noqa: ANN401  # llvmlite is not annotated, here and below
    """A token, and what it differs by from the other."""
    own, other = read
    return [own, builder.fsub(own, other)]


def _about_centers(builder: Any, read: list[Any], numbers: list[Any]) -> list[Any]:  # noqa: ANN401  # as above
    """The squares of two tokens, each about its center, and their difference, which is made of the tokens' change."""
    own, other = read
    center, center_change, other_center = numbers
    deviation, other_deviation = builder.fsub(own, center), builder.fsub(other, other_center)
    change = builder.fsub(builder.fsub(own, other), center_change)
    products = (deviation, deviation), (other_deviation, other_deviation), (change, builder.fadd(deviation, other_deviation))
    return [builder.fmul(one, by, flags=["contract"]) for one, by in products]


def _squares_of_forms(builder: Any, read: list[Any], numbers: list[Any]) -> list[Any]:  # noqa: ANN401  # as above
    """The squares of all forms, of two tokens.

    What the normalized token changes by is not the difference of two that are near each other, of which float32 would leave little::

        (x - c) f - (x0 - c0) f0  =  (x - x0 - (c - c0)) f  +  (x0 - c0) (f - f0)
    """
    own, other, weight, weight_change, bias_change = read
    center, factor, center_change, other_center, factor_change = numbers
    token_change = builder.fsub(own, other)
    normalized = builder.fmul(builder.fsub(own, center), factor)
    of_token = builder.fmul(builder.fsub(token_change, center_change), factor)
    change = builder.fadd(of_token, builder.fmul(builder.fsub(other, other_center), factor_change), flags=["contract"])
    update = builder.fmul(normalized, weight_change)
    values = {
        TOKEN: own,
        TOKEN_CHANGE: token_change,
        NORMALIZED: normalized,
        NORMALIZED_CHANGE: change,
        EFFECTIVE: builder.fadd(update, bias_change),
        EFFECTIVE_ALONE: update,
        PROPAGATING: builder.fmul(change, weight),
    }
    return [builder.fmul(values[form], values[form], flags=["contract"]) for form in range(NUM_FORMS)]


_changes, _changes_of_rest = (summing_loop(lanes, 2, 2, _token_and_change) for lanes in (LANES, 1))
_about, _about_of_rest = (summing_loop(lanes, 3, 0, _about_centers) for lanes in (LANES, 1))
_forms, _forms_of_rest = (summing_loop(lanes, NUM_FORMS, 0, _squares_of_forms) for lanes in (LANES, 1))


@njit
def _token(address: int, features: int) -> np.ndarray:
    return carray(pointer(address), (features,), np.float32)  # type: ignore[no-any-return]  # numba's


def _block_by_block(vectors: Any, rest: Any) -> Any:  # noqa: ANN401  # numba's functions are not annotated
    """What sums by two loops, of vectors and of single elements, what is made of two tokens."""

    @njit
    def add(own: int, other: int, features: int, by: Any, quick: np.ndarray, sums: np.ndarray) -> None:  # noqa: ANN401  # a tuple of float32
        """``by``: what the loops get. ``quick``: float32, to work with. ``sums``: gets the results first, float64."""
        in_wide_vectors()
        sums[:] = 0.0
        for start in range(0, features, BLOCK):
            quick[:] = np.float32(0.0)
            size, first = min(BLOCK, features - start), start * ELEMENT_BYTES
            single = size % LANES
            done = first + (size - single) * ELEMENT_BYTES
            vectors((own + first, other + first), by, quick.ctypes.data, size // LANES)
            if single:
                rest((own + done, other + done), by, quick.ctypes.data, single)
            for place in range(quick.size):
                sums[place] += quick[place]

    return add


_sum_changes = _block_by_block(_changes, _changes_of_rest)
_sum_deviations = _block_by_block(_about, _about_of_rest)


@njit
def _is_good(squares: float, center: np.float32, features: int) -> bool:
    """Whether float32 was good enough for them."""
    return bool(LEAST_QUICK < squares < np.inf and np.float64(center) ** 2 * features <= MAX_CENTER**2 * squares)


@njit
def _is_same(own: np.ndarray, other: np.ndarray) -> bool:
    differing = np.int32(0)
    for i in range(own.size):
        differing = np.int32(differing + np.int32(own[i] != other[i]))
    return bool(differing == 0)


@njit
def _squares(
    own: int,
    other: int,
    features: int,
    by: tuple[np.float32, np.float32, np.float32, np.float32, np.float32],
    weights: tuple[int, int, int],
    quick: np.ndarray,
    sums: np.ndarray,
) -> None:
    """The sums of all forms. ``by``: as :func:`_squares_of_forms` has them."""
    in_wide_vectors()
    sums[:] = 0.0
    weight, weight_change, bias_change = weights
    for start in range(0, features, BLOCK):
        quick[:] = np.float32(0.0)
        size, first = min(BLOCK, features - start), start * ELEMENT_BYTES
        rest = size % LANES
        done = first + (size - rest) * ELEMENT_BYTES
        places = (own + first, other + first, weight + first, weight_change + first, bias_change + first)
        _forms(places, by, quick.ctypes.data, size // LANES)
        if rest:
            places = (own + done, other + done, weight + done, weight_change + done, bias_change + done)
            _forms_of_rest(places, by, quick.ctypes.data, rest)
        for form in range(NUM_FORMS):
            sums[form] += quick[form]


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
    weights: tuple[int, int, int],
    totals: np.ndarray,
) -> None:
    """Sums in float64."""
    weight, weight_change, bias_change = (
        _token(weights[0], own.size),
        _token(weights[1], own.size),
        _token(weights[2], own.size),
    )
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
    own: int,
    other: int,
    features: int,
    is_compared: bool,
    is_centered: bool,
    epsilon: float,
    weights: tuple[int, int, int],
    is_zero: np.ndarray,
    quick: np.ndarray,
    squares: np.ndarray,
) -> None:
    """The squares of one token; in float64 where float32 is not good enough for all of them.

    ``is_zero``: which are zero, whatever the token. ``quick``: float32, to work with. ``squares``: gets the results, float64, and is
    worked with until then.
    """
    in_wide_vectors()
    center = center_change = np.float32(0.0)
    if is_centered:
        _sum_changes(own, other, features, (), quick, squares)
        center, center_change = np.float32(squares[0] / features), np.float32(squares[1] / features)
    other_center = np.float32(center - center_change)
    _sum_deviations(own, other, features, (center, center_change, other_center), quick, squares)
    own_squares, other_squares, difference = squares[0], squares[1], squares[2]
    is_good = _is_good(own_squares, center, features) and _is_good(other_squares, other_center, features)
    root, other_root = np.sqrt(own_squares / features + epsilon), np.sqrt(other_squares / features + epsilon)
    factor = np.float32(1.0 / root)
    factor_change = np.float32(-difference / features / (root * other_root * (root + other_root)))
    _squares(own, other, features, (center, factor, center_change, other_center, factor_change), weights, quick, squares)
    # Of an input that has not changed the changes are zero: exactly so, whatever order the compiler has found for them.
    is_unchanged = not is_compared or (squares[TOKEN_CHANGE] == 0.0 and _is_same(_token(own, features), _token(other, features)))
    if is_unchanged:
        squares[TOKEN_CHANGE] = squares[NORMALIZED_CHANGE] = squares[PROPAGATING] = 0.0
    elif not squares[NORMALIZED_CHANGE] > LEAST_CHANGE * squares[TOKEN_CHANGE] * np.float64(factor) ** 2:
        is_good = False
    for form in range(NUM_FORMS):
        if not (is_zero[form] or (is_unchanged and form in (TOKEN_CHANGE, NORMALIZED_CHANGE, PROPAGATING))):
            is_good = is_good and LEAST_QUICK < squares[form] < np.inf
    if not is_good:
        _wide_squares(_token(own, features), _token(other, features), is_centered, epsilon, weights, squares)


@njit
def _add_tokens(
    own: int,
    other: int,
    num_tokens: int,
    features: int,
    is_centered: bool,
    epsilon: float,
    weight: int,
    weight_change: np.ndarray,
    bias_change: np.ndarray,
    sums: np.ndarray,
) -> None:
    """Add the squares of tokens to their sums. ``other``: 0 where no change is asked for."""
    in_wide_vectors()
    weights = (weight, weight_change.ctypes.data, bias_change.ctypes.data)
    is_zero = np.zeros(NUM_FORMS, np.bool_)
    is_zero[EFFECTIVE_ALONE] = not weight_change.any()
    is_zero[EFFECTIVE] = is_zero[EFFECTIVE_ALONE] and not bias_change.any()
    quick, squares = np.zeros(NUM_FORMS, np.float32), np.zeros(NUM_FORMS)
    for token in range(num_tokens):
        start = token * features * ELEMENT_BYTES
        compared = own if other == 0 else other
        _measure(own + start, compared + start, features, other != 0, is_centered, epsilon, weights, is_zero, quick, squares)
        sums += squares


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
    in_wide_vectors()
    places = carray(pointer(parts), (NUM_PARTS,), np.int64)
    weight_change, bias_change = np.empty(features, np.float32), np.empty(features, np.float32)
    _subtract(places[WEIGHT], places[REFERENCE_WEIGHT], weight_change)
    _subtract(places[BIAS], places[REFERENCE_BIAS], bias_change)
    sums = np.zeros(NUM_FORMS)
    own, other, weight = places[INPUT], places[REFERENCE_INPUT], places[REFERENCE_WEIGHT]
    # Numba lets an array go behind the last line that names it: the function that gets the changes keeps them.
    _add_tokens(own, other, num_tokens, features, is_centered, epsilon, weight, weight_change, bias_change, sums)
    of_terms = carray(pointer(forms), (num_terms,), np.int64)
    rows = carray(pointer(totals), (num_terms, NUM_FIELDS), np.float64)
    for i in range(num_terms):
        rows[i, ELEMENTS] += num_tokens * features
        rows[i, SQUARES] += sums[of_terms[i]]
