"""Histogram bins of floats, from their bits (sign, exponent, whether the mantissa is zero): integer arithmetic, without rounding."""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_module_monitor.histogram import HIGHEST_EXPONENT, LOWEST_EXPONENT, NUM_BINS, NUM_COUNTS

ZERO_BIN = 1 + NUM_BINS // 2
"""Index of the zeros in a row of counts."""

SPREAD = 64
"""Rows that the counts of a tensor are spread over on an accelerator, so that atomic additions seldom collide."""

FORMATS = {torch.float32: (torch.int32, 8, 23), torch.float64: (torch.int64, 11, 52)}
"""IEEE 754 formats: the integer dtype of the same size, and the bits of the exponent and of the mantissa."""


def bin_of_code(exponent_bits: int) -> NDArray[np.int64]:
    """Index in a row of counts by the code of a float: whether its mantissa is not zero, whether it is negative, exponent bits.

    Returns:
        Shape ``(2, 2, 2**exponent_bits)``.
    """
    num_exponents = 2**exponent_bits
    exponent = np.arange(num_exponents) - (num_exponents // 2 - 1)
    # 1: smaller than any power of two that has a bin, as subnormal numbers of every dtype here are.
    distance = np.clip(exponent, LOWEST_EXPONENT - 1, HIGHEST_EXPONENT + 1) - LOWEST_EXPONENT + 2
    bins = np.array([[ZERO_BIN + distance, ZERO_BIN - distance]] * 2, dtype=np.int64)
    bins[0, :, 0] = ZERO_BIN
    bins[0, :, -1] = NUM_COUNTS - 2, 0  # infinities
    bins[1, :, -1] = NUM_COUNTS - 1  # NaN
    return bins


def counts_of(tensor: Tensor) -> Tensor:
    """The row of counts of a tensor, by torch operations that do not synchronize with the device.

    Args:
        tensor: Any shape, any real floating dtype, strided, without a graph.

    Returns:
        Counts, int64, shape ``(NUM_COUNTS,)``, on the tensor's device.
    """
    # Narrower dtypes fit into float32 without a rounding, their subnormal numbers as normal ones.
    wide = (tensor if tensor.dtype in FORMATS else tensor.float()).resolve_neg().reshape(-1)
    integers, exponent_bits, mantissa_bits = FORMATS[wide.dtype]
    bits = wide.view(integers)
    mantissa = (1 << mantissa_bits) - 1
    # Bit `mantissa_bits` of the sum is set if any bit of the mantissa is: moved to the left of sign and exponent.
    codes = (bits & mantissa).add_(mantissa).bitwise_right_shift_(mantissa_bits).bitwise_left_shift_(exponent_bits + 1)
    codes |= (bits >> mantissa_bits).bitwise_and_((1 << (exponent_bits + 1)) - 1)
    bins = _bin_of_code_on(tensor.device, exponent_bits).index_select(0, codes)
    return torch.bincount(bins, minlength=NUM_COUNTS) if bins.is_cpu else scattered_counts(bins)


def scattered_counts(bins: Tensor) -> Tensor:
    """The number of elements in each bin, int64, shape ``(NUM_COUNTS,)``; ``torch.bincount`` would read a value on the host."""
    spread = torch.arange(len(bins), device=bins.device).remainder_(SPREAD).mul_(NUM_COUNTS).add_(bins)
    spread_counts = torch.zeros(SPREAD * NUM_COUNTS, dtype=torch.int64, device=bins.device)
    spread_counts.scatter_add_(0, spread, torch.ones_like(spread))
    return spread_counts.view(SPREAD, NUM_COUNTS).sum(0)


@functools.lru_cache(maxsize=32)
def _bin_of_code_on(device: torch.device, exponent_bits: int) -> Tensor:
    # It may be called first under inference mode.
    with torch.inference_mode(mode=False):
        return torch.from_numpy(bin_of_code(exponent_bits).reshape(-1)).to(device)
