"""The squares of differences of float32 tensors on a CPU, which are never written down, as machine code; see ``statistics/compiled.py``.

Those that are made of the same tensors, as the terms of a layer are, are measured by one loop: in float32, of which a vector
holds twice as many and which is not widened, chunk by chunk, and in float64 where that is not as good.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from lightning_module_monitor.statistics.compiled import ELEMENT_BYTES, ELEMENTS, NUM_FIELDS, SQUARES
from lightning_module_monitor.statistics.compiled_vectors import ANY_ORDER, Values, in_wide_vectors, pointer, summing_loop

QUICK_CHUNK_ELEMENTS = 1024
"""Of each of the three tensors that a layer's terms are made of, and of three shifts: they are in the first-level cache together."""

LEAST_QUICK = 1e-27
"""A sum of a chunk's squares in float32 that is larger than this misses nothing that has become too small: 4096 times 1.2e-38."""

# The forms of a difference that are measured by one loop, of three tensors at most: `own`, `other` and `third`. The first three
# have a shift.
OWN_SHIFTED, OWN_OTHER_SHIFTED, THIRD_SHIFTED, OWN, OWN_OTHER, OTHER_THIRD, THIRD = range(7)
NUM_TENSORS = 3
NUM_SHIFTED = 3
NUM_FORMS = 7

LANES = 32
"""Of a loop, which has as many sums of each form: so that none rounds away more than a few units of 1e-7."""


def _squares_of(*, of_three: bool) -> Values:
    """The squares of all forms, or of those that are made of ``own`` and ``other`` alone."""

    def squares(builder: Any, read: list[Any], _numbers: list[Any]) -> list[Any]:  # noqa: ANN401  # llvmlite is not annotated
        own, other = read[:2]
        between = builder.fsub(own, other)
        values = {OWN: own, OWN_OTHER: between}
        if of_three:
            third, *shifts = read[2:]
            values |= {OTHER_THIRD: builder.fsub(other, third), THIRD: third}
            shifted = {OWN_SHIFTED: own, OWN_OTHER_SHIFTED: between, THIRD_SHIFTED: third}
            values |= {form: builder.fsub(value, shifts[form]) for form, value in shifted.items()}
        return [builder.fmul(values[form], values[form], flags=["contract"]) if form in values else None for form in range(NUM_FORMS)]

    return squares


_two, _two_of_rest = (summing_loop(lanes, NUM_FORMS, 2, _squares_of(of_three=False)) for lanes in (LANES, 1))
_three, _three_of_rest = (summing_loop(lanes, NUM_FORMS, NUM_TENSORS, _squares_of(of_three=True)) for lanes in (LANES, 1))


@njit
def _squares(own: int, other: int, third: int, shift: int, shift_bytes: int, size: int, sums: np.ndarray) -> None:  # machine code
    """Sums in float32 of all forms of so many elements at three addresses, the last 0 where only forms of the first two are wanted."""
    in_wide_vectors()
    sums[:] = np.float32(0.0)
    vectors, rest, to = size // LANES, size % LANES, sums.ctypes.data
    done = vectors * LANES * ELEMENT_BYTES
    shift1, shift2 = shift + shift_bytes, shift + 2 * shift_bytes
    if third == 0:
        _two((own, other), (), to, vectors)
        _two_of_rest((own + done, other + done), (), to, rest)
    else:
        _three((own, other, third, shift, shift1, shift2), (), to, vectors)
        _three_of_rest((own + done, other + done, third + done, shift + done, shift1 + done, shift2 + done), (), to, rest)


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
    return zeros[:size] if address == 0 else carray(pointer(address + start * ELEMENT_BYTES), (size,), np.float32)


@njit
def _place(address: int, start: int, zeros: np.ndarray) -> int:
    """Where an element of a tensor is, or that of zeros in its place."""
    return zeros.ctypes.data if address == 0 else address + start * ELEMENT_BYTES


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
                shifts[form, start : start + features] = carray(pointer(differences[members[form], 2]), (features,), np.float32)
    quick = np.zeros(NUM_FORMS, np.float32)
    for first in range(0, num_elements, period):
        end = min(first + period, num_elements)
        for start in range(first, end, QUICK_CHUNK_ELEMENTS):
            place, size = start - first, min(QUICK_CHUNK_ELEMENTS, end - start)
            own, other, third = _place(tensors[0], start, zeros), _place(tensors[1], start, zeros), _place(tensors[2], start, zeros)
            of_two = tensors[2] == 0 and not has_shift
            _squares(own, other, 0 if of_two else third, shifts.ctypes.data + place * ELEMENT_BYTES, shifts.strides[0], size, quick)
            for form in range(NUM_FORMS):
                i = members[form]
                if i >= 0 and LEAST_QUICK < quick[form] < np.inf:
                    totals[i, SQUARES] += quick[form]
                elif i >= 0:
                    # A square may have left float32, upwards or downwards.
                    one, less = _elements(differences[i, 0], start, size, zeros), _elements(differences[i, 1], start, size, zeros)
                    totals[i, SQUARES] += _wide_squares(one, less, shifts[form][place:] if form < NUM_SHIFTED else zeros)


@njit
def _add_together(differences: np.ndarray, num_elements: int, features: int, totals: np.ndarray) -> None:
    """Add the squares of differences of one shape, those that are made of the same tensors together."""
    pending = np.ones(len(differences), np.bool_)
    members = np.empty(NUM_FORMS, np.int64)
    while pending.any():
        tensors = _choose(differences, pending, members)
        _add_squares(differences, members, tensors, num_elements, features, totals)
    for i in range(len(differences)):
        totals[i, ELEMENTS] += num_elements


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
    _add_together(differences, num_elements, features, totals)
    for row, i in targets:
        rows[row, ELEMENTS] += totals[i, ELEMENTS]
        rows[row, SQUARES] += totals[i, SQUARES]


# What terms are made of, by place in an array of addresses, 0 for none.
OUTPUT, AGAIN, REFERENCE_OUTPUT, BIAS, REFERENCE_BIAS, BIAS_CHANGE = range(6)
INPUT, REFERENCE_INPUT, APPLIED, REFERENCE_APPLIED, WEIGHT, REFERENCE_WEIGHT, NOTHING = range(6, 13)
NUM_PARTS = 13


@njit
def _subtract(address: int, other: int, difference: np.ndarray) -> None:
    """Write the difference of two short tensors; zeros where there are none."""
    difference[:] = 0.0
    if address != 0:
        own = carray(pointer(address), (difference.size,), np.float32)
        subtracted = carray(pointer(other), (difference.size,), np.float32)
        for i in range(difference.size):
            difference[i] = own[i] - subtracted[i]


@njit("void(int64, int64, int64, int64, int64, int64, int64, int64)", cache=True)
def add_terms(  # machine code
    parts: int, recipe: int, num_of_output: int, num_of_input: int, num_tokens: int, out_features: int, in_features: int, totals: int
) -> None:
    """Add the squares of a layer's terms to their totals.

    Args:
        parts: Address of the addresses of what terms are made of, ``NUM_PARTS`` int64; what the bias has changed by is written here.
        recipe: Address of the places of tensor, what is taken from it, and shift, of every term, int64; those of the output first.
        num_of_output: Number of terms that are made of outputs.
        num_of_input: Number of terms that are made of inputs.
        num_tokens: At least 1.
        out_features: Size of a token of the output.
        in_features: Size of a token of the input.
        totals: Address of a row for each term: ``len(Moments._fields)`` float64.
    """
    num_terms = num_of_output + num_of_input
    places = carray(pointer(parts), (NUM_PARTS,), np.int64)
    made_of = carray(pointer(recipe), (num_terms, 3), np.int64)
    rows = carray(pointer(totals), (num_terms, NUM_FIELDS), np.float64)
    if places[BIAS_CHANGE] != 0:
        _subtract(places[BIAS], places[REFERENCE_BIAS], carray(pointer(places[BIAS_CHANGE]), (out_features,), np.float32))
    differences = np.empty((num_terms, 3), np.int64)
    for i in range(num_terms):
        for part in range(3):
            differences[i, part] = places[made_of[i, part]]
    if num_of_output:
        _add_together(differences[:num_of_output], num_tokens * out_features, out_features, rows[:num_of_output])
    if num_of_input:
        _add_together(differences[num_of_output:], num_tokens * in_features, in_features, rows[num_of_output:])
