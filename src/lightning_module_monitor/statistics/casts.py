"""Losses of a cast to a narrower format, from counts in fine bins, which have exact edges at the limits of the formats."""

from __future__ import annotations

import math

import numpy as np

from lightning_module_monitor.kernels.moments import Array, Moments
from lightning_module_monitor.kernels.number_formats import NumberFormat
from lightning_module_monitor.record import UNDEFINED
from lightning_module_monitor.statistics.fine_counts import FineCounts


def underflow(_moments: Moments, counts: FineCounts, *, number_format: NumberFormat) -> Array:
    """The fraction of the finite elements other than zero that a cast to the format makes zero, from 0 to 1.

    These are at most half the smallest subnormal number (2^-25 for float16, 2^-134 for bfloat16, 2^-10 for float8_e4m3fn, 2^-17 for
    float8_e5m2; IEEE 754, arXiv 2209.05433). Undefined if all finite elements are zero; NaN if no element is finite.
    """
    return _fraction_of_nonzero(counts.up_to(number_format.smallest / 2), counts)


def overflow(_moments: Moments, counts: FineCounts, *, number_format: NumberFormat) -> Array:
    """The fraction of the finite elements whose magnitude a cast rounds beyond the largest number of the format, from 0 to 1.

    These are magnitudes from 65520 on for float16, from 3.396e38 on for bfloat16, from 61440 on for float8_e5m2, and above 464 for
    float8_e4m3fn, which torch casts to the largest number from torch 2.12 on, and to NaN before. NaN if no element is finite.
    """
    beyond = counts.finite - counts.zeros - counts.up_to(number_format.beyond)
    return np.where(counts.finite == 0, np.nan, beyond / counts.finite)


def scaled_underflow(moments: Moments, counts: FineCounts, *, number_format: NumberFormat) -> Array:
    """The ``underflow`` after a multiplication by the largest power of two that leaves all magnitudes within the format, from 0 to 1.

    Training in float8 uses such a scale for each tensor (arXiv 2209.05433, section 3). Undefined if all elements are zero; NaN if an
    element is not finite.
    """
    largest = largest_magnitude(moments)
    is_finite = np.isfinite(largest)
    fraction, exponent = np.frexp(np.where(is_finite, largest, 1.0))
    fraction_of_format, exponent_of_format = math.frexp(number_format.largest)
    power = exponent_of_format - exponent - (fraction > fraction_of_format)
    limit: Array = np.ldexp(number_format.smallest / 2, -power)
    return np.where(is_finite, _fraction_of_nonzero(counts.up_to(limit), counts), np.nan)


def dynamic_range(moments: Moments, counts: FineCounts) -> Array:
    """``log2(max(|x|) / min(|x|))`` of the elements other than zero, at least 0: the number of powers of two between the magnitudes.

    Table 1 of arXiv 2209.05433 gives the ranges of formats in this unit, binades. Exact if all elements have the same sign, else to within
    0.065. Undefined if all elements are zero.
    """
    largest = largest_magnitude(moments)
    smallest = np.where(moments.minimum > 0, moments.minimum, np.where(moments.maximum < 0, -moments.maximum, counts.smallest()))
    return np.where(largest == 0, UNDEFINED, np.log2(largest / np.minimum(smallest, largest)))


def largest_magnitude(moments: Moments) -> Array:
    """The largest ``|x|``."""
    largest: Array = np.maximum(moments.maximum, -moments.minimum) + 0.0  # -0.0 is no magnitude
    return largest


def _fraction_of_nonzero(number: Array, counts: FineCounts) -> Array:
    nonzero = counts.finite - counts.zeros
    without_nonzero = np.where(counts.finite == 0, np.nan, UNDEFINED)
    return np.where(nonzero == 0, without_nonzero, number / nonzero)
