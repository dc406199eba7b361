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

QUICK_CHUNK_ELEMENTS = 1024
"""Of each of the three tensors that a layer's terms are made of, and of three shifts: they are in the first-level cache together."""

LEAST_QUICK = 1e-27
"""A sum of a chunk's squares in float32 that is larger than this misses nothing that has become too small: 4096 times 1.2e-38."""

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


# The forms of a difference that are measured by one loop, of three tensors at most: `own`, `other` and `third`. The first three
# have a shift.
OWN_SHIFTED, OWN_OTHER_SHIFTED, THIRD_SHIFTED, OWN, OWN_OTHER, OTHER_THIRD, THIRD = range(7)
NUM_SHIFTED = 3
NUM_FORMS = 7


@njit(fastmath=ANY_ORDER)
def _squares_of_two(own: np.ndarray, other: np.ndarray, totals: np.ndarray) -> None:
    """Sums in float32 of the forms that are made of ``own`` and ``other`` alone."""
    of_own = of_own_other = np.float32(0.0)
    for i in range(own.size):
        of_own += own[i] * own[i]
        difference = own[i] - other[i]
        of_own_other += difference * difference
    totals[OWN], totals[OWN_OTHER] = of_own, of_own_other


@njit(fastmath=ANY_ORDER)
def _squares_of_three(  # machine code
    own: np.ndarray,
    other: np.ndarray,
    third: np.ndarray,
    own_shift: np.ndarray,
    difference_shift: np.ndarray,
    third_shift: np.ndarray,
    totals: np.ndarray,
) -> None:
    """Sums in float32 of all forms."""
    of_own = of_own_shifted = of_own_other = of_own_other_shifted = of_other_third = of_third = of_third_shifted = np.float32(0.0)
    for i in range(own.size):
        of_own += own[i] * own[i]
        shifted = own[i] - own_shift[i]
        of_own_shifted += shifted * shifted
        difference = own[i] - other[i]
        of_own_other += difference * difference
        shifted = difference - difference_shift[i]
        of_own_other_shifted += shifted * shifted
        difference = other[i] - third[i]
        of_other_third += difference * difference
        of_third += third[i] * third[i]
        shifted = third[i] - third_shift[i]
        of_third_shifted += shifted * shifted
    totals[OWN], totals[OWN_SHIFTED] = of_own, of_own_shifted
    totals[OWN_OTHER], totals[OWN_OTHER_SHIFTED] = of_own_other, of_own_other_shifted
    totals[OTHER_THIRD] = of_other_third
    totals[THIRD], totals[THIRD_SHIFTED] = of_third, of_third_shifted


@njit(fastmath=ANY_ORDER)
def _wide_squares(own: np.ndarray, other: np.ndarray, shift: np.ndarray) -> float:
    """The sum of squares of ``own - other - shift``, in float64."""
    total = 0.0
    for i in range(own.size):
        value = np.float64(own[i] - other[i] - shift[i])
        total += value * value
    return total


@njit
def _elements(address: int, start: int, size: int, zeros: np.ndarray) -> np.ndarray:
    """So many of a tensor's float32 elements, or zeros where the address is 0."""
    return zeros[:size] if address == 0 else carray(_pointer(address + start * ELEMENT_BYTES), (size,), np.float32)


@njit
def _form(difference: np.ndarray, own: int, other: int, third: int) -> int:
    """The form that a difference has, if it is made of the three tensors at these addresses, else -1."""
    address, subtracted, shift = difference
    if address == own and subtracted == 0:
        return OWN_SHIFTED if shift else OWN
    if address == own and subtracted == other:
        return OWN_OTHER_SHIFTED if shift else OWN_OTHER
    if third == 0:
        return -1
    if address == other and subtracted == third and shift == 0:
        return OTHER_THIRD
    if address == third and subtracted == 0:
        return THIRD_SHIFTED if shift else THIRD
    return -1


@njit
def _subtracted_from(address: int, differences: np.ndarray, pending: np.ndarray) -> int:
    """The address of what is taken from a tensor in the first pending difference where anything is; 0 for none."""
    for i in range(len(differences)):
        if pending[i] and address and differences[i, 0] == address and differences[i, 1]:
            return differences[i, 1]  # type: ignore[no-any-return]  # numpy's
    return 0


@njit
def _choose(differences: np.ndarray, pending: np.ndarray, members: np.ndarray) -> tuple[int, int, int]:
    """Choose differences to be measured together: the first pending one, and what else is made of the same tensors.

    Args:
        differences: As for :func:`add_differences`.
        pending: Which are not measured yet; those that are chosen are none of them any more.
        members: Gets the number of the difference of each form, -1 for none.

    Returns:
        Addresses of the three tensors, 0 for none.
    """
    own = differences[np.argmax(pending), 0]
    other = _subtracted_from(own, differences, pending)
    third = _subtracted_from(other, differences, pending)
    members[:] = -1
    for i in range(len(differences)):
        form = _form(differences[i], own, other, third)
        if pending[i] and form >= 0 and members[form] < 0:
            members[form] = i
            pending[i] = False
    return own, other, third


@njit
def _add_squares(differences: np.ndarray, members: np.ndarray, tensors: Any, num_elements: int, features: int, totals: np.ndarray) -> None:  # noqa: ANN401  # three addresses; machine code
    """Add the squares of chosen differences to their rows of ``totals``."""
    period = max(1, QUICK_CHUNK_ELEMENTS // features) * features
    zeros = np.zeros(min(period, QUICK_CHUNK_ELEMENTS), np.float32)
    # Repeated up to the length of a chunk: a loop over a token alone would be too short.
    shifts = np.zeros((NUM_SHIFTED, period), np.float32)
    has_shift = False
    for form in range(NUM_SHIFTED):
        if members[form] >= 0:
            has_shift = True
            for start in range(0, period, features):
                shifts[form, start : start + features] = carray(_pointer(differences[members[form], 2]), (features,), np.float32)
    quick = np.zeros(NUM_FORMS, np.float32)
    for first in range(0, num_elements, period):
        end = min(first + period, num_elements)
        for start in range(first, end, QUICK_CHUNK_ELEMENTS):
            place, size = start - first, min(QUICK_CHUNK_ELEMENTS, end - start)
            own, other = _elements(tensors[0], start, size, zeros), _elements(tensors[1], start, size, zeros)
            if tensors[2] == 0 and not has_shift:
                _squares_of_two(own, other, quick)
            else:
                third = _elements(tensors[2], start, size, zeros)
                # Row by row: a part of two rows is not known to lie in order.
                shift0, shift1, shift2 = shifts[0][place:], shifts[1][place:], shifts[2][place:]
                _squares_of_three(own, other, third, shift0, shift1, shift2, quick)
            for form in range(NUM_FORMS):
                i = members[form]
                if i >= 0 and LEAST_QUICK < quick[form] < np.inf:
                    totals[i, SQUARES] += quick[form]
                elif i >= 0:
                    # A square may have left float32, upwards or downwards.
                    own, other = _elements(differences[i, 0], start, size, zeros), _elements(differences[i, 1], start, size, zeros)
                    totals[i, SQUARES] += _wide_squares(own, other, shifts[form][place:] if form < NUM_SHIFTED else zeros)


@njit("void(int64[:, ::1], int64, int64, int64[:, ::1], float64[:, ::1])", cache=True)
def add_differences(differences: np.ndarray, num_elements: int, features: int, targets: np.ndarray, rows: np.ndarray) -> None:
    """Merge the squares of several differences into rows; they are never written down.

    Those that are made of the same tensors, as the terms of a layer are, are measured by one loop: in float32, of which a
    vector holds twice as many and which is not widened, chunk by chunk, and in float64 where that is not as good.

    Args:
        differences: Of each the address of the first of ``num_elements`` float32 elements that lie one after the other; the
            address of as many that are taken from these, 0 for none; the address of ``features`` that are taken from every
            token, 0 for none.
        num_elements: At least 1.
        features: Size of the last dimension.
        targets: Which difference goes into which row: pairs of the number of a row and that of a difference.
        rows: As for :func:`add`.
    """
    totals = np.zeros((len(differences), NUM_FIELDS))
    pending = np.ones(len(differences), np.bool_)
    members = np.empty(NUM_FORMS, np.int64)
    while pending.any():
        tensors = _choose(differences, pending, members)
        _add_squares(differences, members, tensors, num_elements, features, totals)
    for row, i in targets:
        totals[i, ELEMENTS] = num_elements
        _merge(totals[i], rows[row])


@njit("void(int64[:, ::1], int64, float64[:, ::1], float64[::1])", cache=True)
def add_many(tensors: np.ndarray, needs: int, rows: np.ndarray, latest: np.ndarray) -> None:
    """Like :func:`add` for many tensors of the same needs; of each: row, address, number of elements, features."""
    for i in range(len(tensors)):
        _add(tensors[i, 1], tensors[i, 2], tensors[i, 3], needs, rows[tensors[i, 0]], latest)


@njit("void(float64[::1], float64[:, ::1], int64)", cache=True)
def merge(other: np.ndarray, rows: np.ndarray, row: int) -> None:
    """Merge the moments ``other``, shape ``(len(Moments._fields),)``, into a row."""
    _merge(other, rows[row])
