"""The bin of a float is in its bits: sign, exponent, and whether the mantissa is zero. Integer arithmetic finds it, without rounding."""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_module_monitor.histogram import HIGHEST_EXPONENT, LOWEST_EXPONENT, NUM_BINS, NUM_COUNTS

ZERO_PLACE = 1 + NUM_BINS // 2
"""Place of the zeros in a row of counts."""

SPREAD = 64
"""Rows that the counts of a tensor are spread over on an accelerator: elements that are counted at once seldom wait for one another."""


FORMATS = {torch.float32: (torch.int32, 8, 23), torch.float64: (torch.int64, 11, 52)}
"""Of a float (IEEE 754): the integer of its size, and how many bits its exponent and its mantissa have."""


def places_of_codes(exponent_bits: int) -> NDArray[np.int64]:
    """The place of a float in a row of counts, by its code: whether the mantissa is not zero, whether it is negative, exponent's bits.

    Returns:
        Shape ``(2, 2, 2**exponent_bits)``.
    """
    num_exponents = 2**exponent_bits
    exponent = np.arange(num_exponents) - (num_exponents // 2 - 1)
    # 1: smaller than any power of two that has a bin; subnormal numbers of every dtype here are among them.
    distance = np.clip(exponent, LOWEST_EXPONENT - 1, HIGHEST_EXPONENT + 1) - LOWEST_EXPONENT + 2
    places = np.array([[ZERO_PLACE + distance, ZERO_PLACE - distance]] * 2, dtype=np.int64)
    places[0, :, 0] = ZERO_PLACE
    places[0, :, -1] = NUM_COUNTS - 2, 0  # infinities
    places[1, :, -1] = NUM_COUNTS - 1  # NaN
    return places


def counts_of(tensor: Tensor) -> Tensor:
    """The row of counts of a tensor, by torch operations, none of which waits for the device.

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
    places = _places_on(tensor.device, exponent_bits).index_select(0, codes)
    return torch.bincount(places, minlength=NUM_COUNTS) if places.is_cpu else scattered_counts(places)


def scattered_counts(places: Tensor) -> Tensor:
    """The number of elements at each place, int64, shape ``(NUM_COUNTS,)``; ``torch.bincount`` would read a value on the host."""
    spread = torch.arange(len(places), device=places.device).remainder_(SPREAD).mul_(NUM_COUNTS).add_(places)
    spread_counts = torch.zeros(SPREAD * NUM_COUNTS, dtype=torch.int64, device=places.device)
    spread_counts.scatter_add_(0, spread, torch.ones_like(spread))
    return spread_counts.view(SPREAD, NUM_COUNTS).sum(0)


@functools.lru_cache(maxsize=32)
def _places_on(device: torch.device, exponent_bits: int) -> Tensor:
    # It may be called first under inference mode.
    with torch.inference_mode(mode=False):
        return torch.from_numpy(places_of_codes(exponent_bits).reshape(-1)).to(device)
