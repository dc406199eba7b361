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
INFINITY, MINUS_INFINITY = np.int32(0x7F800000), np.uint32(0xFF800000)
"""Bits of float32's infinities. Those of a NaN of the same sign are larger."""

# The sets of bins, as numbers for the same reason.
MANTISSA_SIZE, MANTISSA, SMALLEST_NORMAL = np.int32(23), np.int32(0x7FFFFF), np.int32(1 << 23)
ZERO_BIN, NAN_BIN, LOWEST_OCTAVE, NUM_OCTAVES = np.int32(131), np.int32(263), np.int32(63), np.int32(128)
FINE_ZERO_BIN, FINE_NAN_BIN, FINE_FIRST = np.int32(2222), np.int32(4445), np.int32(-184549376)
FINE_LOWEST, FINE_SUBNORMAL = np.int32(FINE_FIRST - 1), np.int32(-149 << 23)
STEP_1, STEP_2, STEP_3, STEP_4, STEP_5, STEP_6, STEP_7 = (
    np.int32(step) for step in (0x0B95C2, 0x1837F0, 0x25FED7, 0x3504F3, 0x45672A, 0x5744FD, 0x6AC0C7)
)
LIMIT_1, LIMIT_2, LIMIT_3, LIMIT_4 = (np.int32(limit) for limit in (0x43E80000, 0x476FFFFF, 0x477FEFFF, 0x7F7F7FFF))

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
def _order(bits: Any) -> Any:  # noqa: ANN401
    """The largest and the smallest bits as signed integers, and the largest as unsigned ones.

    Comparisons of integers are vectorized, those of floats that may be NaN are not. Positive floats have the order of their bits,
    negative ones the opposite order.
    """
    largest, smallest, unsigned = np.int32(-(2**31)), MAGNITUDE_BITS, np.uint32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i])
        smallest = min(smallest, bits[i])
        unsigned = max(unsigned, np.uint32(bits[i]))
    return largest, smallest, unsigned


@njit(cache=True)
def _count(bits: Any) -> Any:  # noqa: ANN401
    """Zeros and non-finite elements."""
    zeros = nonfinite = np.int32(0)
    for i in range(bits.size):
        magnitude = np.int32(bits[i] & MAGNITUDE_BITS)
        zeros = np.int32(zeros + np.int32(magnitude == np.int32(0)))
        nonfinite = np.int32(nonfinite + np.int32(magnitude >= INFINITY))
    return zeros, nonfinite


@njit(cache=True)
def _measure_order(chunk: Any, needs: int, row: Any) -> None:  # noqa: ANN401
    bits = chunk.view(np.int32)
    largest, smallest, unsigned = _order(bits)
    has_nan = largest > INFINITY or unsigned > MINUS_INFINITY
    # If all elements are negative, the largest has the smallest bits.
    maximum, minimum = largest if largest >= 0 else smallest, smallest if unsigned < SIGN else np.int32(unsigned)
    row[MAXIMUM] = np.nan if has_nan else np.int32(maximum).view(np.float32)
    row[MINIMUM] = np.nan if has_nan else np.int32(minimum).view(np.float32)
    if needs & NEED_COUNTS and (needs & NEED_ZEROS or largest >= INFINITY or unsigned >= MINUS_INFINITY):
        row[ZEROS], row[NONFINITE] = _count(bits)


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


@njit(cache=True)
def _widen(halves: Any, chunk: Any) -> None:  # noqa: ANN401
    """Convert bfloat16 to float32, of which it is the upper half."""
    bits = chunk.view(np.uint32)
    for i in range(halves.size):
        bits[i] = np.uint32(halves[i]) << np.uint32(16)


@njit(cache=True)
def _subtract(difference: Any, other: Any) -> None:  # noqa: ANN401
    for i in range(difference.size):
        difference[i] -= other[i]


@njit(cache=True)
def _subtract_repeated(difference: Any, shift: Any, start: int) -> None:  # noqa: ANN401
    """Subtract ``shift`` from each row of a tensor; ``difference`` begins at the tensor's element ``start``."""
    position, offset = 0, start % shift.size
    while position < difference.size:
        end = min(position + shift.size - offset, difference.size)
        _subtract(difference[position:end], shift[offset:])
        position, offset = end, 0


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
        _widen(piece, wide)
        squares = _add_chunk(wide[: piece.size], start, features, needs, squares, row)


@njit(cache=True)
def add_difference(elements: Any, other: Any, shift: Any, features: int, needs: int, row: Any) -> None:  # noqa: ANN401, PLR0917
    """:func:`add` of ``elements - other - shift``, all float32; an empty array stands for zero, and ``shift`` is repeated."""
    squares, buffer = 0.0, np.empty(CHUNK, np.float32)
    for start in range(0, elements.size, CHUNK):
        chunk = elements[start : start + CHUNK]
        difference = buffer[: chunk.size]
        for i in range(chunk.size):
            difference[i] = chunk[i]
        if other.size:
            _subtract(difference, other[start : start + CHUNK])
        if shift.size:
            _subtract_repeated(difference, shift, start)
        squares = _add_chunk(difference, start, features, needs, squares, row)


@njit(cache=True)
def _add_to_counts(indices: Any, counts: Any) -> None:  # noqa: ANN401
    for i in range(indices.size):
        counts[indices[i]] += 1


@njit(cache=True)
def count(bits: Any, counts: Any) -> None:  # noqa: ANN401
    """Count elements in the bins of ``HISTOGRAM``.

    Args:
        bits: The bits of float32, uint32.
        counts: A row of counts, int64.
    """
    indices = np.empty(CHUNK, np.int32)
    for start in range(0, bits.size, CHUNK):
        chunk = bits[start : start + CHUNK]
        for i in range(chunk.size):
            magnitude = np.int32(chunk[i] & MAGNITUDE_BITS)
            octave = min(max((magnitude >> MANTISSA_SIZE) - LOWEST_OCTAVE, np.int32(-1)), NUM_OCTAVES)
            distance = octave + np.int32(2) if magnitude != 0 else np.int32(0)
            distance = distance if magnitude != INFINITY else ZERO_BIN
            index = ZERO_BIN - distance if chunk[i] >= SIGN else ZERO_BIN + distance
            indices[i] = index if magnitude <= INFINITY else NAN_BIN
        _add_to_counts(indices[: chunk.size], counts)


@njit(cache=True)
def count_finely(bits: Any, counts: Any) -> None:  # noqa: ANN401
    """:func:`count` in the bins of ``FINE``."""
    indices = np.empty(CHUNK, np.int32)
    for start in range(0, bits.size, CHUNK):
        chunk = bits[start : start + CHUNK]
        for i in range(chunk.size):
            magnitude = np.int32(chunk[i] & MAGNITUDE_BITS)
            multiple = np.int32(np.float32(magnitude).view(np.int32) + FINE_SUBNORMAL)
            code = max(np.int32((magnitude if magnitude >= SMALLEST_NORMAL else multiple) - np.int32(1)), FINE_LOWEST)
            mantissa = np.int32(code & MANTISSA)
            distance = np.int32(2) + np.int32(8) * np.int32((code - FINE_FIRST) >> MANTISSA_SIZE)
            distance += np.int32(mantissa >= STEP_1) + np.int32(mantissa >= STEP_2) + np.int32(mantissa >= STEP_3)
            distance += np.int32(mantissa >= STEP_4) + np.int32(mantissa >= STEP_5) + np.int32(mantissa >= STEP_6)
            distance += np.int32(mantissa >= STEP_7) + np.int32(code >= LIMIT_1) + np.int32(code >= LIMIT_2)
            distance += np.int32(code >= LIMIT_3) + np.int32(code >= LIMIT_4)
            distance = distance if magnitude != 0 else np.int32(0)
            distance = distance if magnitude != INFINITY else FINE_ZERO_BIN
            index = FINE_ZERO_BIN - distance if chunk[i] >= SIGN else FINE_ZERO_BIN + distance
            indices[i] = index if magnitude <= INFINITY else FINE_NAN_BIN
        _add_to_counts(indices[: chunk.size], counts)
