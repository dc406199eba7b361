"""Lanczos's small matrices of float32 matrices on a CPU, as machine code; see ``probes/operator_norms.py`` and ``statistics/compiled.py``.

A difference of two matrices is written down once, and stays in the second-level cache for all products with it. Each
product with the matrix and its transpose reads a row once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from lightning_module_monitor.statistics.compiled import ANY_ORDER, CHUNK_ELEMENTS, ELEMENT_BYTES, MAGNITUDE_BITS, _pointer

ROWS = 4
"""So many rows of a matrix are multiplied at a time."""


@njit(fastmath=ANY_ORDER)
def _dot(one: np.ndarray, other: np.ndarray) -> Any:  # noqa: ANN401  # a float32, as numba finds
    total = np.float32(0.0)
    for i in range(one.size):
        total += one[i] * other[i]
    return total


@njit(fastmath=ANY_ORDER)
def _add_multiple(vector: np.ndarray, factor: np.float32, total: np.ndarray) -> None:
    for i in range(vector.size):
        total[i] += factor * vector[i]


@njit(fastmath=ANY_ORDER)
def _dots(rows: np.ndarray, vector: np.ndarray, totals: np.ndarray) -> None:
    """The products of ``ROWS`` rows with a vector, which is read once for all of them."""
    of_0 = of_1 = of_2 = of_3 = np.float32(0.0)
    row_0, row_1, row_2, row_3 = rows[0], rows[1], rows[2], rows[3]
    for i in range(vector.size):
        of_0 += row_0[i] * vector[i]
        of_1 += row_1[i] * vector[i]
        of_2 += row_2[i] * vector[i]
        of_3 += row_3[i] * vector[i]
    totals[0], totals[1], totals[2], totals[3] = of_0, of_1, of_2, of_3


@njit(fastmath=ANY_ORDER)
def _add_multiples(rows: np.ndarray, factors: np.ndarray, total: np.ndarray) -> None:
    """The sum of multiples of ``ROWS`` rows, which is read and written once for all of them."""
    row_0, row_1, row_2, row_3 = rows[0], rows[1], rows[2], rows[3]
    of_0, of_1, of_2, of_3 = factors[0], factors[1], factors[2], factors[3]
    for i in range(total.size):
        total[i] += (of_0 * row_0[i] + of_1 * row_1[i]) + (of_2 * row_2[i] + of_3 * row_3[i])


@njit
def _subtract(own: np.ndarray, other: np.ndarray, difference: np.ndarray) -> None:
    for i in range(own.size):
        difference[i] = own[i] - other[i]


@njit
def _largest(bits: np.ndarray) -> Any:  # noqa: ANN401  # an int32, as numba finds
    """The largest magnitude. Of integers, whose comparison is vectorized: they are in the order of the floats, and NaN is the largest."""
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, np.int32(bits[i] & MAGNITUDE_BITS))
    return largest


@njit
def _difference(address: int, other: int, matrix: np.ndarray) -> float:
    """Write the matrix, or the difference, at the addresses into ``matrix``; returns its largest magnitude."""
    bits = matrix.view(np.int32)
    largest = np.zeros(1, np.int32)
    for start in range(0, matrix.size, CHUNK_ELEMENTS):
        end = min(start + CHUNK_ELEMENTS, matrix.size)
        own = carray(_pointer(address + start * ELEMENT_BYTES), (end - start,), np.float32)
        if other == 0:
            matrix[start:end] = own
        else:
            _subtract(own, carray(_pointer(other + start * ELEMENT_BYTES), (end - start,), np.float32), matrix[start:end])
        largest[0] = max(largest[0], _largest(bits[start:end]))
    return float(largest.view(np.float32)[0])


@njit
def _lanczos(matrix: np.ndarray, scale: float, start: np.ndarray, rounding: float, basis: np.ndarray, small: np.ndarray) -> None:
    """Fill ``small`` with Lanczos's tridiagonal matrix of the transposed matrix times the matrix, in units of the squared scale."""
    num_steps, columns = basis.shape
    small[:] = 0.0
    basis[0] = start
    product, projections = np.empty(columns, np.float32), np.empty(ROWS, np.float32)
    inverse = 1.0 / scale
    for step in range(num_steps):
        product[:] = 0.0
        square = 0.0
        is_last = step + 1 == num_steps
        for first in range(0, len(matrix) - len(matrix) % ROWS, ROWS):
            rows = matrix[first : first + ROWS]
            _dots(rows, basis[step], projections)
            # The scale is taken out once before and once after the second product: no square leaves float32.
            for i in range(ROWS):
                wide = np.float64(projections[i]) * inverse
                square += wide * wide
                projections[i] = np.float32(wide)
            if not is_last:
                _add_multiples(rows, projections, product)
        for first in range(len(matrix) - len(matrix) % ROWS, len(matrix)):
            wide = np.float64(_dot(matrix[first], basis[step])) * inverse
            square += wide * wide
            if not is_last:
                _add_multiple(matrix[first], np.float32(wide), product)
        small[step, step] = square
        if is_last:
            return
        for i in range(columns):
            product[i] = np.float32(product[i] * inverse)
        for _again in range(2):  # one subtraction leaves what it rounds away
            for known in range(step + 1):
                _add_multiple(basis[known], -_dot(basis[known], product), product)
        norm = np.sqrt(np.float64(_dot(product, product)))
        if not norm > rounding * small[0, 0]:
            # Nothing but rounding is left: the directions that there are have been found. Or it is NaN, as the diagonal is.
            return
        small[step, step + 1] = norm
        small[step + 1, step] = norm
        for i in range(columns):
            basis[step + 1, i] = np.float32(product[i] / norm)


@njit("void(int64[:, ::1], float32[::1], float64, float64[::1], float64[:, :, ::1])", cache=True)
def lanczos(matrices: np.ndarray, start: np.ndarray, rounding: float, scales: np.ndarray, small: np.ndarray) -> None:
    """Lanczos's tridiagonal matrices of several matrices of one width, multiplied with their transposed.

    Args:
        matrices: Of each: address of its float32 elements, row by row; address of as many that are taken from these, 0 for
            none; number of rows.
        start: Where each begins: a vector of norm 1, shape ``(columns,)``.
        rounding: What is left of a vector is rounding if it is this small a share of the first.
        scales: Gets the largest magnitude of each, shape ``(matrices,)``.
        small: Gets the results, in units of the squared scale, shape ``(matrices, steps, steps)``.
    """
    columns = start.size
    largest = 0
    for i in range(len(matrices)):
        largest = max(largest, matrices[i, 2] * columns)
    buffer = np.empty(largest, np.float32)
    basis = np.empty((small.shape[1], columns), np.float32)
    for i in range(len(matrices)):
        address, other, rows = matrices[i]
        matrix = buffer[: rows * columns]
        scales[i] = _difference(address, other, matrix)
        if scales[i] == 0.0:
            small[i] = 0.0
        else:
            _lanczos(matrix.reshape(rows, columns), scales[i], start, rounding, basis, small[i])
