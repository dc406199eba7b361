"""Rows of moments over several ranks: two collectives, whatever the number of rows and ranks."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_module_monitor.statistics.moments import Moments


class Ranks(Protocol):
    """The processes that train together. Every one of them makes the same calls in the same order."""

    index: int
    """Which of them this is."""
    device: torch.device
    """Where tensors are reduced."""

    def all_reduce(self, tensor: Tensor, how: Literal["max", "sum"]) -> Tensor:
        """Reduce a float64 tensor over all ranks, each of which gives one of the same shape.

        Args:
            tensor: This rank's, on :attr:`device`, without NaN where ``how`` is ``max``.
            how: ``max`` or ``sum``.

        Returns:
            The same on every rank.
        """

    def is_copy(self, numbers: Tensor) -> Tensor | None:
        """Which numbers are another rank's to count, because all ranks that get the same input have the same.

        Args:
            numbers: This rank's, float64, shape ``(numbers,)``, on :attr:`device`.

        Returns:
            Boolean, of the same shape; ``None`` where every rank has input of its own. On the first of the ranks that share
            their input all are false.
        """

    def gather(self, one: Any) -> list[Any]:  # noqa: ANN401  # anything that can be pickled
        """What every rank gives, in the order of the ranks: for what is rare, or the user's own."""


class Merged(NamedTuple):
    """What all ranks have together, the same on every one."""

    moments: Moments
    largest: Tensor
    summed: Tensor


def merge_over_ranks(moments: Moments, largest: Tensor, summed: Tensor, ranks: Ranks) -> Merged:
    """Merge every row with the same row of all other ranks, and with the rows what else there is to be reduced.

    The deviations of a rank are about its own mean, which the others do not know. So the first collective, a maximum, also
    agrees on a center for every row, the largest of the ranks' means, and the second, a sum, adds deviations about it::

        n (mean - c)  and  deviations + n (mean - c)^2,  summed over the ranks

    Args:
        moments: This rank's, shape ``(rows,)``; a row that this rank has nothing for is the moments of an empty tensor.
        largest: What the maximum is wanted of, shape ``(numbers,)``, float64, without NaN.
        summed: What the sum is wanted of, shape ``(others,)``, float64.
        ranks: Asked twice, on every rank.

    Returns:
        The moments of the tensors of all ranks together, and the two reduced tensors.
    """
    has_any = moments.elements > 0
    extremes = torch.stack([moments.maximum, -moments.minimum])
    # Whether a maximum keeps NaN depends on who reduces it: NaN travels as a flag.
    own_center = torch.where(has_any & moments.mean.isfinite(), moments.mean, -torch.inf)
    is_nan = extremes.isnan()
    of_rows = torch.cat([extremes.masked_fill(is_nan, -torch.inf), is_nan.double(), own_center.unsqueeze(0)])
    reduced = ranks.all_reduce(torch.cat([of_rows.flatten(), largest]), "max")
    of_rows, largest = reduced[: of_rows.numel()].view_as(of_rows), reduced[of_rows.numel() :]
    maximum, minus_minimum = of_rows[:2].masked_fill(of_rows[2:4] > 0, torch.nan)
    center = torch.where(of_rows[4].isfinite(), of_rows[4], 0.0)

    distance = torch.where(has_any, moments.mean - center, 0.0)
    residual = moments.elements * distance
    added = torch.stack(
        moments._replace(mean=residual, deviations=moments.deviations + residual * distance, maximum=residual, minimum=residual)
    )
    reduced = ranks.all_reduce(torch.cat([added.flatten(), summed]), "sum")
    total = Moments(*reduced[: added.numel()].view_as(added))
    mean_residual = total.mean / total.elements.clamp(min=1.0)
    together = total._replace(
        mean=center + mean_residual,
        deviations=(total.deviations - total.mean * mean_residual).clamp(min=0.0),
        maximum=maximum,
        minimum=-minus_minimum,
    )
    return Merged(together, largest, reduced[added.numel() :])
