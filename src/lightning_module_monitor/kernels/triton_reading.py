"""How a program of :mod:`.triton_loops` reads its span of a tensor, of a difference or of a product of tensors."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def begin_of(row, length, stride, group, gap, skipped, IS_FLAT: tl.constexpr):
    """Where a row of a span begins in the tensor."""
    begin = row * length
    if not IS_FLAT:
        begin = row * stride
        if gap != 0:  # a division takes longer than a load
            begin += (skipped + row) // group * gap
    return begin


@triton.jit
def tile(tensor, other, sign, shift, scale, row, begin, column, length, shift_stride, n):
    """Elements of rows that begin at ``begin``, and which of them there are."""
    offset = row * length + column
    mask = (column < length) & (offset < n)
    return _load(tensor, other, sign, shift, scale, begin + column, offset, row * shift_stride + column, mask), mask


@triton.jit
def element(
    tensor, other, sign, shift, scale, row, column, length, stride, shift_stride, group, gap, skipped, num_left, IS_FLAT: tl.constexpr
):  # fmt: skip
    """An element of a row of a span; 0 for a tensor without elements."""
    begin = begin_of(row, length, stride, group, gap, skipped, IS_FLAT)
    return _load(tensor, other, sign, shift, scale, begin + column, row * length + column, row * shift_stride + column, num_left > 0)


@triton.jit
def _load(tensor, other, sign, shift, scale, place, offset, shift_offset, mask):
    """Elements of what is measured, zero where ``mask`` is false. Half precision becomes float32, so that it is not rounded again."""
    x = _wide(tl.load(tensor + place, mask=mask, other=0.0))
    if other is not None:
        y = _wide(tl.load(other + offset, mask=mask, other=0.0))
        if sign is None:
            x = x - y
        else:
            x = x.to(tl.float64) * (sign * y).to(tl.float64)  # in which a product of float32 neither rounds nor leaves the range
    if shift is not None:
        x = x - _wide(tl.load(shift + shift_offset, mask=mask, other=0.0))
    if scale is not None:
        divisor = tl.load(scale)
        if x.dtype == tl.float64:
            x = x / divisor.to(tl.float64)
        else:
            x = tl.div_rn(x, divisor.to(tl.float32))  # `/` would not be exact for a power of two
    return x


@triton.jit
def _wide(x):
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    return x
