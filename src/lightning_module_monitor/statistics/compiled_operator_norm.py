"""Lanczos's small matrices of float32 matrices on a CPU, as machine code; see ``probes/operator_norms.py`` and ``statistics/compiled.py``.

A difference of two matrices is written down once, and stays in the second-level cache for all products with it. Each
product with the matrix and its transpose reads a row once; every other one goes backwards, because what was read last is
in the cache still when a matrix is as large as that. All is found by addresses: arrays are counted by whom they are known to,
which took a tenth of the time.

The first vector is a sum of the rows, which is made as they are written down: so what is waited for is memory. Each row
gets the sign with which it makes the sum longer, so that rows of one direction add up; that is as good as one or two steps
more from a random start. A random number beside the sign keeps an order of rows that would cancel out a direction from doing so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from lightning_module_monitor.statistics.compiled import ELEMENT_BYTES, MAGNITUDE_BITS
from lightning_module_monitor.statistics.compiled_vectors import ANY_ORDER, bits_of, float_of, pointer

ROWS = 8
"""So many rows of a matrix are multiplied at a time."""

LEAST_NORMAL = np.int32(1 << 23)
"""The bits of 2**-126; the reciprocal of a smaller number leaves float32."""

SEED = np.uint32(1)
# A linear congruential generator: D. Knuth, "The Art of Computer Programming" 2, 1997, 3.3.4, table 1.
MULTIPLIER = np.uint32(1664525)
INCREMENT = np.uint32(1013904223)
HALF = np.uint32(1 << 31)
SHARE = np.float32(0.9 * 2.0**-31)
"""Makes integers from -2**31 to 2**31 numbers from -0.9 to 0.9."""


@njit
def _floats(address: int, size: int) -> np.ndarray:
    return carray(pointer(address), (size,), np.float32)  # type: ignore[no-any-return]  # numba's


@njit(fastmath=ANY_ORDER)
def _dot(one: int, other: int, size: int) -> Any:  # noqa: ANN401  # a float32, as numba finds
    left, right = _floats(one, size), _floats(other, size)
    total = np.float32(0.0)
    for i in range(size):
        total += left[i] * right[i]
    return total


@njit(fastmath=ANY_ORDER)
def _square(vector: int, inverse: float, size: int) -> float:
    """The squared norm of multiples, in float64."""
    elements = _floats(vector, size)
    total = 0.0
    for i in range(size):
        wide = np.float64(elements[i]) * inverse
        total += wide * wide
    return total


@njit
def _multiply(vector: int, factor: np.float32, size: int) -> None:
    elements = _floats(vector, size)
    for i in range(size):
        elements[i] *= factor


@njit
def _write_multiple(vector: int, factor: np.float32, target: int, size: int) -> None:
    elements, written = _floats(vector, size), _floats(target, size)
    for i in range(size):
        written[i] = factor * elements[i]


@njit(fastmath=ANY_ORDER)
def _add_multiple(vector: int, factor: np.float32, total: int, size: int) -> None:
    elements, sums = _floats(vector, size), _floats(total, size)
    for i in range(size):
        sums[i] += factor * elements[i]


@njit(fastmath=ANY_ORDER)
def _dots(rows: int, vector: int, totals: int, columns: int) -> None:
    """The products of ``ROWS`` rows with a vector, which is read once for all of them."""
    width = columns * ELEMENT_BYTES
    row_0, row_1 = _floats(rows, columns), _floats(rows + width, columns)
    row_2, row_3 = _floats(rows + 2 * width, columns), _floats(rows + 3 * width, columns)
    row_4, row_5 = _floats(rows + 4 * width, columns), _floats(rows + 5 * width, columns)
    row_6, row_7 = _floats(rows + 6 * width, columns), _floats(rows + 7 * width, columns)
    elements = _floats(vector, columns)
    of_0 = of_1 = of_2 = of_3 = of_4 = of_5 = of_6 = of_7 = np.float32(0.0)
    for i in range(columns):
        of_0 += row_0[i] * elements[i]
        of_1 += row_1[i] * elements[i]
        of_2 += row_2[i] * elements[i]
        of_3 += row_3[i] * elements[i]
        of_4 += row_4[i] * elements[i]
        of_5 += row_5[i] * elements[i]
        of_6 += row_6[i] * elements[i]
        of_7 += row_7[i] * elements[i]
    found = _floats(totals, ROWS)
    found[0], found[1], found[2], found[3] = of_0, of_1, of_2, of_3
    found[4], found[5], found[6], found[7] = of_4, of_5, of_6, of_7


@njit(fastmath=ANY_ORDER)
def _add_multiples(rows: int, factors: int, total: int, columns: int) -> None:
    """The sum of multiples of ``ROWS`` rows, which is read and written once for all of them."""
    width = columns * ELEMENT_BYTES
    row_0, row_1 = _floats(rows, columns), _floats(rows + width, columns)
    row_2, row_3 = _floats(rows + 2 * width, columns), _floats(rows + 3 * width, columns)
    row_4, row_5 = _floats(rows + 4 * width, columns), _floats(rows + 5 * width, columns)
    row_6, row_7 = _floats(rows + 6 * width, columns), _floats(rows + 7 * width, columns)
    sums, of = _floats(total, columns), _floats(factors, ROWS)
    of_0, of_1, of_2, of_3, of_4, of_5, of_6, of_7 = of[0], of[1], of[2], of[3], of[4], of[5], of[6], of[7]
    for i in range(columns):
        first = (of_0 * row_0[i] + of_1 * row_1[i]) + (of_2 * row_2[i] + of_3 * row_3[i])
        sums[i] += first + (of_4 * row_4[i] + of_5 * row_5[i]) + (of_6 * row_6[i] + of_7 * row_7[i])


@njit
def _copy(address: int, target: int, size: int) -> Any:  # noqa: ANN401  # an int32, as numba finds
    """Write elements; returns the largest magnitude's bits. They are in the order of the floats, and NaN is the largest."""
    own, written = _floats(address, size), _floats(target, size)
    largest = np.int32(0)
    for i in range(size):
        element = own[i]
        written[i] = element
        largest = max(largest, np.int32(bits_of(element) & MAGNITUDE_BITS))
    return largest


@njit
def _subtract(address: int, other: int, target: int, size: int) -> Any:  # noqa: ANN401  # as above
    """As :func:`_copy`, a difference."""
    own, taken, written = _floats(address, size), _floats(other, size), _floats(target, size)
    largest = np.int32(0)
    for i in range(size):
        element = own[i] - taken[i]
        written[i] = element
        largest = max(largest, np.int32(bits_of(element) & MAGNITUDE_BITS))
    return largest


@njit
def _begin(address: int, other: int, matrix: int, num_rows: int, columns: int, factors: int, total: int) -> Any:  # noqa: ANN401  # a float32
    """Write the matrix, or the difference, and a first vector, in units of the scale; returns that, its largest magnitude."""
    _floats(total, columns)[:] = np.float32(0.0)
    chosen = _floats(factors, num_rows)
    largest, scale, inverse, random = np.int32(0), np.float32(0.0), np.float32(0.0), SEED
    first = 0
    while first < num_rows:
        size = ROWS if first + ROWS <= num_rows else 1
        offset = first * columns * ELEMENT_BYTES
        rows, of_rows = matrix + offset, factors + first * ELEMENT_BYTES
        if other == 0:
            magnitude = _copy(address + offset, rows, size * columns)
        else:
            magnitude = _subtract(address + offset, other + offset, rows, size * columns)
        if magnitude > largest:
            largest, before, scale = magnitude, scale, float_of(np.uint32(max(magnitude, LEAST_NORMAL)))
            inverse = np.float32(np.float32(1.0) / scale)
            _multiply(total, np.float32(before * inverse), columns)
        if size == ROWS:
            _dots(rows, total, of_rows, columns)
        else:
            chosen[first] = _dot(rows, total, columns)
        for row in range(first, first + size):
            random = np.uint32(random * MULTIPLIER + INCREMENT)
            sign = np.float32(-1.0) if chosen[row] < np.float32(0.0) else np.float32(1.0)
            chosen[row] = np.float32(sign + np.float32(np.int32(random ^ HALF)) * SHARE) * inverse
        if size == ROWS:
            _add_multiples(rows, of_rows, total, columns)
        else:
            _add_multiple(rows, chosen[first], total, columns)
        first += size
    return scale


@njit
def _products(matrix: int, num_rows: int, columns: int, vector: int, left: int, right: int, is_backwards: bool, is_last: bool) -> None:
    """The product with a vector, and that of the transposed with it, which is left out of the last."""
    _floats(right, columns)[:] = np.float32(0.0)
    width, whole = columns * ELEMENT_BYTES, num_rows - num_rows % ROWS
    for group in range(0, whole, ROWS):
        first = whole - ROWS - group if is_backwards else group
        rows, of_rows = matrix + first * width, left + first * ELEMENT_BYTES
        _dots(rows, vector, of_rows, columns)
        if not is_last:
            _add_multiples(rows, of_rows, right, columns)
    found = _floats(left, num_rows)
    for row in range(whole, num_rows):
        found[row] = _dot(matrix + row * width, vector, columns)
        if not is_last:
            _add_multiple(matrix + row * width, found[row], right, columns)


@njit
def _lanczos(
    matrix: int, num_rows: int, columns: int, scale: float, rounding: float, basis: int, vector: int, left: int, small: np.ndarray
) -> None:
    """Fill ``small`` with Lanczos's tridiagonal matrix of the transposed matrix times the matrix, in units of the squared scale."""
    num_steps, width = len(small), columns * ELEMENT_BYTES
    inverse = np.float32(1.0 / scale)
    _multiply(basis, np.float32(1.0 / np.sqrt(_square(basis, 1.0, columns))), columns)
    for step in range(num_steps):
        known, product = basis + step * width, basis + (step + 1) * width
        is_last = step + 1 == num_steps
        # The scale is taken out once before and once after the second product: no square leaves float32.
        _write_multiple(known, inverse, vector, columns)
        _products(matrix, num_rows, columns, vector, left, product, step % 2 == 0, is_last)
        small[step, step] = _square(left, 1.0, num_rows)
        if is_last:
            return
        _multiply(product, inverse, columns)
        for _again in range(2):  # one subtraction leaves what it rounds away
            for one in range(basis, product, width):
                _add_multiple(one, -_dot(one, product, columns), product, columns)
        norm = np.sqrt(_square(product, 1.0, columns))
        if not norm > rounding * small[0, 0]:
            # Nothing but rounding is left: the directions that there are have been found. Or it is NaN, as the diagonal is.
            return
        small[step, step + 1] = norm
        small[step + 1, step] = norm
        _multiply(product, np.float32(1.0 / norm), columns)


@njit
def _work(matrices: np.ndarray, columns: int, rounding: float, memory: np.ndarray, scales: np.ndarray, small: np.ndarray) -> None:
    width = columns * ELEMENT_BYTES
    basis = memory.ctypes.data
    vector = basis + (small.shape[1] + 1) * width
    matrix = vector + width
    for i in range(len(matrices)):
        address, other, rows = matrices[i]
        left = matrix + rows * width
        scales[i] = _begin(address, other, matrix, rows, columns, left, basis)
        if scales[i] != 0.0:
            _lanczos(matrix, rows, columns, scales[i], rounding, basis, vector, left, small[i])


@njit("void(int64[:, ::1], int64, float64, float64[::1], float64[:, :, ::1])", cache=True)
def lanczos(matrices: np.ndarray, columns: int, rounding: float, scales: np.ndarray, small: np.ndarray) -> None:
    """Lanczos's tridiagonal matrices of several matrices of one width, multiplied with their transposed.

    Args:
        matrices: Of each: address of its float32 elements, row by row; address of as many that are taken from these, 0 for
            none; number of rows.
        columns: Width of all of them.
        rounding: What is left of a vector is rounding if it is this small a share of the first.
        scales: Gets the largest magnitude of each, shape ``(matrices,)``.
        small: Gets the results, in units of the squared scale, shape ``(matrices, steps, steps)``.
    """
    small[:] = 0.0
    rows = 0
    for i in range(len(matrices)):
        rows = max(rows, matrices[i, 2])
    memory = np.empty((small.shape[1] + 2 + rows) * columns + rows, np.float32)
    # Numba lets an array go behind the last line that names it: the function that gets it keeps it.
    _work(matrices, columns, rounding, memory, scales, small)
