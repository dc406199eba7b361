"""Gradient noise by hand: the gradient of each micro-batch by itself, and the formulas written out."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from lightning_module_monitor import Record

Batch = tuple[Tensor, Tensor]
NAMES = ("noise", "signal", "scale", "largest", "largest_rank", "largest_micro_batch")
Loss = Callable[[nn.Module, Batch], Tensor]


def batches(sizes: Sequence[int], number: int = 0, features: int = 6) -> list[Batch]:
    """Micro-batches of these sizes, in float64."""
    generator = torch.Generator().manual_seed(7 + number)
    return [
        (torch.randn(size, features, generator=generator).double(), torch.randn(size, 3, generator=generator).double()) for size in sizes
    ]


def gradients(model: nn.Module, micro_batches: Sequence[Batch], loss: Loss) -> list[list[Tensor]]:
    """The gradient of each micro-batch by itself, of each parameter."""
    model = copy.deepcopy(model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = []
    for batch in micro_batches:
        grads = torch.autograd.grad(loss(model, batch), parameters, allow_unused=True)
        found.append([torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)])
    return found


def by_hand(grads: Sequence[Sequence[Tensor]], sizes: Sequence[int]) -> dict[str, float]:
    """The formulas of the simple noise scale, written out."""
    flat = [torch.cat([g.double().reshape(-1) for g in each]) for each in grads]
    n = len(flat)
    h = sum(1 / size for size in sizes) / n
    mean = sum(flat) / n
    assert isinstance(mean, Tensor)
    square = float(mean @ mean)
    noise = (sum(float(g @ g) for g in flat) / n - square) / (h - h / n)
    norms = [float(g.norm()) for g in flat]
    return {
        "noise": noise,
        "signal": square - noise * h / n,
        "largest": max(norms) / float(np.median(norms)),
        "largest_micro_batch": norms.index(max(norms)),
    }


def scales(expected: Sequence[dict[str, float]]) -> list[float]:
    """The ratio of the averages over records; NaN while that of the signal is not above 0, and in a record without noise."""
    noise = signal = weight = 0.0
    found = []
    for values in expected:
        if not math.isfinite(values["noise"]):
            found.append(math.nan)
            continue
        noise, signal, weight = 0.95 * noise + 0.05 * values["noise"], 0.95 * signal + 0.05 * values["signal"], 0.95 * weight + 0.05
        found.append((noise / weight) / (signal / weight) if signal > 0 else math.nan)
    return found


def values_of(record: Record | None, site: str = "_root_") -> dict[str, float]:
    """The gradient noise of a site, by name."""
    assert record is not None
    start = f"gradient_noise/{site}/"
    return {key.removeprefix(start): value for key, value in record.values.items() if key.startswith(start)}
