"""Moments of a tensor of float32, bfloat16 or float16 on a CPU in one pass, as machine code.

Importing this file needs numba (the extra ``fast``) and compiles it, the first time for some seconds; later the machine
code is taken from numba's cache on disk. Nothing else imports numba.

Where ``statistics/moments.py`` needs ten vectorized operations with a dispatch each, and powers of two to stay within
float32, here every element is widened to float64 as it is read: no square of a float32 leaves that, and no sum of them
rounds away what float32 could show. A tensor is read in *chunks* that stay in the first-level cache. What is needed of a
chunk is taken by one loop, whose vectors are written here in LLVM's own terms: it asks memory for what comes next, which the
compiler does not by itself, and would not make vectors of a loop that does. Chunks of bfloat16 are read where they lie;
those of float16 are first widened to float32, exactly, into a buffer that stays in the cache too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, config, njit, types
from numba.extending import intrinsic

from lightning_module_monitor.statistics.compiled_vectors import (
    ANY_ORDER,
    ask_for,
    called,
    float_of,
    in_wide_vectors,
    joined,
    over_vectors,
    pointer,
    spread,
)

if config.DISABLE_JIT:
    raise RuntimeError("NUMBA_DISABLE_JIT is set")

CHUNK_ELEMENTS = 4096
"""16 KiB of float32, which stay in the first-level cache: of what is read more than once."""
LONG_CHUNK_ELEMENTS = 16384
"""Of what is read once. What is done for a chunk beside reading it takes a tenth of the time of a short one."""

ELEMENT_BYTES = 4
"""Of float32."""
HALF_BYTES = 2

# The fields of a row of `Moments`, and bits of `Need`, as numbers: numba's cache knows when this file has changed, and does
# not look at others. A test compares them, and the formats with those of `running.ELEMENT_FORMATS`.
ELEMENTS, MEAN, SQUARES, DEVIATIONS, MAGNITUDE, MAXIMUM, MINIMUM, ZEROS, NONFINITE, TOKENS, TOKEN_NORM, TOKEN_RMS = range(12)
NUM_FIELDS = 12
FLOAT32, BFLOAT16, FLOAT16 = range(3)
"""Formats that elements may have in memory."""
NEED_SQUARES = 1 << 1
NEED_EXTREMES = 1 << 4
NEED_TOKENS = 1 << 7
NEED_SUMS = 1 << 0 | 1 << 2 | 1 << 3
"""Mean, deviations, magnitude."""
NEED_ZEROS = 1 << 5
NEED_ORDER = NEED_EXTREMES | NEED_ZEROS | 1 << 6
"""Extremes, zeros, non-finite."""

LEAST = np.int32(-(2**31))
MAGNITUDE_BITS = np.int32(2**31 - 1)
INFINITY = 0x7F800000
"""The bits of float32's infinity: a magnitude of at least this is not finite."""
SIGN = 1 << 31

FAR = 32
"""Sums of squares about a center that are so many times those about the mean have lost digits."""

FLOAT16_MAGNITUDE = np.uint32(0x7FFF)
FLOAT16_EXPONENT = np.uint32(0x7C00)
FLOAT16_SHIFT = np.uint32(23 - 10)
"""From its mantissa to float32's."""
ONE_EXPONENT = np.uint32(1 << 23)
FLOAT16_LIFT = np.uint32((127 - 15) << 23)
LEAST_NORMAL_FLOAT16 = np.float32(2.0**-14)


@njit
def _widen_bfloat16(halves: np.ndarray, wide: np.ndarray) -> None:
    """A bfloat16 is the upper half of a float32."""
    in_wide_vectors()
    for i in range(halves.size):
        wide[i] = float_of(np.uint32(np.uint32(halves[i]) << np.uint32(16)))


@njit
def _widen_float16(halves: np.ndarray, wide: np.ndarray) -> None:
    """By integers: the instruction for it is not one of every processor's, and without it numba would end the process."""
    in_wide_vectors()
    for i in range(halves.size):
        half = np.uint32(halves[i])
        exponent = np.uint32(half & FLOAT16_EXPONENT)
        # Exponents are counted from 15 and 127, that of infinity and NaN is the largest of either format.
        lifted = FLOAT16_LIFT + (FLOAT16_LIFT if exponent == FLOAT16_EXPONENT else np.uint32(0))
        magnitude = np.uint32(np.uint32(np.uint32(half & FLOAT16_MAGNITUDE) << FLOAT16_SHIFT) + lifted)
        # Zero and subnormal numbers lack the leading one that a normal number of the next exponent has: it is given, and taken.
        is_small = exponent == np.uint32(0)
        value = float_of(np.uint32(magnitude + (ONE_EXPONENT if is_small else np.uint32(0))))
        value = np.float32(value - (LEAST_NORMAL_FLOAT16 if is_small else np.float32(0.0)))
        wide[i] = -value if half > FLOAT16_MAGNITUDE else value


@njit
def _chunk(address: int, start: int, size: int, element_format: int, wide: np.ndarray) -> np.ndarray:
    """Elements of a tensor in float32: where they lie, or in ``wide``, of at least ``size``, until the next chunk is."""
    if element_format == FLOAT32:
        return carray(pointer(address + start * ELEMENT_BYTES), (size,), np.float32)  # type: ignore[no-any-return]  # numba's
    halves = carray(pointer(address + start * HALF_BYTES), (size,), np.uint16)
    chunk = wide[:size]
    if element_format == BFLOAT16:
        _widen_bfloat16(halves, chunk)
    else:
        _widen_float16(halves, chunk)
    return chunk


@njit
def _room(num_elements: int, element_format: int) -> np.ndarray:
    """A buffer for the chunks of a tensor, if it is not float32."""
    return np.empty(0 if element_format == FLOAT32 else min(num_elements, LONG_CHUNK_ELEMENTS), np.float32)


@njit(fastmath=ANY_ORDER)
def _squares_in(one: float, own: np.ndarray) -> float:
    in_wide_vectors()
    total = one - one
    for i in range(own.size):
        value = own[i] * one
        total += value * value
    return total


LANES = 16
"""Elements that a loop of vectors takes at a time: a line of the cache."""
HALF_LANES = 32
"""As many bfloat16."""
NUM_SUMS = 3
REDUCTIONS = ("fadd", "fadd", "fadd", "smax", "smin", "umax", "add")
"""How LLVM calls what makes one total of several. Totals are the sums of elements' deviations from a center, of the squares of these,
and of magnitudes; of the elements' bits the largest and the smallest as integers with a sign, the largest without one, and how many
of them are of a zero."""
_NOTHING = (0.0, 0.0, 0.0, LEAST, MAGNITUDE_BITS, np.int32(0), np.int32(0))
"""The totals of no elements."""
TOTALS = types.Tuple((*[types.float64] * NUM_SUMS, *[types.int32] * 4))


def _summed(builder: Any, totals: list[Any], values: Any, center: Any | None) -> list[Any]:  # noqa: ANN401  # llvmlite is not annotated, here and below
    """Sums with one vector of float64 more."""
    deviations = values if center is None else builder.fsub(values, center)
    squares = builder.fmul(deviations, deviations, flags=["contract"])
    magnitudes = called(builder, f"llvm.fabs.v{values.type.count}f64", values.type, values)
    return [builder.fadd(total, one, flags=["contract"]) for total, one in zip(totals, (deviations, squares, magnitudes), strict=True)]


def _ordered(builder: Any, totals: list[Any], bits: Any) -> list[Any]:  # noqa: ANN401  # as above
    """What bits tell, with one vector of integers more: positive floats are in the order of their bits, and negative ones in the other.

    Integers, because a comparison of floats that must mind NaN is no vector instruction.
    """
    names = [f"llvm.{name}.v{bits.type.count}i{bits.type.element.width}" for name in REDUCTIONS[NUM_SUMS:-1]]
    return [called(builder, name, bits.type, total, bits) for name, total in zip(names, totals, strict=True)]


def _with_zeros(builder: Any, count: Any, bits: Any) -> Any:  # noqa: ANN401  # as above
    """How many elements are zero, with one vector of bits more."""
    magnitudes = builder.and_(bits, ir.Constant(bits.type, (1 << bits.type.element.width - 1) - 1))
    is_zero = builder.icmp_signed("==", magnitudes, ir.Constant(bits.type, 0))
    return builder.add(count, builder.zext(is_zero, bits.type))


def _parts(builder: Any, bits: Any) -> list[Any]:  # noqa: ANN401  # as above
    """The elements of a vector as float64, so many lanes at a time that a processor has registers for their totals.

    A bfloat16 is the upper half of a float32.
    """
    lanes, index = min(bits.type.count, LANES), ir.IntType(32)
    parts = []
    for start in range(0, bits.type.count, lanes):
        places = ir.Constant(ir.VectorType(index, lanes), [index(start + lane) for lane in range(lanes)])
        part = builder.shuffle_vector(bits, ir.Constant(bits.type, ir.Undefined), places)
        wide = builder.bitcast(_as_float32_bits(builder, part), ir.VectorType(ir.FloatType(), lanes))
        parts.append(builder.fpext(wide, ir.VectorType(ir.DoubleType(), lanes)))
    return parts


def _as_float32_bits(builder: Any, bits: Any) -> Any:  # noqa: ANN401  # as above
    """Bits of float32 or bfloat16 as those of float32."""
    wide = ir.VectorType(ir.IntType(32), bits.type.count)
    return bits if bits.type == wide else builder.shl(builder.zext(bits, wide), ir.Constant(wide, 16))


def _vector_loop(lanes: int, needs: int, element_format: int, *, is_centered: bool) -> Any:  # noqa: ANN401  # numba's intrinsics are not annotated
    """What adds elements to totals, from an address on so many vectors of so many lanes; about zero where it is not centered."""
    element_bytes = ELEMENT_BYTES if element_format == FLOAT32 else HALF_BYTES
    bits_of_element = ir.IntType(8 * element_bytes)

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401  # numba's protocol, as above
        start, num_vectors, center, totals = arguments
        before = [builder.extract_value(totals, place) for place in range(len(REDUCTIONS))]
        of_sums = ir.VectorType(ir.DoubleType(), min(lanes, LANES))
        of_order = ir.VectorType(bits_of_element, lanes)
        nothing = [ir.Constant(of_sums, value) for value in _NOTHING[:NUM_SUMS]]
        # Of a bfloat16 the upper half is what there is.
        nothing += [ir.Constant(of_order, int(value) >> 32 - bits_of_element.width) for value in _NOTHING[NUM_SUMS:]]
        centers = spread(builder, center, of_sums.count) if is_centered else None

        def step(place: Any, sofar: list[Any]) -> list[Any]:  # noqa: ANN401  # as above
            address = builder.add(start, builder.mul(place, start.type(lanes * element_bytes)))
            ask_for(builder, address)
            bits = builder.load(builder.inttoptr(address, of_order.as_pointer()), align=element_bytes)
            sums, order, zeros = sofar[:NUM_SUMS], sofar[NUM_SUMS:-1], sofar[-1]
            if needs & NEED_SUMS:
                for values in _parts(builder, bits):
                    sums = _summed(builder, sums, values, centers)
            if needs & NEED_ORDER:
                order = _ordered(builder, order, bits)
            return [*sums, *order, _with_zeros(builder, zeros, bits) if needs & NEED_ZEROS else zeros]

        found = over_vectors(builder, num_vectors, nothing, step)
        counted = builder.zext(found[-1], ir.VectorType(ir.IntType(32), lanes)) if element_format != FLOAT32 else found[-1]
        found = [*found[:NUM_SUMS], *(_as_float32_bits(builder, one) for one in found[NUM_SUMS:-1]), counted]
        for place, vector in enumerate(found):
            totals = builder.insert_value(totals, joined(builder, REDUCTIONS[place], before[place], vector), place)
        return totals

    @intrinsic
    def read(_context: Any, _address: Any, _num_vectors: Any, _center: Any, _totals: Any) -> Any:  # noqa: ANN401  # as above
        return TOTALS(types.int64, types.int64, types.float64, TOTALS), generate

    return read


def _reader(needs: int, element_format: int, *, is_centered: bool = True) -> Any:  # noqa: ANN401  # numba's functions are not annotated
    """What reads elements at an address: the totals that are needed, and of others what ``_NOTHING`` has."""
    lanes = LANES if element_format == FLOAT32 else HALF_LANES
    vectors, rest = (_vector_loop(one, needs, element_format, is_centered=is_centered) for one in (lanes, 1))
    element_bytes = ELEMENT_BYTES if element_format == FLOAT32 else HALF_BYTES

    @njit
    def read(address: int, size: int, center: float) -> Any:  # noqa: ANN401  # a tuple of numbers
        in_wide_vectors()
        in_vectors = size - size % lanes
        return rest(address + in_vectors * element_bytes, size % lanes, center, vectors(address, in_vectors // lanes, center, _NOTHING))

    return read


ALL_NEEDS = (NEED_SUMS, NEED_ORDER, NEED_SUMS | NEED_ORDER, NEED_SUMS | NEED_ORDER & ~NEED_ZEROS)
"""What there is a loop for. Most who want extremes want sums too, and few want to know how many zeros there are."""

_sums, _order, _all, _both = (_reader(needs, FLOAT32) for needs in ALL_NEEDS)
_sums_of_bfloat16, _order_of_bfloat16, _all_of_bfloat16, _both_of_bfloat16 = (
    _reader(needs, BFLOAT16, is_centered=False) for needs in ALL_NEEDS
)
_sums_of_bfloat16_about = _reader(NEED_SUMS, BFLOAT16)


@njit
def _totals(address: int, size: int, element_format: int, needs: int, center: float) -> Any:  # noqa: ANN401  # as above
    if needs & NEED_SUMS and needs & NEED_ZEROS:
        return _all(address, size, center) if element_format == FLOAT32 else _all_of_bfloat16(address, size, 0.0)
    if needs & NEED_SUMS and needs & NEED_ORDER:
        return _both(address, size, center) if element_format == FLOAT32 else _both_of_bfloat16(address, size, 0.0)
    if needs & NEED_SUMS:
        return _sums(address, size, center) if element_format == FLOAT32 else _sums_of_bfloat16(address, size, 0.0)
    return _order(address, size, 0.0) if element_format == FLOAT32 else _order_of_bfloat16(address, size, 0.0)


@njit
def _sums_about(address: int, size: int, element_format: int, center: float) -> Any:  # noqa: ANN401  # as above
    return _sums(address, size, center) if element_format == FLOAT32 else _sums_of_bfloat16_about(address, size, center)


@njit
def _nonfinite(bits: np.ndarray) -> int:
    """How many are not finite."""
    nonfinite = np.int32(0)
    for i in range(bits.size):
        nonfinite = np.int32(nonfinite + np.int32(np.int32(bits[i] & MAGNITUDE_BITS) >= np.int32(INFINITY)))
    return int(nonfinite)


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
def _center(address: int, size: int, element_format: int) -> float:
    """What sums of a chunk are taken about: of float32 the element in the middle of three.

    About zero they would lose digits to a large mean. One element alone may be the one that is far away from all others.
    The squares of bfloat16 have so few digits that float64 loses none of them.
    """
    if element_format == BFLOAT16:
        return 0.0
    elements = carray(pointer(address), (size,), np.float32)
    first, second, third = elements[0], elements[size // 2], elements[size - 1]
    middle = max(min(first, second), min(max(first, second), third))
    return np.float64(middle) if np.isfinite(middle) else 0.0


@njit
def _tell_order(largest: int, smallest: int, most_negative: int, chunk_row: np.ndarray) -> bool:
    """Extremes, from what the bits of a chunk tell, and whether any element is not finite."""
    has_nan = largest > INFINITY or most_negative > SIGN + INFINITY
    # Of negative floats only, the largest has the smallest bits.
    chunk_row[MAXIMUM] = np.nan if has_nan else float_of(np.uint32(largest if largest >= 0 else smallest))
    chunk_row[MINIMUM] = np.nan if has_nan else float_of(np.uint32(most_negative if most_negative >= SIGN else smallest))
    return largest >= INFINITY or most_negative >= SIGN + INFINITY


@njit
def _tell_sums(residual: float, deviations: float, magnitude: float, center: float, chunk_row: np.ndarray) -> None:
    """Mean, deviations, magnitude, and the squares that follow from them."""
    num_elements = chunk_row[ELEMENTS]
    mean = center + residual / num_elements
    chunk_row[MEAN] = mean
    chunk_row[DEVIATIONS] = max(deviations - residual * (residual / num_elements), 0.0)
    chunk_row[MAGNITUDE] = magnitude
    chunk_row[SQUARES] = chunk_row[DEVIATIONS] + num_elements * mean * mean


@njit
def _measure_chunk(address: int, size: int, element_format: int, needs: int, wide: np.ndarray, chunk_row: np.ndarray) -> None:
    """Moments of the elements of a chunk, of float32 or bfloat16."""
    _clear(chunk_row)
    chunk_row[ELEMENTS] = size
    if needs & (NEED_SUMS | NEED_ORDER):
        center = _center(address, size, element_format)
        residual, deviations, magnitude, largest, smallest, unsigned, zeros = _totals(address, size, element_format, needs, center)
        # Two of the three that it is sought among may be outliers: then most of the squares is their distance from the mean.
        if deviations - residual * (residual / size) < deviations / FAR:
            center += residual / size
            about = _sums_about(address, size, element_format, center)
            residual, deviations = about[0], about[1]
        if needs & NEED_SUMS:
            _tell_sums(residual, deviations, magnitude, center, chunk_row)
        if needs & NEED_ORDER:
            chunk_row[ZEROS] = zeros
            if _tell_order(int(largest), int(smallest), int(np.uint32(unsigned)), chunk_row):
                chunk_row[NONFINITE] = _nonfinite(_chunk(address, 0, size, element_format, wide).view(np.int32))
    # Of an infinite element the deviations are not a number, and the squares are infinite.
    if needs & NEED_SQUARES and not (needs & NEED_SUMS and np.isfinite(chunk_row[SQUARES])):
        chunk_row[SQUARES] = _squares_in(1.0, _chunk(address, 0, size, element_format, wide))


@njit
def _measure_tokens(chunk: np.ndarray, start: int, features: int, squares: float, chunk_row: np.ndarray) -> float:
    """Sums of the norm and root mean square of the tokens that end in a chunk.

    Args:
        chunk: Elements in float32.
        start: Number of elements of the tensor that come before them.
        features: Size of a token.
        squares: Of the token that the chunk goes on with, the sum of squares so far.
        chunk_row: Gets the sums.

    Returns:
        The sum of squares of the token that the next chunk goes on with.
    """
    place, missing, address = 0, features - start % features, chunk.ctypes.data
    while place < chunk.size:
        size = min(missing, chunk.size - place)
        # Not a slice, whose owner is counted: that takes longer than to read a short token.
        squares += _squares_in(1.0, carray(pointer(address + place * ELEMENT_BYTES), (size,), np.float32))
        place += size
        missing -= size
        if missing == 0:
            chunk_row[TOKENS] += 1.0
            chunk_row[TOKEN_NORM] += np.sqrt(squares)
            squares, missing = 0.0, features
    chunk_row[TOKEN_RMS] = chunk_row[TOKEN_NORM] / np.sqrt(features)
    return squares


@njit
def _add(address: int, element_format: int, num_elements: int, features: int, needs: int, row: np.ndarray, latest: np.ndarray) -> None:
    chunk_row, wide = np.empty(NUM_FIELDS), _room(num_elements, element_format)
    squares = 0.0
    element_bytes = ELEMENT_BYTES if element_format == FLOAT32 else HALF_BYTES
    chunk_format = FLOAT32 if element_format == FLOAT16 else element_format
    _clear(latest)
    length = CHUNK_ELEMENTS if element_format == FLOAT16 or needs & NEED_TOKENS else LONG_CHUNK_ELEMENTS
    for start in range(0, num_elements, length):
        size = min(length, num_elements - start)
        place = address + start * element_bytes
        if element_format == FLOAT16:
            place = _chunk(place, 0, size, element_format, wide).ctypes.data
        _measure_chunk(place, size, chunk_format, needs, wide, chunk_row)
        if needs & NEED_TOKENS:
            squares = _measure_tokens(_chunk(place, 0, size, chunk_format, wide), start, features, squares, chunk_row)
        _merge(chunk_row, latest)
    _merge(latest, row)


@njit("void(int64, int64, int64, int64, int64, int64, int64)", cache=True)
def add(address: int, element_format: int, num_elements: int, features: int, needs: int, row: int, latest: int) -> None:
    """Merge a tensor into a row. All arguments are numbers: taking arrays apart costs as much as reading a small tensor.

    Args:
        address: Of the first of ``num_elements`` elements that lie one after the other.
        element_format: Which float they are: ``FLOAT32``, ``BFLOAT16`` or ``FLOAT16``.
        num_elements: At least 1.
        features: Size of the last dimension; only read for ``Need.TOKENS``.
        needs: Which moments to take, bits of :class:`~lightning_module_monitor.statistics.moments.Need`.
        row: Address of the row: ``len(Moments._fields)`` float64.
        latest: Address of as many that get the moments of this tensor alone.
    """
    own, alone = carray(pointer(row), (NUM_FIELDS,), np.float64), carray(pointer(latest), (NUM_FIELDS,), np.float64)
    _add(address, element_format, num_elements, features, needs, own, alone)


@njit("void(int64, int64)", cache=True)
def merge(other: int, row: int) -> None:
    """Merge moments into a row; both are addresses, as for :func:`add`."""
    _merge(carray(pointer(other), (NUM_FIELDS,), np.float64), carray(pointer(row), (NUM_FIELDS,), np.float64))


@njit("void(float64[:, ::1], int64[:, ::1], float64[:, ::1])", cache=True)
def merge_many(others: np.ndarray, targets: np.ndarray, rows: np.ndarray) -> None:
    """Merge several moments into rows.

    Args:
        others: Moments, shape ``(any, len(Moments._fields))``.
        targets: Pairs of the number of a row and that of the moments that it gets.
        rows: Shape ``(rows, len(Moments._fields))``.
    """
    for i in range(len(targets)):
        _merge(others[targets[i, 1]], rows[targets[i, 0]])


# What a kernel that looks at a tensor itself works with, by place in an array of int64. Behind the last begins room for DLPack's
# `DLTensor`: address of the elements; device; number of dimensions, and dtype; addresses of sizes and of strides; an offset in bytes.
DESCRIBE, CLEAR_ERROR, ROWS, LATEST, DESCRIPTION = range(5)
NUM_WORDS = DESCRIPTION + 6
"""Of eight bytes."""
WORD_BYTES = 8
CPU = 1
"""``kDLCPU``, the lower half of its word."""
LANE = 1 << 16
"""Of DLPack's dtypes, the upper half of theirs: a single number, of so many bits, and of this kind of number."""
DLPACK_FLOAT32 = LANE | 32 << 8 | 2
DLPACK_BFLOAT16 = LANE | 16 << 8 | 4
DLPACK_FLOAT16 = LANE | 16 << 8 | 2


@intrinsic
def _described(_context: Any, _function: Any, _tensor: Any, _description: Any) -> Any:  # noqa: ANN401  # numba's protocol, as above
    """Call ``dltensor_from_py_object_no_sync`` at an address: 0, or -1 and an error of Python's."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401  # as above
        of_function = ir.FunctionType(ir.IntType(32), [ir.IntType(64), ir.IntType(64)])
        return builder.call(builder.inttoptr(arguments[0], of_function.as_pointer()), arguments[1:])

    return types.int32(types.int64, types.int64, types.int64), generate


@intrinsic
def _call(_context: Any, _function: Any) -> Any:  # noqa: ANN401  # numba's protocol, as above
    """Call a function of no arguments and no result at an address."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401  # as above
        of_function = ir.FunctionType(ir.VoidType(), [])
        builder.call(builder.inttoptr(arguments[0], of_function.as_pointer()), [])
        return ir.Constant(ir.IntType(64), 0)

    return types.int64(types.int64), generate


@njit
def _format_of(dtype: int) -> int:
    """The format of elements of DLPack's dtype, -1 for one that is not read."""
    if dtype == DLPACK_FLOAT32:
        return FLOAT32
    if dtype == DLPACK_BFLOAT16:
        return BFLOAT16
    return FLOAT16 if dtype == DLPACK_FLOAT16 else -1


@njit
def _size_in_order(num_dimensions: int, sizes: int, strides: int) -> int:
    """Number of elements that lie one after the other; 0 if they do not."""
    num_elements = 1
    for dimension in range(num_dimensions - 1, -1, -1):
        size = carray(pointer(sizes), (num_dimensions,), np.int64)[dimension]
        if size != 1 and (strides == 0 or carray(pointer(strides), (num_dimensions,), np.int64)[dimension] != num_elements):
            return 0
        num_elements *= size
    return num_elements


@njit
def _take(tensor: int, offset: int, storage_bytes: int, needs: int, row: int, desk: int) -> int:
    """:func:`take`, for others here."""
    tools = carray(pointer(desk), (NUM_WORDS,), np.int64)
    if _described(tools[DESCRIBE], tensor, desk + DESCRIPTION * WORD_BYTES) != 0:
        _call(tools[CLEAR_ERROR])
        return 0
    begin, device, kind, sizes, strides, shift = tools[DESCRIPTION:]
    elements = begin + shift
    element_format, num_dimensions = _format_of(kind >> 32), int(np.int32(kind))
    num_elements = _size_in_order(num_dimensions, sizes, strides)
    element_bytes = ELEMENT_BYTES if element_format == FLOAT32 else HALF_BYTES
    if int(np.int32(device)) != CPU or element_format < 0 or num_elements == 0:
        return 0
    # Zeros may have no memory, whatever the size of their storage. A program that streams weights may have given it back, or a
    # part of it. To read it all the same would end the process.
    if elements == offset * element_bytes or (offset + num_elements) * element_bytes > storage_bytes:
        return 0
    features = carray(pointer(sizes), (num_dimensions,), np.int64)[num_dimensions - 1] if num_dimensions else 1
    own = carray(pointer(tools[ROWS] + row * NUM_FIELDS * WORD_BYTES), (NUM_FIELDS,), np.float64)
    alone = carray(pointer(tools[LATEST]), (NUM_FIELDS,), np.float64)
    _add(elements, element_format, num_elements, features, needs, own, alone)
    return 1


@njit("int64(int64, int64, int64, int64, int64, int64)", cache=True)
def take(tensor: int, offset: int, storage_bytes: int, needs: int, row: int, desk: int) -> int:
    """Merge a tensor into a row, if it can be read where it lies: elements, at least one, in order in a CPU's memory.

    Args:
        tensor: Its identity in Python: the address of the object, which is neither a subclass's nor negated by a flag.
        offset: Of its first element in its storage, in elements.
        storage_bytes: Size of that. Not every program leaves it as large as its tensors say.
        needs: As for :func:`add`.
        row: Number of the row.
        desk: Address of ``NUM_WORDS`` int64: addresses of DLPack's function and of ``PyErr_Clear``, of the rows, and of a row that
            gets the moments of this tensor alone; the rest is written.

    Returns:
        Whether it was, 0 or 1.
    """
    return _take(tensor, offset, storage_bytes, needs, row, desk)  # type: ignore[no-any-return]  # numba's


@njit("void(int64[:, ::1], int64[::1], int64[::1], int64[::1], int64)", cache=True)
def take_all(tensors: np.ndarray, needs: np.ndarray, rows: np.ndarray, taken: np.ndarray, desk: int) -> None:
    """:func:`take` of several tensors.

    Args:
        tensors: Identities, offsets and sizes of storages, shape ``(3, tensors)``.
        needs: Of each.
        rows: For each.
        taken: Gets for each whether it was merged.
        desk: As for :func:`take`.
    """
    for i in range(len(taken)):
        taken[i] = _take(tensors[0, i], tensors[1, i], tensors[2, i], needs[i], rows[i], desk)
