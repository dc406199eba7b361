"""Fine counts, quantiles and what casts lose, in numpy's float64 and by torch's casts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_module_monitor import STATISTICS
from lightning_module_monitor.statistics.stream import Stream
from lightning_module_monitor.step.accumulator import StepAccumulator

QUANTILES = {"p01": 1, "p05": 5, "p25": 25, "median": 50, "p75": 75, "p95": 95, "p99": 99}
BOUND = 0.045
"""Promised relative error of a quantile."""

# Half the smallest subnormal number, from where on the largest is left, whether that magnitude itself is beyond it, the largest number.
LIMITS = {
    "float16": (2.0**-25, 65520.0, True, 65504.0),
    "bfloat16": (2.0**-134, float.fromhex("0x1.ffp127"), True, 3.3895313892515355e38),
    "float8_e4m3fn": (2.0**-10, 464.0, False, 448.0),
    "float8_e5m2": (2.0**-17, 61440.0, True, 57344.0),
}
OCTAVES = [2.0**exponent for exponent in range(-149, 128)]
# In each octave the float32 that are nearest to its eighths.
BELOW = sorted(octave * float(np.float32(2 ** (step / 8))) for octave in OCTAVES for step in range(8))
"""Edges that belong to the bin below them."""
ABOVE = [beyond for _least, beyond, is_beyond, _largest in LIMITS.values() if is_beyond]
EDGES = np.sort([*BELOW, 464.0, *(np.nextafter(edge, 0) for edge in ABOVE)])
"""The largest float64 below each of them, or itself."""


def fine_counts(x: Tensor) -> np.ndarray:
    """The row of counts in numpy's float64, each element compared with the edges of the bins."""
    a = x.detach().double().numpy().ravel()
    finite = a[np.isfinite(a)]
    distance = np.where(finite == 0, 0, 1 + np.searchsorted(EDGES, np.abs(finite), side="left"))
    most = len(EDGES) + 1
    counts = np.bincount((most + np.sign(finite) * distance).astype(int), minlength=2 * most + 1)
    return np.array([(a == -np.inf).sum(), *counts, (a == np.inf).sum(), np.isnan(a).sum()], dtype=np.int64)


def adversaries(dtype: torch.dtype) -> Tensor:
    """Limits of all formats, edges of bins, powers of two, and their neighbours; subnormal numbers, zeros, infinities, NaN; both signs."""
    info = torch.finfo(dtype)
    limits = [number for least, beyond, _is_beyond, largest in LIMITS.values() for number in (least, 2 * least, 3 * least, beyond, largest)]
    doubles = torch.tensor([*BELOW, *limits, 1e-45, 1e38, *np.linspace(1e-45, 1e-40, 50)], dtype=torch.float64)
    exact = doubles.to(dtype)
    exact = exact[exact.isfinite()].unique()
    near = [torch.nextafter(exact, torch.full_like(exact, bound)) for bound in (0.0, torch.inf)]
    special = torch.tensor([0.0, info.max, info.tiny, info.smallest_normal, torch.inf], dtype=dtype)
    magnitudes = torch.cat([exact, *near, special])
    return torch.cat([magnitudes, -magnitudes, torch.tensor([torch.nan], dtype=dtype)])


def quantile(x: Tensor, percent: int) -> float:
    """The element that at least so many percent are not larger than, by sorting."""
    a = np.sort(x.detach().double().numpy().ravel())
    return float(a[max(-(-percent * len(a) // 100), 1) - 1])


def recorded(tensors: list[Tensor], names: list[str]) -> dict[str, float]:
    """Statistics of all tensors together, as they are recorded."""
    accumulator = StepAccumulator(_fail)
    outputs: Any = {name: STATISTICS[name] for name in names}
    stream = Stream("activation", "fc", outputs)
    for tensor in tensors:
        accumulator.observe(stream, tensor)
    values = accumulator.collect().values
    return {name: values[f"activation/fc/{name}"] for name in names}


def _fail(_stream: Stream, _name: str, _source: str, error: Exception) -> None:
    raise error
