"""The channels of a layer's output: the number of outliers, by root mean square."""

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
"""Limit of channels whose sums of squares are taken. In larger layers evenly spaced channels are observed."""

OUTLYING = 6.0
"""A channel whose rms is more than so many times the median of all is an outlier."""


def with_channels(tensor: Tensor) -> tuple[Tensor, list[int]]:
    """The tensor with at least two dimensions, and all dimensions but that of channels: the second of four or five, else the last."""
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
    tensor, others = with_channels(tensor)
    # In portions, each of which is widened: norms of columns are eight times slower on a CPU.
    portion = CPU_PORTION if tensor.is_cpu else PORTION
    portions = tensor.split(max(1, portion * len(tensor) // tensor.numel()))
    squares = functools.reduce(torch.add, (part.to(widest(tensor.device)).square().sum(others) for part in portions))
    num_elements = tensor.numel() / len(squares)
    squares = squares[:: -(-len(squares) // MAX_CHANNELS)]
    return torch.stack([squares, torch.full_like(squares, num_elements)])


def merged_sums(sums: Tensor, other: Tensor) -> Tensor:
    """The sums of two tensors together, whose numbers of channels may differ; shape ``(2, most channels)``."""
    longer, shorter = (sums, other) if sums.shape[1] >= other.shape[1] else (other, sums)
    return longer + nn.functional.pad(shorter, (0, longer.shape[1] - shorter.shape[1]))


@dataclass(frozen=True)
class ChannelSums:
    """Sums over each channel of a stream, and the number of addends of each sum. They are added up as counts are."""

    measure: Callable[[Tensor], Tensor]
    """Returns sums and numbers of a tensor, shape ``(2, channels)``."""
    max_channels: int

    @functools.cached_property
    def num_counts(self) -> int:
        """Length of a row."""
        return 2 * self.max_channels

    def row(self, sums: Array) -> Array:
        """The sums as a row whose length does not depend on the number of channels."""
        return np.pad(sums, ((0, 0), (0, self.max_channels - sums.shape[1]))).reshape(-1)


CHANNEL_SUMS = ChannelSums(channel_sums, MAX_CHANNELS)


@dataclass(frozen=True)
class ChannelStatistic:
    """A statistic that is computed from sums over each channel of a layer.

    Attributes:
        sums: The sums.
        finish: Takes a row of the sums of at least one channel, and returns the statistic.
    """

    sums: ChannelSums
    finish: Callable[[Array], float]


def outlier_channels(row: Array) -> float:
    """The number of channels (units, as above) whose root mean square is more than six times the median of all.

    Of up to 4096 evenly spaced channels. Six times is the limit of LLM.int8() (arXiv 2208.07339), relative to the median channel. NaN if an
    element is not finite.
    """
    squares, elements = row.reshape(2, -1)
    rms = np.sqrt(squares[elements > 0] / elements[elements > 0])
    return float(np.count_nonzero(rms > OUTLYING * np.median(rms))) if np.isfinite(rms).all() else math.nan
