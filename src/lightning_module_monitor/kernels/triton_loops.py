"""The device functions of :mod:`.triton_kernel`, in Triton's subset of Python: compiled when they are first launched.

A launch runs many *programs*. Each measures a span of one tensor and writes its moments, a *part*: float64, in the order of
:class:`~lightning_module_monitor.kernels.moments.Moments`. Sums are float64 sums of deviations from an element of the span, so that
neither a large mean nor a magnitude of 1e30 costs a digit. No result depends on the order in which programs run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_module_monitor.kernels.moments import NUM_FIELDS, Need
from lightning_module_monitor.kernels.triton_counts import NUM_COUNTS, NUM_FINE_COUNTS, count
from lightning_module_monitor.kernels.triton_reading import begin_of, element, tile

# The only globals that a device function can read are constants of Triton.
CENTRAL = tl.constexpr(Need.MEAN | Need.DEVIATIONS | Need.POWERS)
DEVIATIONS = tl.constexpr(Need.DEVIATIONS | Need.POWERS)
POWERS = tl.constexpr(Need.POWERS)
SQUARES = tl.constexpr(Need.SQUARES)
MAGNITUDE = tl.constexpr(Need.MAGNITUDE)
EXTREMES = tl.constexpr(Need.EXTREMES)
ZEROS = tl.constexpr(Need.ZEROS)
NONFINITE = tl.constexpr(Need.NONFINITE)
TOKENS = tl.constexpr(Need.TOKENS)
HISTOGRAM = tl.constexpr(Need.HISTOGRAM)
FINE_COUNTS = tl.constexpr(Need.FINE_COUNTS)
SUMS = tl.constexpr(Need.MEAN | Need.DEVIATIONS | Need.POWERS | Need.SQUARES | Need.MAGNITUDE | Need.TOKENS)
FIELDS = tl.constexpr(NUM_FIELDS)
INFINITY = tl.constexpr(float("inf"))

LARGEST_IN_PAIRS, SMALLEST_IN_PAIRS = tl.constexpr(2.0**50), tl.constexpr(2.0**-50)
"""Between them squares of float32 numbers, and sums of these, are float32 numbers."""
UPPER_HALF = tl.constexpr(-(1 << 12))
"""The upper half of the significant bits of a float32 number."""


# No number and no address is specialized, so that no size, and no alignment, has the compiler run anew: 16 bytes at once were 5 % faster.
@triton.jit(
    do_not_specialize=[
        "tensor", "other", "sign", "shift", "shift_stride", "scale", "num_elements", "length", "stride", "group", "gap", "steps", "parts",
        "first_part", "counts", "first_counts", "fine_counts", "first_fine_counts",
    ]
)  # fmt: skip
def measure(
    tensor, other, sign, shift, shift_stride, scale, num_elements: tl.int64, length, stride: tl.int64, group, gap: tl.int64, steps,
    parts, first_part, counts, first_counts, fine_counts, first_fine_counts,
    NEEDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, IS_FLAT: tl.constexpr, IN_PAIRS: tl.constexpr,
):  # fmt: skip
    """Measure ``(tensor - other - shift) / scale``, where the last three may be None; see :func:`_measure_span`.

    With a ``sign``, 1 or -1, measure ``sign * tensor * other`` instead, in float64.

    Programs write to the slots of ``parts`` from ``first_part`` on, and add to the slot ``first_counts`` of ``counts``, and likewise of
    ``fine_counts``.
    """
    program = tl.program_id(0)
    part = parts + (first_part + program) * FIELDS
    if HISTOGRAM & NEEDS:
        counts += first_counts * NUM_COUNTS
    if FINE_COUNTS & NEEDS:
        fine_counts += first_fine_counts * NUM_FINE_COUNTS
    _measure_span(
        tensor, other, sign, shift, shift_stride, scale, num_elements, length, stride, group, gap, program, steps, part, counts,
        fine_counts, NEEDS, ROWS, COLUMNS, IS_FLAT, IN_PAIRS,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "first_tensor", "layout", "num_tensors", "scale", "steps", "parts", "first_part", "counts", "first_counts", "fine_counts",
        "first_fine_counts",
    ]
)  # fmt: skip
def measure_all(
    first_tensor, layout, num_tensors, scale, steps, parts, first_part, counts, first_counts, fine_counts, first_fine_counts,
    NEEDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, IS_FLAT: tl.constexpr, IN_PAIRS: tl.constexpr,
):  # fmt: skip
    """Measure many tensors of the same dtype, each divided by ``scale`` unless that is None.

    ``layout``, int64, has for each tensor its address, number of elements, the four numbers of its rows, and first program; then for each
    program the index of its tensor. Each tensor has its slot of ``counts``.
    """
    program = tl.program_id(0)
    number = tl.load(layout + 7 * num_tensors + program)
    of_tensor = layout + 7 * number
    tensor = tl.load(of_tensor).to(first_tensor.dtype)
    size = tl.load(of_tensor + 1)
    length, stride = tl.load(of_tensor + 2).to(tl.int32), tl.load(of_tensor + 3)
    group, gap = tl.load(of_tensor + 4).to(tl.int32), tl.load(of_tensor + 5)
    program_of_tensor = program - tl.load(of_tensor + 6).to(tl.int32)
    part = parts + (first_part + program) * FIELDS
    if HISTOGRAM & NEEDS:
        counts += (first_counts + number) * NUM_COUNTS
    if FINE_COUNTS & NEEDS:
        fine_counts += (first_fine_counts + number) * NUM_FINE_COUNTS
    _measure_span(
        tensor, None, None, None, 0, scale, size, length, stride, group, gap, program_of_tensor, steps, part, counts, fine_counts,
        NEEDS, ROWS, COLUMNS, IS_FLAT, IN_PAIRS,
    )  # fmt: skip


@triton.jit
def _measure_span(
    tensor, other, sign, shift, shift_stride, scale, num_elements, length, stride, group, gap, program, steps, part, counts, fine_counts,
    NEEDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, IS_FLAT: tl.constexpr, IN_PAIRS: tl.constexpr,
):  # fmt: skip
    """Measure the program's span, at most ``steps`` blocks of ``ROWS`` rows of ``length`` elements, ``COLUMNS`` of each row at a time.

    A row is a token if tokens are needed, and otherwise what lies without a gap. In the tensor rows begin ``stride`` elements apart, and
    after each ``group`` rows there are ``gap`` more. ``other`` has the rows one after another. ``shift_stride`` is ``length`` if each row
    has its shift, and 0 if all rows share one. With ``IS_FLAT`` all elements are one stretch, cut into rows of ``COLUMNS``, and the
    numbers of rows are not read.
    """
    first_row = program.to(tl.int64) * steps * ROWS
    skipped = 0  # rows of the first group that belong to the span before
    if IS_FLAT:
        length = COLUMNS
        tensor += first_row * COLUMNS
    else:
        tensor += first_row * stride + first_row // group * gap
        skipped = (first_row % group).to(tl.int32)
    start = first_row * length
    num_left = num_elements - start
    if other is not None:
        other += start
    if shift is not None:
        shift += first_row * shift_stride
    n = tl.minimum(num_left, steps * ROWS * length)
    last_row = ((n - 1) // length).to(tl.int32)
    if HISTOGRAM & NEEDS:
        count(
            tensor, other, sign, shift, shift_stride, scale, n, length, stride, group, gap, skipped, counts, False, ROWS, COLUMNS, IS_FLAT
        )
    if FINE_COUNTS & NEEDS:
        count(
            tensor, other, sign, shift, shift_stride, scale, n, length, stride, group, gap, skipped, fine_counts, True, ROWS, COLUMNS,
            IS_FLAT,
        )  # fmt: skip
    # The median of three elements: a first element may be far from all others. If it is not finite, the mean is not.
    center_column, last_column = 0, 0
    if not IS_FLAT:
        center_column, last_column = length // 2, length - 1
    first = element(tensor, other, sign, shift, scale, 0, 0, length, stride, shift_stride, group, gap, skipped, num_left, IS_FLAT)
    middle = element(
        tensor, other, sign, shift, scale, last_row // 2, center_column, length, stride, shift_stride, group, gap, skipped, num_left,
        IS_FLAT,
    )  # fmt: skip
    last = element(
        tensor, other, sign, shift, scale, last_row, last_column, length, stride, shift_stride, group, gap, skipped, num_left, IS_FLAT
    )
    center = tl.maximum(tl.minimum(first, middle), tl.minimum(tl.maximum(first, middle), last))
    center = tl.where(tl.abs(center) < INFINITY, center, 0.0)

    s1, s2, s3, s4, squares, magnitude, norm, largest, maximum, minimum, num_nan, zeros, nonfinite = _pass(
        tensor, other, sign, shift, shift_stride, scale, n, length, stride, group, gap, skipped, center,
        NEEDS, ROWS, COLUMNS, IS_FLAT, IN_PAIRS,
    )  # fmt: skip
    if IN_PAIRS and center.dtype == tl.float32:  # noqa: SIM102  # known when it is compiled; the next is not
        # Not if it is NaN, nor for zeros alone.
        if (largest > LARGEST_IN_PAIRS) | ((largest < SMALLEST_IN_PAIRS) & (largest > 0)):
            s1, s2, s3, s4, squares, magnitude, norm, _, _, _, _, _, _ = _pass(
                tensor, other, sign, shift, shift_stride, scale, n, length, stride, group, gap, skipped, center,
                SUMS & NEEDS, ROWS, COLUMNS, IS_FLAT, False,
            )  # fmt: skip
    n = n.to(tl.float64)
    mean, deviations, third, fourth = _about_mean(n, center.to(tl.float64), s1, s2, s3, s4)
    nan = tl.where(num_nan > 0, float("nan"), 0.0)
    _store(
        part, 1, n, mean, deviations, third, fourth, squares, magnitude, maximum + nan, minimum + nan, zeros, nonfinite, n / length, norm,
        norm / tl.sqrt(tl.full([], length, tl.float64)),
    )  # fmt: skip


@triton.jit
def _pass(
    tensor, other, sign, shift, shift_stride, scale, n, length, stride, group, gap, skipped, center,
    NEEDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, IS_FLAT: tl.constexpr, IN_PAIRS: tl.constexpr,
):  # fmt: skip
    """Read a span of ``n`` elements once: its sums, of deviations from ``center`` up to the fourth power, extremes and numbers, in float64.

    With ``IN_PAIRS``, sums of float32 elements are pairs of float32 numbers (:func:`_add`), for devices on which float64 is slow. They are
    right to 1e-11 if the largest magnitude, which is returned too, lies between ``SMALLEST_IN_PAIRS`` and ``LARGEST_IN_PAIRS``.
    """
    nothing = tl.zeros([ROWS, COLUMNS], tl.float32 if IN_PAIRS and center.dtype == tl.float32 else tl.float64)
    # In float64, deviations give the squares: the center is an element, so that little cancels.
    ARE_DERIVED: tl.constexpr = CENTRAL & NEEDS and DEVIATIONS & NEEDS and nothing.dtype == tl.float64
    wide = tl.zeros([ROWS, COLUMNS], tl.float64)
    d1, d2, squares, magnitude, d3, d4 = nothing, nothing, nothing, nothing, wide, wide
    d1_rest, d2_rest, squares_rest, magnitude_rest = nothing, nothing, nothing, nothing
    largest = tl.zeros([ROWS, COLUMNS], center.dtype)
    maximum = tl.full([ROWS, COLUMNS], -INFINITY, center.dtype)
    minimum = tl.full([ROWS, COLUMNS], INFINITY, center.dtype)
    none = tl.zeros([ROWS, COLUMNS], tl.int32)
    is_nan, zeros, nonfinite = none, none, none
    norms = tl.zeros([ROWS], tl.float64)
    for block in range(tl.cdiv(n, ROWS * length).to(tl.int32)):
        row = block * ROWS + tl.arange(0, ROWS)[:, None]
        begin = begin_of(row, length, stride, group, gap, skipped, IS_FLAT)
        token, token_rest = nothing, nothing
        for left in range(0, length, COLUMNS):
            column = left + tl.arange(0, COLUMNS)[None, :]
            x, mask = tile(tensor, other, sign, shift, scale, row, begin, column, length, shift_stride, n)
            if CENTRAL & NEEDS:
                d, d_rest = _minus(x, center, mask, nothing)
                d1, d1_rest = _add(d1, d1_rest, d, d_rest)
                if DEVIATIONS & NEEDS:
                    square, square_rest = _square(d, d_rest)
                    d2, d2_rest = _add(d2, d2_rest, square, square_rest)
                if POWERS & NEEDS:
                    e = d.to(tl.float64) + d_rest.to(tl.float64)
                    d3 += e * e * e
                    d4 += (e * e) * (e * e)
            if SQUARES & NEEDS and not ARE_DERIVED:
                square, square_rest = _square(x.to(nothing.dtype), nothing)
                squares, squares_rest = _add(squares, squares_rest, square, square_rest)
            if TOKENS & NEEDS:
                square, square_rest = _square(x.to(nothing.dtype), nothing)
                token, token_rest = _add(token, token_rest, square, square_rest)
            if MAGNITUDE & NEEDS:
                magnitude, magnitude_rest = _add(magnitude, magnitude_rest, tl.abs(x.to(nothing.dtype)), nothing)
            if IN_PAIRS and SUMS & NEEDS:
                largest = tl.maximum(largest, tl.abs(x))
            if EXTREMES & NEEDS:
                maximum = tl.maximum(maximum, tl.where(mask, x, -INFINITY))
                minimum = tl.minimum(minimum, tl.where(mask, x, INFINITY))
                is_nan |= (x != x).to(tl.int32)
            if ZEROS & NEEDS:
                zeros += (mask & (x == 0)).to(tl.int32)
            if NONFINITE & NEEDS:
                nonfinite += (tl.abs(x) < INFINITY).to(tl.int32) ^ 1
        if TOKENS & NEEDS:
            norms += tl.sqrt(tl.sum(token.to(tl.float64) + token_rest.to(tl.float64), 1))

    s1 = _sum(d1, CENTRAL & NEEDS) + _sum(d1_rest, CENTRAL & NEEDS)
    s2 = _sum(d2, DEVIATIONS & NEEDS) + _sum(d2_rest, DEVIATIONS & NEEDS)
    if SQUARES & NEEDS and ARE_DERIVED:
        c = center.to(tl.float64)
        of_all = tl.where(s2 == INFINITY, s2, s2 + 2 * c * s1 + n.to(tl.float64) * c * c)  # infinite deviations have either sign
    else:
        of_all = _sum(squares, SQUARES & NEEDS) + _sum(squares_rest, SQUARES & NEEDS)
    return (
        s1,
        s2,
        _sum(d3, POWERS & NEEDS),
        _sum(d4, POWERS & NEEDS),
        of_all,
        _sum(magnitude, MAGNITUDE & NEEDS) + _sum(magnitude_rest, MAGNITUDE & NEEDS),
        _sum(norms, TOKENS & NEEDS),
        tl.max(largest),
        tl.max(maximum).to(tl.float64),
        tl.min(minimum).to(tl.float64),
        _sum(is_nan, EXTREMES & NEEDS),
        _sum(zeros, ZEROS & NEEDS),
        _sum(nonfinite, NONFINITE & NEEDS),
    )


@triton.jit
def _minus(x, center, mask, like):
    """A difference in the type of ``like``, 0 where ``mask`` is false, and what rounding took from it."""
    if like.dtype == tl.float64:
        d, rest = tl.where(mask, x.to(tl.float64) - center.to(tl.float64), 0.0), like  # one conversion, as other sums have it, too
    else:
        x = tl.where(mask, x, center)
        d = x - center
        taken = d - x
        rest = (x - (d - taken)) - (center + taken)
    return d, rest


@triton.jit
def _square(x, rest):
    """The square of a number and its rest, and what rounding took from it: of float32 the product of its upper halves, and the others."""
    if x.dtype == tl.float64:
        square = x * x
    else:
        upper = (x.to(tl.int32, bitcast=True) & UPPER_HALF).to(tl.float32, bitcast=True)
        lower = (x - upper) + rest
        square, rest = upper * upper, (2 * upper + lower) * lower
    return square, rest


@triton.jit
def _add(total, rest, term, rest_of_term):
    """Add a term to a sum; in float32 ``rest`` has what rounding takes from it, exactly (D. Knuth, TwoSum)."""
    if total.dtype == tl.float64:
        total += term
    else:
        before = total
        total += term
        added = total - before
        rest += ((before - (total - added)) + (term - added)) + rest_of_term
    return total, rest


@triton.jit(do_not_specialize=["num_launches", "num_rows", "row_stride", "field_stride"])
def merge(parts, launches, num_launches, num_rows, merged, row_stride, field_stride, LANES: tl.constexpr):
    """Merge the parts of a row, by a program for each row.

    ``launches``, int64, has the index of the first launch of each row, and their total; then for each launch its first part, and then
    for each launch the number of its parts. ``merged`` has ``FIELDS`` numbers for each row.
    """
    row = tl.program_id(0)
    begin, end = tl.load(launches + row), tl.load(launches + row + 1)
    firsts = launches + num_rows + 1
    center = tl.load(parts + tl.load(firsts + begin, mask=begin < end, other=0) * FIELDS + 1, mask=begin < end, other=0.0)
    center = tl.where(tl.abs(center) < INFINITY, center, 0.0)

    nothing = tl.zeros([LANES], tl.float64)
    n, d1, d2, d3, d4, squares, magnitude = nothing, nothing, nothing, nothing, nothing, nothing, nothing
    zeros, nonfinite, tokens, norm, rms = nothing, nothing, nothing, nothing, nothing
    maximum, minimum = tl.full([LANES], -INFINITY, tl.float64), tl.full([LANES], INFINITY, tl.float64)
    is_nan = tl.zeros([LANES], tl.int32)
    for launch in range(begin, end):
        first, num_parts = tl.load(firsts + launch), tl.load(firsts + num_launches + launch)
        for start in range(0, num_parts, LANES):
            index = start + tl.arange(0, LANES)
            mask = index < num_parts
            part = parts + (first + index) * FIELDS
            m = tl.load(part, mask, 0.0)
            d = tl.where(mask, tl.load(part + 1, mask, 0.0) - center, 0.0)
            second, third = tl.load(part + 2, mask, 0.0), tl.load(part + 3, mask, 0.0)
            # As Moments.about.
            n += m
            d1 += m * d
            d2 += second + m * d * d
            d3 += third + 3 * d * second + m * d * d * d
            d4 += tl.load(part + 4, mask, 0.0) + 4 * d * third + 6 * d * d * second + m * d * d * d * d
            squares += tl.load(part + 5, mask, 0.0)
            magnitude += tl.load(part + 6, mask, 0.0)
            top, bottom = tl.load(part + 7, mask, -INFINITY), tl.load(part + 8, mask, INFINITY)
            maximum, minimum = tl.maximum(maximum, top), tl.minimum(minimum, bottom)
            is_nan |= (top != top).to(tl.int32)
            zeros += tl.load(part + 9, mask, 0.0)
            nonfinite += tl.load(part + 10, mask, 0.0)
            tokens += tl.load(part + 11, mask, 0.0)
            norm += tl.load(part + 12, mask, 0.0)
            rms += tl.load(part + 13, mask, 0.0)
    n = tl.sum(n)
    mean, deviations, third, fourth = _about_mean(n, center, tl.sum(d1), tl.sum(d2), tl.sum(d3), tl.sum(d4))
    nan = tl.where(tl.max(is_nan) > 0, float("nan"), 0.0)
    _store(
        merged + row * row_stride, field_stride, n, mean, deviations, third, fourth, tl.sum(squares), tl.sum(magnitude),
        tl.max(maximum) + nan, tl.min(minimum) + nan, tl.sum(zeros), tl.sum(nonfinite), tl.sum(tokens), tl.sum(norm), tl.sum(rms),
    )  # fmt: skip


@triton.jit
def _sum(tile, IS_NEEDED: tl.constexpr):
    if IS_NEEDED:
        total = tl.sum(tile.to(tl.float64))
    else:
        total = tl.full([], 0.0, tl.float64)  # the compiler does not drop a sum of zeros
    return total


@triton.jit
def _about_mean(n, center, d1, d2, d3, d4):
    """As ``Moments.about_mean``: the mean and the central sums, from sums of powers of deviations from a center."""
    d = d1 / tl.maximum(n, 1.0)
    deviations = d2 - n * d * d
    third = d3 - 3 * d * d2 + 2 * n * d * d * d
    fourth = d4 - 4 * d * d3 + 6 * d * d * d2 - 3 * n * d * d * d * d
    # Not by maximum, which makes zero of NaN.
    return center + d, tl.where(deviations < 0, 0.0, deviations), third, tl.where(fourth < 0, 0.0, fourth)


@triton.jit
def _store(
    to, stride, elements, mean, deviations, third, fourth, squares, magnitude, maximum, minimum, zeros, nonfinite, tokens, norm, rms
):  # fmt: skip
    """Write the fields of ``Moments``, in their order."""
    tl.store(to, elements)
    tl.store(to + stride, mean)
    tl.store(to + 2 * stride, deviations)
    tl.store(to + 3 * stride, third)
    tl.store(to + 4 * stride, fourth)
    tl.store(to + 5 * stride, squares)
    tl.store(to + 6 * stride, magnitude)
    tl.store(to + 7 * stride, maximum)
    tl.store(to + 8 * stride, minimum)
    tl.store(to + 9 * stride, zeros)
    tl.store(to + 10 * stride, nonfinite)
    tl.store(to + 11 * stride, tokens)
    tl.store(to + 12 * stride, norm)
    tl.store(to + 13 * stride, rms)
