"""What a cast to a narrower format would lose of a tensor, from its counts in fine bins, whose edges are exact at the limits of formats."""

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
    float8_e5m2; IEEE 754, arXiv 2209.05433). Undefined if all finite elements are zero.
    """
    return _part_of_nonzero(counts.up_to(number_format.smallest / 2), counts)


def overflow(_moments: Moments, counts: FineCounts, *, number_format: NumberFormat) -> Array:
    """The fraction of the finite elements whose magnitude a cast rounds beyond the largest number of the format, from 0 to 1.

    From 65520 on for float16, 3.396e38 for bfloat16, 61440 for float8_e5m2, above 464 for float8_e4m3fn. Torch's cast to the latter
    saturates from torch 2.12 on, and gave NaN before.
    """
    beyond = counts.finite - counts.zeros - counts.up_to(number_format.beyond)
    return np.where(counts.finite == 0, np.nan, beyond / counts.finite)


def scaled_underflow(moments: Moments, counts: FineCounts, *, number_format: NumberFormat) -> Array:
    """The ``underflow`` after a multiplication by the largest power of two that leaves all magnitudes within the format, from 0 to 1.

    Such a scale for each tensor is what training in float8 uses (arXiv 2209.05433, section 3). NaN if an element is not finite.
    """
    largest = largest_magnitude(moments)
    is_finite = np.isfinite(largest)
    fraction, exponent = np.frexp(np.where(is_finite, largest, 1.0))
    fraction_of_format, exponent_of_format = math.frexp(number_format.largest)
    power = exponent_of_format - exponent - (fraction > fraction_of_format)
    limit: Array = np.ldexp(number_format.smallest / 2, -power)
    return np.where(is_finite, _part_of_nonzero(counts.up_to(limit), counts), np.nan)


def dynamic_range(moments: Moments, counts: FineCounts) -> Array:
    """``log2(max(|x|) / min(|x|))``, zeros left out, at least 0: how many powers of two there are between the magnitudes.

    These are the binades in which arXiv 2209.05433 (table 1) gives the ranges of formats. Exact if all elements have one sign, else to
    within 0.065. Undefined if all elements are zero.
    """
    largest = largest_magnitude(moments)
    smallest = np.where(moments.minimum > 0, moments.minimum, np.where(moments.maximum < 0, -moments.maximum, counts.smallest()))
    return np.where(largest == 0, UNDEFINED, np.log2(largest / np.minimum(smallest, largest)))


def largest_magnitude(moments: Moments) -> Array:
    """The largest ``|x|``."""
    largest: Array = np.maximum(moments.maximum, -moments.minimum)
    return largest


def _part_of_nonzero(part: Array, counts: FineCounts) -> Array:
    nonzero = counts.finite - counts.zeros
    nothing = np.where(counts.finite == 0, np.nan, UNDEFINED)
    return np.where(nonzero == 0, nothing, part / nonzero)
