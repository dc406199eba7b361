"""Moments of many short rows, of which some elements may have to be left out."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_module_monitor.kernels.moments import Moments, Need


def moments_of_rows(values: Tensor, counts: Tensor, needs: int) -> Moments:
    """Moments of the rows of a matrix, of those elements of it that count.

    It happens at once for all rows, in float64 where anything would be lost: for many short rows, of which some elements may have
    to be left out.

    Args:
        values: Shape ``(rows, elements)``, any real floating dtype. Every element is a token of its own.
        counts: Which elements count, of the same shape.
        needs: Which moments to take, bits of :class:`Need`. The others are zero.

    Returns:
        Moments of shape ``(rows,)``, on the device of ``values``.
    """
    if needs & ~(Need.MEAN | Need.EXTREMES):
        values = values.double()
    kept = torch.where(counts, values, 0.0)
    elements = counts.sum(1, dtype=torch.float64)
    nothing = torch.zeros_like(elements)
    found = dict.fromkeys(Moments._fields, nothing) | {"elements": elements, "tokens": elements}
    if needs & (Need.MEAN | Need.DEVIATIONS | Need.POWERS):
        found["mean"] = kept.sum(1, dtype=torch.float64) / elements.clamp(min=1.0)
    if needs & (Need.DEVIATIONS | Need.POWERS):
        d = torch.where(counts, values - found["mean"].unsqueeze(1), 0.0)
        found["deviations"], found["third"], found["fourth"] = d.square().sum(1), d.pow(3).sum(1), d.pow(4).sum(1)
    if needs & Need.SQUARES:
        found["squares"] = kept.square().sum(1)
    if needs & (Need.MAGNITUDE | Need.TOKENS):
        found["magnitude"] = found["token_norm"] = found["token_rms"] = kept.abs().sum(1)
    if needs & Need.EXTREMES:
        found["maximum"] = torch.where(counts, values, -torch.inf).amax(1).double()
        found["minimum"] = torch.where(counts, values, torch.inf).amin(1).double()
    if needs & Need.ZEROS:
        found["zeros"] = (counts & (values == 0)).sum(1).double()
    if needs & Need.NONFINITE:
        found["nonfinite"] = (counts & ~values.isfinite()).sum(1).double()
    return Moments(**found)
