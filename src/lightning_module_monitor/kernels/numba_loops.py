"""Sums over tensors in host memory by plain compiled loops over numpy arrays; needs numba (the extra ``fast``).

Elements are widened to float64 as they are read: no square of a float32 leaves its range. A tensor is read in chunks that stay in
the first-level cache, and summed in pieces. Sums of a piece are about a center, so that a large mean costs no digits.

Arrays are never made or viewed as another dtype here: each of these operations takes numba longer to compile than a loop.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, float64, int32, int64, njit
from numba.types import Array

CHUNK = 4096
"""Elements of a chunk: 16 KiB of float32."""

PIECE, SAMPLE = 1 << 16, 1 << 10
"""Elements of a piece, a multiple of a chunk; and how many of the first of them the center is the mean of. The squares about it are at
most about as many times those about the mean as the piece is longer: less than two of float64's digits."""

# The fields of `Moments` and the bits of `Need`, as numbers: the cache of numba looks at this file alone. A test compares them.
ELEMENTS, MEAN, DEVIATIONS, THIRD, FOURTH, SQUARES, MAGNITUDE = range(7)
MAXIMUM, MINIMUM, ZEROS, NONFINITE, TOKENS, TOKEN_NORM, TOKEN_RMS = range(7, 14)
CENTER = NUM_FIELDS = 14
NEED_SUMS, NEED_SQUARES = 1 << 0 | 1 << 2 | 1 << 3 | 1 << 8, 1 << 1
NEED_ZEROS, NEED_COUNTS, NEED_ORDER = 1 << 5, 1 << 5 | 1 << 6, 1 << 4 | 1 << 5 | 1 << 6
NEED_TOKENS, NEED_POWERS = 1 << 7, 1 << 8

MAGNITUDE_BITS, SIGN = np.int32(0x7FFFFFFF), np.uint32(1 << 31)
INFINITY, MINUS_INFINITY = np.int32(0x7F800000), np.uint32(0xFF800000)
"""Bits of float32's infinities. Those of a NaN of the same sign are larger."""

FLOATS, BITS = Array(float32, 1, "C", readonly=True), Array(int32, 1, "C", readonly=True)
"""Elements of a tensor. Arrays that can be written to are taken for these, so that what sums over a chunk is compiled once."""

ANY_ORDER = {"reassoc", "contract", "nsz", "arcp"}
"""Sums may be taken in any order, several at a time. NaN and infinity keep their meaning."""


# Only what other files call is cached: its code has that of the functions it calls.
@njit(fastmath=ANY_ORDER)
def _add_sums(chunk: Any, needs: int, row: Any) -> None:  # noqa: ANN401  # numba's arrays and tuples are not annotated, here and below
    if row[ELEMENTS] == 0.0:
        size, total = min(SAMPLE, chunk.size), 0.0
        for i in range(size):
            total += np.float64(chunk[i])
        row[CENTER] = total / size if np.isfinite(total) else 0.0
    center = row[CENTER]
    residual = deviations = magnitude = third = fourth = 0.0
    for i in range(chunk.size):
        x = np.float64(chunk[i])
        residual += x - center
        deviations += (x - center) * (x - center)
        magnitude += abs(x)
    if needs & NEED_POWERS:
        for i in range(chunk.size):
            d = np.float64(chunk[i]) - center
            third += d * d * d
            fourth += d * d * d * d
    row[MEAN] += residual
    row[DEVIATIONS] += deviations
    row[MAGNITUDE] += magnitude
    row[THIRD] += third
    row[FOURTH] += fourth


@njit(fastmath=ANY_ORDER)
def _squares(chunk: Any) -> float:  # noqa: ANN401
    total = 0.0
    for i in range(chunk.size):
        total += np.float64(chunk[i]) * np.float64(chunk[i])
    return total


@njit
def _add_order(bits: Any, needs: int, row: Any) -> None:  # noqa: ANN401
    """The largest and the smallest element, as bits with the sign of the element, and the numbers of zeros and non-finite elements.

    Comparisons of integers are vector instructions, and those of floats that must mind NaN are not. Positive floats have the order
    of their bits, negative ones the opposite order.
    """
    largest, smallest, unsigned = np.int32(-(2**31)), MAGNITUDE_BITS, np.uint32(0)
    for i in range(bits.size):
        largest = bits[i] if bits[i] > largest else largest
        smallest = bits[i] if bits[i] < smallest else smallest
        unsigned = np.uint32(bits[i]) if np.uint32(bits[i]) > unsigned else unsigned
    # Of negative elements alone the largest has the smallest bits.
    maximum = np.float64(largest if largest >= 0 else -(smallest & MAGNITUDE_BITS))
    minimum = np.float64(smallest) if unsigned < SIGN else np.float64(SIGN) - np.float64(unsigned)
    row[MAXIMUM] = maximum if maximum > row[MAXIMUM] else row[MAXIMUM]
    row[MINIMUM] = minimum if minimum < row[MINIMUM] else row[MINIMUM]
    if needs & NEED_COUNTS and (needs & NEED_ZEROS or largest >= INFINITY or unsigned >= MINUS_INFINITY):
        zeros = nonfinite = np.int32(0)
        for i in range(bits.size):
            magnitude = np.int32(bits[i] & MAGNITUDE_BITS)
            zeros = np.int32(zeros + np.int32(magnitude == np.int32(0)))
            nonfinite = np.int32(nonfinite + np.int32(magnitude >= INFINITY))
        row[ZEROS] += zeros
        row[NONFINITE] += nonfinite


@njit
def _add_tokens(chunk: Any, start: int, features: int, squares: float, row: Any) -> float:  # noqa: ANN401
    """Add the norms of the tokens that end in a chunk; returns the squares of the token that the next chunk goes on with."""
    place, missing = 0, features - start % features
    while place < chunk.size:
        end = min(place + missing, chunk.size)
        squares += _squares(chunk[place:end])
        missing -= end - place
        place = end
        if missing == 0:
            row[TOKENS] += 1.0
            row[TOKEN_NORM] += np.sqrt(squares)
            row[TOKEN_RMS] += np.sqrt(squares / features)
            squares, missing = 0.0, features
    return squares


@njit(float64(FLOATS, BITS, int64, int64, int64, float64, float64[::1]), cache=True)
def _add_chunk(chunk: Any, bits: Any, start: int, features: int, needs: int, squares: float, row: Any) -> float:  # noqa: ANN401, PLR0917  # arguments that numba passes on quickly
    if row[ELEMENTS] == 0.0:
        row[MAXIMUM], row[MINIMUM] = -np.float64(INFINITY), np.float64(INFINITY)
    if needs & NEED_SUMS:
        _add_sums(chunk, needs, row)
    elif needs & NEED_SQUARES:
        row[DEVIATIONS] += _squares(chunk)
    if needs & NEED_ORDER:
        _add_order(bits, needs, row)
    if needs & NEED_TOKENS:
        squares = _add_tokens(chunk, start, features, squares, row)
    row[ELEMENTS] += chunk.size
    return squares


@njit(cache=True)
def add(elements: Any, bits: Any, features: int, needs: int, rows: Any, first: int) -> None:  # noqa: ANN401, PLR0917
    """Sum over a tensor.

    Args:
        elements: Float32, in order.
        bits: The same memory as int32.
        features: Size of the last dimension; only read for ``Need.TOKENS``.
        needs: Bits of ``Need``.
        rows: Float64, shape ``(rows, NUM_FIELDS + 1)``. Those of the pieces, zeros, become the fields of moments as sums about a center,
            and the center; ``maximum`` and ``minimum`` become bits, with the sign of the element.
        first: The row of the first piece.
    """
    squares = 0.0
    for start in range(0, elements.size, CHUNK):
        chunk, chunk_bits = elements[start : start + CHUNK], bits[start : start + CHUNK]
        squares = _add_chunk(chunk, chunk_bits, start, features, needs, squares, rows[first + start // PIECE])


@njit
def _widen(halves: Any, bits: Any) -> None:  # noqa: ANN401
    """A bfloat16 is the upper half of a float32."""
    for i in range(halves.size):
        bits[i] = np.int32(np.uint32(halves[i]) << np.uint32(16))


@njit
def _subtract(difference: Any, other: Any) -> None:  # noqa: ANN401
    for i in range(difference.size):
        difference[i] -= other[i]


@njit
def _subtract_all(difference: Any, elements: Any, other: Any, shift: Any, start: int) -> None:  # noqa: ANN401
    """Write the part of ``elements - other - shift`` that begins at element ``start``."""
    source = elements[start : start + CHUNK]
    for i in range(source.size):
        difference[i] = source[i]
    if other.size:
        _subtract(difference, other[start : start + CHUNK])
    place, offset = 0, start % max(shift.size, 1)
    while shift.size and place < difference.size:
        end = min(place + shift.size - offset, difference.size)
        _subtract(difference[place:end], shift[offset:])
        place, offset = end, 0


@njit(cache=True)
def add_made(arrays: Any, buffer: Any, buffer_bits: Any, features: int, needs: int, rows: Any, first: int) -> None:  # noqa: ANN401, PLR0917
    """:func:`add` of what is made a chunk at a time.

    Args:
        arrays: The bits of bfloat16, uint16; or ``elements``, ``other`` and ``shift``, float32, of which ``elements - other - shift`` is
            made. The latter is repeated. Empty ones are left out.
        buffer: Float32, shape ``(CHUNK,)``.
        buffer_bits: The same memory as int32.
        features: As for :func:`add`, as are the others.
        needs: Bits of ``Need``.
        rows: Of the pieces.
        first: The row of the first piece.
    """
    halves, elements, other, shift = arrays
    total, squares = halves.size + elements.size, 0.0
    for start in range(0, total, CHUNK):
        size = min(CHUNK, total - start)
        chunk, bits = buffer[:size], buffer_bits[:size]
        if halves.size:
            _widen(halves[start : start + CHUNK], bits)
        else:
            _subtract_all(chunk, elements, other, shift, start)
        squares = _add_chunk(chunk, bits, start, features, needs, squares, rows[first + start // PIECE])


@njit(cache=True)
def count(bits: Any, place_of_code: Any, counts: Any) -> None:  # noqa: ANN401
    """Count elements in the bins of a histogram.

    Args:
        bits: Of float32, uint32.
        place_of_code: Place in a row of counts by whether the mantissa is not zero, sign and exponent, shape ``(1024,)``.
        counts: A row of counts, int64.
    """
    for i in range(bits.size):
        has_mantissa = np.uint32(512) if bits[i] & np.uint32(0x7FFFFF) else np.uint32(0)
        counts[place_of_code[has_mantissa | (bits[i] >> np.uint32(23))]] += 1


@njit(cache=True)
def largest_magnitude(bits: Any, mask: Any) -> int:  # noqa: ANN401
    """The largest magnitude of elements, as bits; ``mask`` has all bits but the sign. Bits of infinity and NaN are the largest."""
    largest = mask ^ mask
    for i in range(bits.size):
        largest = max(largest, bits[i] & mask)
    return int(largest)
