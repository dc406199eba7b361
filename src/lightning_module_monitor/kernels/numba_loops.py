"""Moments of tensors in host memory by plain compiled loops over numpy arrays; needs numba (the extra ``fast``).

Elements are widened to float64 as they are read: no square of a float32 leaves its range. A tensor is read in chunks that stay in
the first-level cache; a chunk's sums are about a center, so that a large mean costs no digits, and chunks are merged.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, float64, int64, njit
from numba.types import Array

CHUNK = 4096
"""Elements of a chunk: 16 KiB of float32."""

FAR = 32.0
"""If the squares about a center are larger than those about the mean by this factor, they have lost digits and are summed again."""

# The fields of `Moments` and the bits of `Need`, as numbers, because numba's cache depends on this file alone. A test compares them.
ELEMENTS, MEAN, DEVIATIONS, THIRD, FOURTH, SQUARES, MAGNITUDE = range(7)
MAXIMUM, MINIMUM, ZEROS, NONFINITE, TOKENS, TOKEN_NORM, TOKEN_RMS = range(7, 14)
NUM_FIELDS = 14
NEED_SUMS, NEED_SQUARES = 1 << 0 | 1 << 2 | 1 << 3 | 1 << 8, 1 << 1
NEED_ZEROS, NEED_COUNTS, NEED_ORDER = 1 << 5, 1 << 5 | 1 << 6, 1 << 4 | 1 << 5 | 1 << 6
NEED_TOKENS, NEED_POWERS = 1 << 7, 1 << 8

MAGNITUDE_BITS, SIGN = np.int32(0x7FFFFFFF), np.uint32(1 << 31)
SMALLEST_NORMAL = np.int32(1 << 23)
INFINITY, MINUS_INFINITY = np.int32(0x7F800000), np.uint32(0xFF800000)
"""Bits of float32's infinities. Those of a NaN of the same sign are larger."""

READ_ONLY = Array(float32, 1, "C", readonly=True)
"""Elements of a tensor. Writable arrays are cast to this type, so that a chunk's loops are compiled once."""

ANY_ORDER = {"reassoc", "contract", "nsz", "arcp"}
"""Sums may be reordered and vectorized. NaN and infinity keep their meaning."""


@njit(cache=True, fastmath=ANY_ORDER)
def _sums(chunk: Any, center: float) -> Any:  # noqa: ANN401  # numba's arrays and tuples are not annotated, here and below
    residual = deviations = magnitude = 0.0
    for i in range(chunk.size):
        x = np.float64(chunk[i])
        residual += x - center
        deviations += (x - center) * (x - center)
        magnitude += abs(x)
    return residual, deviations, magnitude


@njit(cache=True, fastmath=ANY_ORDER)
def _powers(chunk: Any, mean: float) -> Any:  # noqa: ANN401
    third = fourth = 0.0
    for i in range(chunk.size):
        d = np.float64(chunk[i]) - mean
        third += d * d * d
        fourth += d * d * d * d
    return third, fourth


@njit(cache=True, fastmath=ANY_ORDER)
def _squares(chunk: Any, start: int, stop: int) -> float:  # noqa: ANN401
    total = 0.0
    for i in range(start, stop):
        total += np.float64(chunk[i]) * np.float64(chunk[i])
    return total


@njit(cache=True)
def _measure_order(chunk: Any, needs: int, row: Any) -> None:  # noqa: ANN401
    """The extremes, zeros and non-finite elements, from the bits.

    Comparisons of integers are vectorized, those of floats that may be NaN are not. Positive floats have the order of their bits,
    negative ones the opposite order.
    """
    bits = chunk.view(np.int32)
    largest, smallest, unsigned = np.int32(-(2**31)), MAGNITUDE_BITS, np.uint32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i])
        smallest = min(smallest, bits[i])
        unsigned = max(unsigned, np.uint32(bits[i]))
    has_nan = largest > INFINITY or unsigned > MINUS_INFINITY
    # If all elements are negative, the largest has the smallest bits.
    maximum, minimum = largest if largest >= 0 else smallest, smallest if unsigned < SIGN else np.int32(unsigned)
    row[MAXIMUM] = np.nan if has_nan else np.int32(maximum).view(np.float32)
    row[MINIMUM] = np.nan if has_nan else np.int32(minimum).view(np.float32)
    if needs & NEED_COUNTS and (needs & NEED_ZEROS or largest >= INFINITY or unsigned >= MINUS_INFINITY):
        zeros = nonfinite = np.int32(0)
        for i in range(bits.size):
            magnitude = np.int32(bits[i] & MAGNITUDE_BITS)
            zeros = np.int32(zeros + np.int32(magnitude == np.int32(0)))
            nonfinite = np.int32(nonfinite + np.int32(magnitude >= INFINITY))
        row[ZEROS], row[NONFINITE] = zeros, nonfinite


@njit(cache=True)
def _measure_sums(chunk: Any, needs: int, row: Any) -> None:  # noqa: ANN401
    size = chunk.size
    # The median of three elements, because a single one may be an outlier.
    first, second, third = chunk[0], chunk[size // 2], chunk[size - 1]
    center = np.float64(max(min(first, second), min(max(first, second), third)))
    center = center if np.isfinite(center) else 0.0
    residual, deviations, magnitude = _sums(chunk, center)
    if deviations - residual * (residual / size) < deviations / FAR:
        center += residual / size
        residual, deviations, magnitude = _sums(chunk, center)
    mean = center + residual / size
    row[MEAN], row[MAGNITUDE] = mean, magnitude
    row[DEVIATIONS] = max(deviations - residual * (residual / size), 0.0)
    row[SQUARES] = row[DEVIATIONS] + size * mean * mean
    if needs & NEED_POWERS:
        row[THIRD], row[FOURTH] = _powers(chunk, mean)


@njit(cache=True)
def _measure(chunk: Any, needs: int, row: Any) -> None:  # noqa: ANN401
    for field in range(NUM_FIELDS):
        row[field] = 0.0
    row[ELEMENTS], row[MAXIMUM], row[MINIMUM] = chunk.size, -np.inf, np.inf
    if needs & NEED_SUMS:
        _measure_sums(chunk, needs, row)
    if needs & NEED_ORDER:
        _measure_order(chunk, needs, row)
    # With an infinite element the deviations are NaN, but the sum of squares is infinite.
    if needs & NEED_SQUARES and not (needs & NEED_SUMS and np.isfinite(row[SQUARES])):
        row[SQUARES] = _squares(chunk, 0, chunk.size)


@njit(cache=True)
def _measure_tokens(chunk: Any, start: int, features: int, squares: float, row: Any) -> float:  # noqa: ANN401
    """Sum the norms of the tokens that end in a chunk; returns the sum of squares of the token that the next chunk continues."""
    position, missing = 0, features - start % features
    while position < chunk.size:
        end = min(position + missing, chunk.size)
        squares += _squares(chunk, position, end)
        missing -= end - position
        position = end
        if missing == 0:
            row[TOKENS] += 1.0
            row[TOKEN_NORM] += np.sqrt(squares)
            squares, missing = 0.0, features
    row[TOKEN_RMS] = row[TOKEN_NORM] / np.sqrt(features)
    return squares


@njit(cache=True)
def merge(other: Any, row: Any) -> None:  # noqa: ANN401
    """Merge moments into a row, as ``Moments.merge`` does."""
    n, m = row[ELEMENTS], other[ELEMENTS]
    # A weighted sum, and not a mean plus a part of the distance, so that an infinite mean stays infinite.
    mean = other[MEAN] if n == 0.0 else row[MEAN] * (n / (n + m)) + other[MEAN] * (m / (n + m))
    d, e = 0.0 if n == 0.0 else row[MEAN] - mean, other[MEAN] - mean
    d2, e2 = d * d, e * e
    fourth = 4.0 * (d * row[THIRD] + e * other[THIRD]) + 6.0 * (d2 * row[DEVIATIONS] + e2 * other[DEVIATIONS])
    third = 3.0 * (d * row[DEVIATIONS] + e * other[DEVIATIONS])
    largest, smallest = max(row[MAXIMUM], other[MAXIMUM]), min(row[MINIMUM], other[MINIMUM])
    has_nan = row[MAXIMUM] != row[MAXIMUM] or other[MAXIMUM] != other[MAXIMUM]
    for field in range(NUM_FIELDS):
        row[field] += other[field]
    row[FOURTH] += fourth + n * d2 * d2 + m * e2 * e2
    row[THIRD] += third + n * d2 * d + m * e2 * e
    row[DEVIATIONS] += n * d2 + m * e2
    row[MEAN] = mean
    row[MAXIMUM] = np.nan if has_nan else largest
    row[MINIMUM] = np.nan if has_nan else smallest


@njit(float64(READ_ONLY, int64, int64, int64, float64, float64[::1]), cache=True)
def _add_chunk(chunk: Any, start: int, features: int, needs: int, squares: float, row: Any) -> float:  # noqa: ANN401, PLR0917  # arguments that numba passes on quickly
    latest = np.empty(NUM_FIELDS)
    _measure(chunk, needs, latest)
    if needs & NEED_TOKENS:
        squares = _measure_tokens(chunk, start, features, squares, latest)
    merge(latest, row)
    return squares


@njit(cache=True)
def add(elements: Any, features: int, needs: int, row: Any) -> None:  # noqa: ANN401
    """Merge a tensor into a row.

    Args:
        elements: Float32, at least one, in order.
        features: Size of the last dimension; only read for ``Need.TOKENS``.
        needs: Bits of ``Need``.
        row: Shape ``(NUM_FIELDS,)``, float64.
    """
    squares = 0.0
    for start in range(0, elements.size, CHUNK):
        squares = _add_chunk(elements[start : start + CHUNK], start, features, needs, squares, row)


@njit(cache=True)
def add_bfloat16(halves: Any, features: int, needs: int, row: Any) -> None:  # noqa: ANN401
    """:func:`add` of the bits of bfloat16, uint16."""
    squares, wide = 0.0, np.empty(CHUNK, np.float32)
    for start in range(0, halves.size, CHUNK):
        piece = halves[start : start + CHUNK]
        bits = wide.view(np.uint32)
        for i in range(piece.size):
            bits[i] = np.uint32(piece[i]) << np.uint32(16)  # a bfloat16 is the upper half of a float32
        squares = _add_chunk(wide[: piece.size], start, features, needs, squares, row)


@njit(cache=True, fastmath=ANY_ORDER)
def _product(chunk: Any, other: Any) -> float:  # noqa: ANN401
    total = 0.0
    for i in range(chunk.size):
        total += np.float64(chunk[i]) * np.float64(other[i])
    return total


@njit(float64(READ_ONLY, READ_ONLY), cache=True)
def product(elements: Any, other: Any) -> float:  # noqa: ANN401
    """The inner product of two tensors of as many float32 elements, summed in chunks."""
    total = 0.0
    for start in range(0, elements.size, CHUNK):
        total += _product(elements[start : start + CHUNK], other[start : start + CHUNK])
    return total


@njit(cache=True)
def count(bits: Any, thresholds: Any, indices: Any, shift: int, bins_of_octave: int, counts: Any) -> None:  # noqa: ANN401, PLR0917
    """Count elements in a set of bins.

    Args:
        bits: The bits of float32, uint32.
        thresholds: As ``cells_of`` of the set returns them.
        indices: Likewise.
        shift: Number of bits after those of a cell.
        bins_of_octave: Number of bins in each octave of the subnormal numbers; 0 if all of these are in one bin.
        counts: A row of counts, int64.
    """
    for i in range(bits.size):
        magnitude = np.int32(bits[i] & MAGNITUDE_BITS)
        sign = bits[i] & SIGN
        higher = 0
        if bins_of_octave and 0 < magnitude < SMALLEST_NORMAL:
            # A cell of subnormal numbers has several edges. This is the number times 2^119, from its bits: arithmetic may flush it to zero.
            magnitude = np.int32(np.float32(magnitude).view(np.int32) - np.int32(30 << 23))
            higher = 119 * bins_of_octave if sign == 0 else -119 * bins_of_octave
        cell = (np.uint32(magnitude) | sign) >> shift
        counts[indices[2 * cell + (magnitude >= thresholds[cell])] - higher] += 1
