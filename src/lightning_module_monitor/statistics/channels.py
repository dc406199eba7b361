"""The channels of a layer's output: their root mean squares, and which of them stand out."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from lightning_module_monitor.kernels.moments import Array
from lightning_module_monitor.kernels.torch_kernel import CPU_PORTION, PORTION, widest

MAX_CHANNELS = 4096
"""Limit of observed channels. In larger layers evenly spaced channels are observed."""

MAX_UNITS = 1024
"""The same, where only whether they are alive is observed."""

OUTLYING = 6.0
"""A channel whose rms is more than so many times the median of all is an outlier."""


def _with_channels(tensor: Tensor) -> tuple[Tensor, list[int]]:
    """A tensor with at least two dimensions, and those besides the one of channels: the second one of four or five, else the last."""
    tensor = tensor if tensor.dim() > 1 else tensor.reshape(1, -1)
    dimension = 1 if tensor.dim() in (4, 5) else tensor.dim() - 1
    return tensor, [axis for axis in range(tensor.dim()) if axis != dimension]


def channel_sums(tensor: Tensor) -> Tensor:
    """The sum of squares and the number of elements of each channel.

    Args:
        tensor: Any shape, with at least one element.

    Returns:
        Shape ``(2, channels)``, at most ``MAX_CHANNELS``, float64, float32 on a device without it.
    """
    tensor, others = _with_channels(tensor)
    # In portions, each of which is widened: norms of columns are eight times slower on a CPU.
    portion = CPU_PORTION if tensor.is_cpu else PORTION
    portions = tensor.split(max(1, portion * len(tensor) // tensor.numel()))
    squares = functools.reduce(torch.add, (part.to(widest(tensor.device)).square().sum(others) for part in portions))
    num_elements = tensor.numel() / len(squares)
    squares = squares[:: -(-len(squares) // MAX_CHANNELS)]
    return torch.stack([squares, torch.full_like(squares, num_elements)])


def in_both(sums: Tensor, other: Tensor) -> Tensor:
    """The sums of two tensors together, whose numbers of channels may differ; shape ``(2, most channels)``."""
    longer, shorter = (sums, other) if sums.shape[1] >= other.shape[1] else (other, sums)
    return longer + nn.functional.pad(shorter, (0, longer.shape[1] - shorter.shape[1]))


def unit_sums(tensor: Tensor) -> Tensor:
    """For each unit, 1 if it is alive: if it has an element that is not zero, or is NaN. And for each unit 1.

    Args:
        tensor: Any shape, with at least one element. A unit is a channel (dimension 1) of four or five dimensions, else an index along
            the last dimension.

    Returns:
        Shape ``(2, units)``, at most ``MAX_UNITS``, float32.
    """
    tensor, others = _with_channels(tensor)
    # Two reductions of numbers take a tenth of the time of one reduction of booleans.
    alive = torch.logical_or(tensor.amax(others), tensor.amin(others))
    alive = alive[:: -(-len(alive) // MAX_UNITS)]
    sums = torch.ones((2, len(alive)), device=alive.device)
    sums[0] = alive
    return sums


@dataclass(frozen=True)
class ChannelSums:
    """The sums of a stream's channels, which are merged as counts are: first the sums, then the numbers of what was added."""

    measure: Callable[[Tensor], Tensor]
    """Returns both, of a tensor, for each channel: shape ``(2, channels)``."""
    max_channels: int

    @functools.cached_property
    def num_counts(self) -> int:
        """Length of a row."""
        return 2 * self.max_channels

    def row(self, sums: Array) -> Array:
        """The sums as a row whose length does not depend on the number of channels."""
        return np.pad(sums, ((0, 0), (0, self.max_channels - sums.shape[1]))).reshape(-1)


CHANNEL_SUMS, UNIT_SUMS = ChannelSums(channel_sums, MAX_CHANNELS), ChannelSums(unit_sums, MAX_UNITS)


def outlier_channels(row: Array) -> float:
    """The number of channels that stand out, from a row of sums; NaN without channels, or if an element is not finite."""
    squares, elements = row.reshape(2, -1)
    rms = np.sqrt(squares[elements > 0] / elements[elements > 0])
    return float(np.count_nonzero(rms > OUTLYING * np.median(rms))) if len(rms) and np.isfinite(rms).all() else math.nan
