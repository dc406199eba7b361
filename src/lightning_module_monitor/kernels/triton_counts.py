"""How a program of :mod:`.triton_loops` counts the elements of its span in the bins of :mod:`.bins_of_floats`."""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from lightning_module_monitor import histogram
from lightning_module_monitor.kernels import bins_of_floats
from lightning_module_monitor.kernels.triton_reading import begin_of, tile


def _limits(*, is_below: bool) -> list[int]:
    """The limits of number formats that belong to the bin below them, or above them, in the bits of float32 less those of 1.0."""
    limits = [edge.magnitude for edge in bins_of_floats.LIMITS if edge.is_below == is_below]
    return [int(np.float32(limit).view(np.int32)) - (127 << 23) for limit in limits]


# The only globals that a device function can read are constants of Triton.
INFINITY = tl.constexpr(float("inf"))

BELOW = tl.constexpr(histogram.LOWEST_EXPONENT - 1)
ABOVE = tl.constexpr(histogram.HIGHEST_EXPONENT + 1)
ZERO_BIN = tl.constexpr(bins_of_floats.HISTOGRAM.zero_bin)
NUM_COUNTS = tl.constexpr(bins_of_floats.HISTOGRAM.num_counts)
NUM_SLOTS = tl.constexpr(512)
"""Counts that a program keeps: a power of two, as Triton requires; the last slot is for lanes without an element."""

# The bins of FINE. Bits of float64, of which the lower 29 are zero in every edge, are shifted by them, less the bits of 1.0.
FINE_ZERO_BIN = tl.constexpr(bins_of_floats.FINE.zero_bin)
NUM_FINE_COUNTS = tl.constexpr(bins_of_floats.FINE.num_counts)
LOWEST_OCTAVE = tl.constexpr(bins_of_floats.LOWEST_OCTAVE)
BELOW_OCTAVES = tl.constexpr(((1023 + bins_of_floats.LOWEST_OCTAVE) << 52) - 1)
LAST_OCTAVE_END = tl.constexpr(((1023 + bins_of_floats.HIGHEST_OCTAVE + 1) << 52) - 1)
WINDOW = tl.constexpr(NUM_SLOTS.value // 2 - 2)
"""Bins of each sign that a program counts by itself: 31 octaves. Other slots are for zeros, for NaN and for all else."""
STEP_1, STEP_2, STEP_3, STEP_4, STEP_5, STEP_6, STEP_7 = map(tl.constexpr, bins_of_floats.STEPS)
LIMIT_1, LIMIT_2, LIMIT_3 = (tl.constexpr(limit) for limit in _limits(is_below=False))
(LIMIT_4,) = (tl.constexpr(limit) for limit in _limits(is_below=True))


@triton.jit
def count(
    tensor, other, sign, shift, shift_stride, scale, n, length, stride, group, gap, skipped, counts,
    IS_FINE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, IS_FLAT: tl.constexpr,
):  # fmt: skip
    """Read a span once more and count its elements in the bins of ``FINE`` or of ``HISTOGRAM``; with the sums, registers would not do.

    Few elements are added to memory by themselves: those outside of a window of ``FINE``, about the first elements.
    """
    lowest = tl.full([], 1, tl.int32)
    if IS_FINE:
        row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
        begin = begin_of(row, length, stride, group, gap, skipped, IS_FLAT)
        x, _mask = tile(tensor, other, sign, shift, scale, row, begin, column, length, shift_stride, n)
        lowest = _lowest_of_window(x)
    counted = tl.zeros([NUM_SLOTS], tl.int32)
    for block in range(tl.cdiv(n, ROWS * length).to(tl.int32)):
        row = block * ROWS + tl.arange(0, ROWS)[:, None]
        begin = begin_of(row, length, stride, group, gap, skipped, IS_FLAT)
        for left in range(0, length, COLUMNS):
            column = left + tl.arange(0, COLUMNS)[None, :]
            x, mask = tile(tensor, other, sign, shift, scale, row, begin, column, length, shift_stride, n)
            if IS_FINE:
                index = _fine_bin_of(x)
                slots = tl.where(mask, _slot_of(index, lowest), NUM_SLOTS - 1)
                tl.atomic_add(counts + index, 1, mask=mask & (slots == NUM_SLOTS - 1), sem="relaxed")
            else:
                slots = tl.where(mask, _bin_of(x), NUM_SLOTS - 1)
            counted += tl.histogram(tl.reshape(slots, [ROWS * COLUMNS]), NUM_SLOTS)
    slot = tl.arange(0, NUM_SLOTS)
    is_bin = slot < NUM_COUNTS
    if IS_FINE:
        is_bin = slot < NUM_SLOTS - 1
        slot = _fine_bin_of_slot(slot, lowest)
    tl.atomic_add(counts + slot, counted.to(tl.int64), mask=is_bin & (counted > 0), sem="relaxed")


@triton.jit
def _bin_of(x):
    """The index of a float in a row of counts of ``HISTOGRAM``, from its bits."""
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True)
        magnitude = bits & 0x7FFFFFFFFFFFFFFF
        infinity = 0x7FF0000000000000
        exponent = (magnitude >> 52) - 1023
    else:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        infinity = 0x7F800000
        exponent = (magnitude >> 23) - 127
    distance = tl.minimum(tl.maximum(exponent, BELOW), ABOVE) - BELOW + 1
    index = ZERO_BIN + tl.where(bits < 0, -distance, distance)
    index = tl.where(magnitude == 0, ZERO_BIN, index)
    index = tl.where(magnitude == infinity, tl.where(bits < 0, 0, NUM_COUNTS - 2), index)
    return tl.where(magnitude > infinity, NUM_COUNTS - 1, index).to(tl.int32)


@triton.jit
def _fine_bin_of(x):
    """As :func:`_bin_of`, in a row of counts of ``FINE``."""
    bits = x.to(tl.float64).to(tl.int64, bitcast=True)
    magnitude = bits & 0x7FFFFFFFFFFFFFFF
    infinity = 0x7FF0000000000000
    code = tl.minimum(tl.maximum(magnitude - 1, BELOW_OCTAVES), LAST_OCTAVE_END)  # less 1: an edge belongs to the bin below it
    below = ((code >> 29) - (1023 << 23)).to(tl.int32)
    above = ((tl.minimum(magnitude, LAST_OCTAVE_END) >> 29) - (1023 << 23)).to(tl.int32)  # the first three limits to the bin above them
    mantissa = below & 0x7FFFFF
    distance = 2 + 8 * ((below >> 23) - LOWEST_OCTAVE)
    distance += (mantissa >= STEP_1).to(tl.int32) + (mantissa >= STEP_2).to(tl.int32) + (mantissa >= STEP_3).to(tl.int32)
    distance += (mantissa >= STEP_4).to(tl.int32) + (mantissa >= STEP_5).to(tl.int32) + (mantissa >= STEP_6).to(tl.int32)
    distance += (mantissa >= STEP_7).to(tl.int32) + (below >= LIMIT_4).to(tl.int32)
    distance += (above >= LIMIT_1).to(tl.int32) + (above >= LIMIT_2).to(tl.int32) + (above >= LIMIT_3).to(tl.int32)
    distance = tl.where(magnitude == 0, 0, tl.where(magnitude == infinity, FINE_ZERO_BIN, distance))
    index = FINE_ZERO_BIN + tl.where(bits < 0, -distance, distance)
    return tl.where(magnitude > infinity, NUM_FINE_COUNTS - 1, index)


@triton.jit
def _lowest_of_window(x):
    """The distance from zero of the first bin of a window, about the mean distance of a span's first elements: few are far from it."""
    distance = tl.abs(_fine_bin_of(x) - FINE_ZERO_BIN)
    distance = tl.where(tl.abs(x) < INFINITY, distance, 0)
    middle = tl.sum(distance) // tl.maximum(tl.sum((distance > 0).to(tl.int32)), 1)
    return tl.maximum(tl.minimum(middle - WINDOW // 2, FINE_ZERO_BIN - WINDOW + 1), 1)


@triton.jit
def _slot_of(index, lowest):
    """The slot of a bin of ``FINE``: those of zero, of the window of positive numbers, of that of negative ones, of NaN; else the last."""
    distance = index - FINE_ZERO_BIN
    place = tl.abs(distance) - lowest
    slot = tl.where((place >= 0) & (place < WINDOW), 1 + place + tl.where(distance < 0, WINDOW, 0), NUM_SLOTS - 1)
    slot = tl.where(distance == 0, 0, slot)
    return tl.where(index == NUM_FINE_COUNTS - 1, 2 * WINDOW + 1, slot)


@triton.jit
def _fine_bin_of_slot(slot, lowest):
    """The bin of a slot; see :func:`_slot_of`."""
    distance = tl.where(slot > WINDOW, -(slot - 1 - WINDOW + lowest), slot - 1 + lowest)
    index = FINE_ZERO_BIN + tl.where(slot == 0, 0, distance)
    return tl.where(slot == 2 * WINDOW + 1, NUM_FINE_COUNTS - 1, index)
