"""The channels of a layer's output: their root mean squares, and which of them stand out."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from lightning_module_monitor.kernels.moments import Array
from lightning_module_monitor.kernels.torch_kernel import CPU_PORTION, PORTION, has_float64

MAX_CHANNELS = 4096
"""Limit of observed channels. In larger layers evenly spaced channels are observed."""

OUTLYING = 6.0
"""A channel whose rms is more than so many times the median of all is an outlier."""


def channel_dimension(tensor: Tensor) -> int:
    """The dimension of channels: the second one of four or five, else the last; -1 for a tensor without dimensions."""
    return 1 if tensor.dim() in (4, 5) else tensor.dim() - 1


@dataclass(frozen=True)
class ChannelSums:
    """The sums of a stream's channels, which are merged as counts are: first their squares, then their numbers of elements."""

    num_counts: int = 2 * MAX_CHANNELS
    """Length of a row."""


CHANNEL_SUMS = ChannelSums()


def channel_sums(tensor: Tensor) -> Tensor:
    """The sum of squares and the number of elements of each channel.

    Args:
        tensor: Any shape, with at least one element.

    Returns:
        Shape ``(2, channels)``, at most ``MAX_CHANNELS``, float64, float32 on a device without it.
    """
    wide = torch.float64 if has_float64(tensor.device) else torch.float32
    tensor = tensor if tensor.dim() > 1 else tensor.reshape(1, -1)
    dimension = channel_dimension(tensor)
    num_channels = tensor.shape[dimension]
    others = [axis for axis in range(tensor.dim()) if axis != dimension]
    # In portions, each of which is widened: norms of columns are eight times slower on a CPU.
    portion = CPU_PORTION if tensor.is_cpu else PORTION
    portions = tensor.split(max(1, portion * len(tensor) // tensor.numel()))
    squares = functools.reduce(torch.add, (part.to(wide).square().sum(others) for part in portions))
    squares = squares[:: -(-num_channels // MAX_CHANNELS)]
    return torch.stack([squares, torch.full_like(squares, tensor.numel() / num_channels)])


def in_both(sums: Tensor, other: Tensor) -> Tensor:
    """The sums of two tensors together, whose numbers of channels may differ; shape ``(2, most channels)``."""
    longer, shorter = (sums, other) if sums.shape[1] >= other.shape[1] else (other, sums)
    return longer + nn.functional.pad(shorter, (0, longer.shape[1] - shorter.shape[1]))


def padded(sums: Array) -> Array:
    """:func:`channel_sums`, of shape ``(2 * channels,)``, as a row whose length does not depend on the number of channels."""
    pairs = sums.reshape(2, -1)
    return np.pad(pairs, ((0, 0), (0, MAX_CHANNELS - pairs.shape[1]))).reshape(-1)


def outlier_channels(row: Array) -> float:
    """The number of channels that stand out, from a row of sums; NaN without channels, or if an element is not finite."""
    squares, elements = row.reshape(2, -1)
    rms = np.sqrt(squares[elements > 0] / elements[elements > 0])
    return float(np.count_nonzero(rms > OUTLYING * np.median(rms))) if len(rms) and np.isfinite(rms).all() else math.nan
