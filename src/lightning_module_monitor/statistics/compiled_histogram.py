"""Counts of a tensor by sign and power of two in one pass, as machine code; see ``statistics/compiled.py``.

The upper nine bits of a float32, sign and exponent, say its bin without a comparison. Only zeros, subnormals, infinities and NaN
share theirs, and are told apart in a second pass where there are any.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from lightning_module_monitor.statistics.compiled import CHUNK_ELEMENTS, _chunk, _room

MANTISSA_BITS = np.uint32(23)
NUM_CODES = 512
"""Values of sign and exponent together; the negative ones are the upper half."""

LANES = 4
"""Neighbors are often in one bin. Counted in lanes of their own, one does not wait for the other's count."""

BLOCK_ELEMENTS = 1 << 26
"""What is counted in 32 bits before it is added to a row."""

# Bits of the values that share a code with others.
ZERO, MINUS_ZERO, INFINITY, MINUS_INFINITY = np.uint32(0), np.uint32(1 << 31), np.uint32(0x7F800000), np.uint32(0xFF800000)


@njit
def _equal(bits: np.ndarray, value: np.uint32) -> int:
    """How many elements are of some bits."""
    count = np.uint32(0)
    for i in range(bits.size):
        count = np.uint32(count + np.uint32(bits[i] == value))
    return int(count)


@njit
def _count_codes(bits: np.ndarray, lanes: np.ndarray) -> None:
    """Add how often each code occurs, spread over the lanes."""
    even = bits.size - bits.size % LANES
    for i in range(0, even, LANES):
        for lane in range(LANES):
            lanes[lane, bits[i + lane] >> MANTISSA_BITS] += np.uint32(1)
    for i in range(even, bits.size):
        lanes[0, bits[i] >> MANTISSA_BITS] += np.uint32(1)


@njit("void(int64, int64, int64, int64[::1], uint32[:, ::1], int64[:, ::1], int64, int64[::1])", cache=True)
def count(
    address: int,
    element_format: int,
    num_elements: int,
    place_of_code: np.ndarray,
    lanes: np.ndarray,
    rows: np.ndarray,
    row: int,
    latest: np.ndarray,
) -> None:
    """Add the counts of a tensor to a row.

    Args:
        address: Of the first of ``num_elements`` elements that lie one after the other.
        element_format: As for ``compiled.add``.
        num_elements: At least 1.
        place_of_code: Place in a row of counts by code, shape ``(NUM_CODES,)``; of codes that several places share, that of
            subnormals and NaN.
        lanes: Scratch, shape ``(LANES, NUM_CODES)``.
        rows: Rows of counts, shape ``(rows, counts)``.
        row: Number of the row.
        latest: Gets the counts of this tensor alone, shape ``(counts,)``.
    """
    latest[:] = 0
    # Of the places, in the order of the values, NaN has the last; those of the others are symmetric about zero's.
    zero, infinity, minus_infinity = (latest.size - 1) // 2, latest.size - 2, 0
    wide = _room(num_elements, element_format)
    for start in range(0, num_elements, BLOCK_ELEMENTS):
        end = min(start + BLOCK_ELEMENTS, num_elements)
        lanes[:] = 0
        for first in range(start, end, CHUNK_ELEMENTS):
            chunk = _chunk(address, first, min(CHUNK_ELEMENTS, end - first), element_format, wide)
            _count_codes(chunk.view(np.uint32), lanes)
        for code in range(NUM_CODES):
            of_code = np.int64(0)
            for lane in range(LANES):
                of_code += np.int64(lanes[lane, code])
            latest[place_of_code[code]] += of_code
        for value, place in ((ZERO, zero), (MINUS_ZERO, zero), (INFINITY, infinity), (MINUS_INFINITY, minus_infinity)):
            code = value >> MANTISSA_BITS
            if lanes[0, code] + lanes[1, code] + lanes[2, code] + lanes[3, code] > 0:
                for first in range(start, end, CHUNK_ELEMENTS):
                    chunk = _chunk(address, first, min(CHUNK_ELEMENTS, end - first), element_format, wide)
                    equal = _equal(chunk.view(np.uint32), value)
                    latest[place_of_code[code]] -= equal
                    latest[place] += equal
    for place in range(latest.size):
        rows[row, place] += latest[place]
