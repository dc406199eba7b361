"""Moments of a float32 tensor on a CPU in one pass, as machine code.

Importing this file needs numba (the extra ``fast``) and compiles it, the first time for some seconds; later the machine
code is taken from numba's cache on disk. Nothing else imports numba.

Where ``statistics/moments.py`` needs ten vectorized operations with a dispatch each, and powers of two to stay within
float32, here every element is widened to float64 as it is read: no square of a float32 leaves that, and no sum of them
rounds away what float32 could show. A tensor is read in *chunks* that stay in the first-level cache while the loops
that are needed pass over them; the compiler turns each loop into vector instructions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, config, njit, types
from numba.extending import intrinsic

if config.DISABLE_JIT:
    raise RuntimeError("NUMBA_DISABLE_JIT is set")

CHUNK_ELEMENTS = 4096
"""16 KiB of float32."""

ELEMENT_BYTES = 4

# The fields of a row of `Moments`, and bits of `Need`, as numbers: numba's cache knows when this file has changed, and does
# not look at others. A test compares them.
ELEMENTS, MEAN, SQUARES, DEVIATIONS, MAGNITUDE, MAXIMUM, MINIMUM, ZEROS, NONFINITE, TOKENS, TOKEN_NORM, TOKEN_RMS = range(12)
NUM_FIELDS = 12
NEED_SQUARES = 1 << 1
NEED_EXTREMES = 1 << 4
NEED_TOKENS = 1 << 7
NEED_SUMS = 1 << 0 | 1 << 2 | 1 << 3
"""Mean, deviations, magnitude."""
NEED_COUNTS = 1 << 5 | 1 << 6
"""Zeros, non-finite."""

LEAST = np.int32(-(2**31))
MAGNITUDE_BITS = np.int32(2**31 - 1)
INFINITY = 0x7F800000
"""The bits of float32's infinity: a magnitude of at least this is not finite."""
SIGN = 1 << 31

ANY_ORDER = {"reassoc", "contract"}
"""Sums may be taken in any order, four or eight at a time. NaN, infinity and signed zero keep their meaning."""


@intrinsic
def _pointer(_context: Any, _address: Any) -> Any:  # noqa: ANN401  # numba's protocol: it is given types, and gives code
    """The pointer that an address is."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401  # as above
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@njit(fastmath=ANY_ORDER)
def _sums(chunk: np.ndarray, center: float) -> tuple[float, float, float]:
    """Sums of the deviations from ``center``, of their squares, and of the magnitudes."""
    residual = 0.0
    deviations = 0.0
    magnitude = 0.0
    for i in range(chunk.size):
        value = np.float64(chunk[i])
        residual += value - center
        deviations += (value - center) * (value - center)
        magnitude += abs(value)
    return residual, deviations, magnitude


@njit(fastmath=ANY_ORDER)
def _squares_in(one: float, own: np.ndarray) -> float:
    total = one - one
    for i in range(own.size):
        value = own[i] * one
        total += value * value
    return total


@njit
def _order(bits: np.ndarray) -> tuple[np.int32, np.int32, np.uint32, np.int32]:
    """Largest and smallest of the floats' bits as integers with a sign, the largest without one, and how many are zero.

    Integers, because a comparison of floats that must mind NaN is not vectorized: positive floats are in the order of their
    bits, and negative ones in the other.
    """
    largest = LEAST
    smallest = MAGNITUDE_BITS
    most_negative = np.uint32(0)
    zeros = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i])
        smallest = min(smallest, bits[i])
        most_negative = max(most_negative, np.uint32(bits[i]))
        zeros = np.int32(zeros + np.int32(np.int32(bits[i] & MAGNITUDE_BITS) == 0))
    return largest, smallest, most_negative, zeros


@njit
def _nonfinite(bits: np.ndarray) -> int:
    """How many are not finite."""
    nonfinite = np.int32(0)
    for i in range(bits.size):
        nonfinite = np.int32(nonfinite + np.int32(np.int32(bits[i] & MAGNITUDE_BITS) >= np.int32(INFINITY)))
    return int(nonfinite)


@njit
def _float_of(bits: int, scratch: np.ndarray) -> float:
    """The float that has these bits. ``scratch``: one uint32."""
    scratch[0] = np.uint32(bits)
    return float(scratch.view(np.float32)[0])


@njit
def _clear(row: np.ndarray) -> None:
    """Make a row the moments of an empty tensor."""
    row[:] = 0.0
    row[MAXIMUM] = -np.inf
    row[MINIMUM] = np.inf


@njit
def _merge(other: np.ndarray, row: np.ndarray) -> None:
    """Merge a row into another, by the formula that ``Moments.merge`` has."""
    total = row[ELEMENTS] + other[ELEMENTS]
    if total == 0.0:
        return
    # Each mean times its share, and not a mean plus a part of their distance: one that is infinite stays so.
    share, own_share = other[ELEMENTS] / total, row[ELEMENTS] / total
    distance = other[MEAN] - row[MEAN]
    row[DEVIATIONS] += other[DEVIATIONS] + (distance * distance * own_share * other[ELEMENTS] if own_share > 0.0 else 0.0)
    row[MEAN] = row[MEAN] * own_share + other[MEAN] * share
    row[ELEMENTS] = total
    row[SQUARES] += other[SQUARES]
    row[MAGNITUDE] += other[MAGNITUDE]
    # A comparison with NaN is false: NaN has to be asked for to be kept.
    if other[MAXIMUM] > row[MAXIMUM] or np.isnan(other[MAXIMUM]):
        row[MAXIMUM] = other[MAXIMUM]
    if other[MINIMUM] < row[MINIMUM] or np.isnan(other[MINIMUM]):
        row[MINIMUM] = other[MINIMUM]
    for field in range(ZEROS, NUM_FIELDS):
        row[field] += other[field]


@njit
def _measure_sums(chunk: np.ndarray, chunk_row: np.ndarray) -> None:
    """Mean, deviations, magnitude, and the squares that follow from them."""
    num_elements = chunk.size
    # From an element of the chunk: it lies at most sqrt(num_elements) standard deviations from the mean, so that of
    # float64's sixteen digits the sums about it lose four at worst, however large the mean is.
    center = np.float64(chunk[0]) if np.isfinite(chunk[0]) else 0.0
    residual, deviations, magnitude = _sums(chunk, center)
    mean = center + residual / num_elements
    chunk_row[MEAN] = mean
    chunk_row[DEVIATIONS] = max(deviations - residual * (residual / num_elements), 0.0)
    chunk_row[MAGNITUDE] = magnitude
    # Of an infinite element the deviations are not a number, and the squares are infinite.
    squares = chunk_row[DEVIATIONS] + num_elements * mean * mean
    chunk_row[SQUARES] = squares if np.isfinite(squares) else _squares_in(1.0, chunk)


@njit
def _measure_chunk(address: int, num_elements: int, needs: int, chunk_row: np.ndarray, scratch: np.ndarray) -> None:
    """Moments of the elements at an address."""
    chunk = carray(_pointer(address), (num_elements,), np.float32)
    bits = carray(_pointer(address), (num_elements,), np.int32)
    _clear(chunk_row)
    chunk_row[ELEMENTS] = num_elements
    if needs & NEED_SUMS:
        _measure_sums(chunk, chunk_row)
    elif needs & NEED_SQUARES:
        chunk_row[SQUARES] = _squares_in(1.0, chunk)
    if needs & (NEED_EXTREMES | NEED_COUNTS):
        largest, smallest, most_negative, zeros = _order(bits)
        has_negative = int(most_negative) >= SIGN
        chunk_row[ZEROS] = zeros
        if int(largest) >= INFINITY or int(most_negative) >= SIGN + INFINITY:
            chunk_row[NONFINITE] = _nonfinite(bits)
        has_nan = int(largest) > INFINITY or int(most_negative) > SIGN + INFINITY
        # Of negative floats only, the largest has the smallest bits.
        chunk_row[MAXIMUM] = np.nan if has_nan else _float_of(largest if largest >= 0 else smallest, scratch)
        chunk_row[MINIMUM] = np.nan if has_nan else _float_of(most_negative if has_negative else smallest, scratch)


@njit
def _measure_tokens(address: int, num_elements: int, features: int, row: np.ndarray) -> None:
    """Sums over the tokens of their norm and root mean square."""
    num_tokens = num_elements // features
    total = 0.0
    for token in range(num_tokens):
        chunk = carray(_pointer(address + token * features * ELEMENT_BYTES), (features,), np.float32)
        total += np.sqrt(_squares_in(1.0, chunk))
    row[TOKENS] = num_tokens
    row[TOKEN_NORM] = total
    row[TOKEN_RMS] = total / np.sqrt(features)


@njit
def _add(address: int, num_elements: int, features: int, needs: int, row: np.ndarray, latest: np.ndarray) -> None:
    chunk_row, scratch = np.empty(NUM_FIELDS), np.empty(1, np.uint32)
    _clear(latest)
    for start in range(0, num_elements, CHUNK_ELEMENTS):
        size = min(CHUNK_ELEMENTS, num_elements - start)
        _measure_chunk(address + start * ELEMENT_BYTES, size, needs, chunk_row, scratch)
        _merge(chunk_row, latest)
    if needs & NEED_TOKENS:
        _measure_tokens(address, num_elements, features, latest)
    _merge(latest, row)


@njit("void(int64, int64, int64, int64, int64, int64)", cache=True)
def add(address: int, num_elements: int, features: int, needs: int, row: int, latest: int) -> None:
    """Merge a tensor into a row. All arguments are numbers: taking arrays apart costs as much as reading a small tensor.

    Args:
        address: Of the first of ``num_elements`` float32 elements that lie one after the other.
        num_elements: At least 1.
        features: Size of the last dimension; only read for ``Need.TOKENS``.
        needs: Which moments to take, bits of :class:`~lightning_module_monitor.statistics.moments.Need`.
        row: Address of the row: ``len(Moments._fields)`` float64.
        latest: Address of as many that get the moments of this tensor alone.
    """
    own, alone = carray(_pointer(row), (NUM_FIELDS,), np.float64), carray(_pointer(latest), (NUM_FIELDS,), np.float64)
    _add(address, num_elements, features, needs, own, alone)


@njit("void(int64[:, ::1], int64, float64[:, ::1], float64[::1])", cache=True)
def add_many(tensors: np.ndarray, needs: int, rows: np.ndarray, latest: np.ndarray) -> None:
    """Like :func:`add` for many tensors of the same needs; of each: row, address, number of elements, features."""
    for i in range(len(tensors)):
        _add(tensors[i, 1], tensors[i, 2], tensors[i, 3], needs, rows[tensors[i, 0]], latest)


@njit("void(float64[::1], float64[:, ::1], int64)", cache=True)
def merge(other: np.ndarray, rows: np.ndarray, row: int) -> None:
    """Merge the moments ``other``, shape ``(len(Moments._fields),)``, into a row."""
    _merge(other, rows[row])
