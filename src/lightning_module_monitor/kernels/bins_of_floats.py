"""Bins of floats, from their bits: comparisons of integers, without rounding. There are two sets, ``HISTOGRAM`` and ``FINE``.

A *row of counts* is in the order of the values: minus infinity, the bins of negative numbers, that of zero, those of positive numbers,
infinity, NaN.
The bins of both signs mirror each other, and the *distance* of a bin is how far it lies from that of zero.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_module_monitor import histogram
from lightning_module_monitor.kernels.moments import Need
from lightning_module_monitor.kernels.number_formats import NUMBER_FORMATS

NUM_REPLICAS = 64
"""Rows that the counts of a tensor are spread over on an accelerator, so that atomic additions seldom collide."""


_ENCODINGS: dict[torch.dtype, tuple[Any, Any, int, int]] = {
    torch.float32: (np.float32, np.int32, 8, 23),
    torch.float64: (np.float64, np.int64, 11, 52),
}
"""IEEE 754 formats: their dtype in numpy, the integer dtype of the same size, and the sizes of exponent and mantissa."""


class Edge(NamedTuple):
    """Where a bin ends and another begins."""

    magnitude: float
    is_below: bool
    """Whether the magnitude itself is in the bin below the edge."""


@dataclass(frozen=True)
class Bins:
    """A set of bins: for each sign one below the first edge, one above each edge, and one for zero. Copies of a set are equal.

    Attributes:
        need: The bit of ``Need`` that asks for it.
        edges: Ascending, all of them floats of 32 bits.
        mantissa_size: So many leading bits of the mantissa distinguish numbers with an edge between them, except for a single edge.
    """

    need: int
    edges: tuple[Edge, ...] = field(compare=False)
    mantissa_size: int = field(compare=False)

    @functools.cached_property
    def zero_bin(self) -> int:
        """Index of the zeros in a row of counts; also the distance of infinity."""
        return len(self.edges) + 2

    @functools.cached_property
    def num_counts(self) -> int:
        """Length of a row of counts."""
        return 2 * self.zero_bin + 2


HISTOGRAM = Bins(
    Need.HISTOGRAM,
    tuple(Edge(2.0**exponent, is_below=False) for exponent in range(histogram.LOWEST_EXPONENT, histogram.HIGHEST_EXPONENT + 2)),
    mantissa_size=0,
)
"""The bins of ``Histogram``."""

LOWEST_OCTAVE, HIGHEST_OCTAVE = -149, 127
"""Exponents of the smallest float32, which is subnormal, and of the largest."""

BINS_OF_OCTAVE = 8
STEPS = tuple(round((2 ** (step / BINS_OF_OCTAVE) - 1) * 2**23) for step in range(1, BINS_OF_OCTAVE))
"""Mantissas of the edges in an octave: those of float32 that are nearest to eighths of an octave."""

LIMITS = tuple(Edge(form.beyond, is_below=not form.is_beyond_rounded_away) for form in NUMBER_FORMATS.values())
"""Where a cast leaves the range of a format."""

_OCTAVES = [2.0**exponent for exponent in range(LOWEST_OCTAVE, HIGHEST_OCTAVE + 1)]
FINE = Bins(
    Need.FINE_COUNTS,
    tuple(
        sorted(
            [
                *(Edge(octave * (1 + step / 2**23), is_below=True) for octave in _OCTAVES for step in (0, *STEPS)),
                *LIMITS,
            ]
        )
    ),
    mantissa_size=6,
)
"""Eight bins for each octave of float32, ``(2**k, 2**(k + 1)]``, with edges at all limits besides: 35 KB of counts.
No number in a bin differs from its middle by more than 4.4 %."""

ALL_BINS = (HISTOGRAM, FINE)


def needed_bins(needs: int) -> tuple[Bins, ...]:
    """The sets of bins that bits of ``Need`` ask for."""
    return tuple(bins for bins in ALL_BINS if needs & bins.need) if needs & Need.COUNTS else ()


def counts_of(tensor: Tensor, bins: Bins, widest: torch.dtype = torch.float64) -> Tensor:
    """The row of counts of a tensor, by torch operations that do not synchronize with the device.

    Args:
        tensor: Any shape, any real floating dtype, strided, without a graph.
        bins: The set of bins.
        widest: The widest dtype of the device, float64 or float32.

    Returns:
        Counts, int64, shape ``(bins.num_counts,)``, on the tensor's device.
    """
    # Narrower dtypes fit into wider ones without a rounding. A subnormal float32 is a normal float64, whose mantissa tells its bin.
    dtype = tensor.dtype if tensor.dtype == torch.float64 else widest if bins == FINE else torch.float32
    wide = tensor.to(dtype).resolve_neg().reshape(-1)
    _floats, _integers, exponent_size, mantissa_size = _ENCODINGS[dtype]
    thresholds, indices = _cells_on(tensor.device, bins, dtype)
    bits = wide.view(thresholds.dtype)
    cells = (bits >> (mantissa_size - bins.mantissa_size)).bitwise_and_((1 << (1 + exponent_size + bins.mantissa_size)) - 1)
    is_above = (bits & torch.iinfo(bits.dtype).max) >= thresholds.index_select(0, cells)
    index = indices.index_select(0, cells.mul_(2).add_(is_above))
    return torch.bincount(index, minlength=bins.num_counts) if index.is_cpu else scattered_counts(index, bins.num_counts)


@functools.cache
def cells_of(bins: Bins, dtype: torch.dtype) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """The index of a float in a row of counts by its *cell*, which is its sign, exponent, and leading bits of its mantissa.

    Returns:
        For each cell the bits of the magnitude where a bin begins within the cell, or more than any; for each cell two indices, of
        magnitudes below and from there on. Where several bins begin within a cell, as for subnormal numbers, all but the first are lost.
    """
    floats, integers, exponent_size, mantissa_size = _ENCODINGS[dtype]
    bits = np.array([math.inf, *(edge.magnitude for edge in bins.edges)], dtype=floats).view(integers)
    is_below = np.array([edge.is_below for edge in bins.edges])
    # By distance: what is not zero, the bins, infinity, NaN.
    starts = np.concatenate([[1], bits[1:] + is_below, [bits[0], bits[0] + 1]])
    shift = mantissa_size - bins.mantissa_size
    least = np.arange(1 << (exponent_size + bins.mantissa_size)) << shift
    distance = np.searchsorted(starts, least, side="right")
    maximum = np.iinfo(integers).max
    threshold = np.minimum(np.append(starts, maximum)[distance], maximum)
    # Each distance is one more from the threshold on, but for that of NaN, which is the largest, whatever the bits.
    distances = np.stack([distance, np.minimum(distance + (threshold - least < 1 << shift), len(starts))], axis=1).reshape(-1)
    # The distance of NaN leads to the last index, with either sign.
    indices = np.concatenate([bins.zero_bin + distances, (bins.zero_bin - distances) % bins.num_counts])
    return np.tile(threshold, 2).astype(integers), indices.astype(np.int32)


@functools.lru_cache(maxsize=32)
def _cells_on(device: torch.device, bins: Bins, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    # It may be called first under inference mode.
    with torch.inference_mode(mode=False):
        thresholds, indices = map(torch.from_numpy, cells_of(bins, dtype))
        return thresholds.to(device), indices.to(device)


def scattered_counts(index: Tensor, num_counts: int) -> Tensor:
    """How often each index occurs, int64, shape ``(num_counts,)``; ``torch.bincount`` would read a value on the host."""
    spread = torch.arange(len(index), device=index.device).remainder_(NUM_REPLICAS).mul_(num_counts).add_(index)
    spread_counts = torch.zeros(NUM_REPLICAS * num_counts, dtype=torch.int64, device=index.device)
    spread_counts.scatter_add_(0, spread, torch.ones_like(spread))
    return spread_counts.view(NUM_REPLICAS, num_counts).sum(0)
