"""Rows of moments over several ranks: two collectives, whatever the number of rows and ranks."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_module_monitor.distributed.marks import Marks
from lightning_module_monitor.kernels.moments import Moments


class Ranks(Protocol):
    """The processes that train together. Every one of them makes the same calls in the same order."""

    index: int
    """Which of them this is."""
    device: torch.device
    """Where tensors are reduced."""
    place: int
    """Which this is of the ranks that share their input, as tensor parallel ones do; 0 where each has its own."""
    num_sharing: int
    """How many these are; 1 where each has its own."""

    def all_reduce(self, tensor: Tensor, how: Literal["max", "sum"]) -> Tensor:
        """Reduce a float64 tensor over all ranks, each of which gives one of the same shape.

        Args:
            tensor: This rank's, on :attr:`device`, without NaN where ``how`` is ``max``.
            how: ``max`` or ``sum``.

        Returns:
            The same on every rank.
        """

    def gather(self, one: Any) -> list[Any]:  # noqa: ANN401  # anything that can be pickled
        """What every rank gives, in the order of the ranks: for what is rare, or the user's own."""


class Merged(NamedTuple):
    """What all ranks have together, the same on every one."""

    moments: Moments
    largest: Tensor
    summed: Tensor
    are_copies: Tensor
    """Which of the things that marks are of are copies, boolean, shape ``(things,)``; empty without marks."""


def merge_over_ranks(moments: Moments, largest: Tensor, summed: Tensor, ranks: Ranks, marks: Marks | None = None) -> Merged:
    """Merge every row with the same row of all other ranks, and with the rows what else there is to be reduced.

    The deviations of a rank are about its own mean, which the others do not know. So the first collective, a maximum, also
    agrees on a center for every row, the largest of the ranks' means, and the second, a sum, adds sums about it; see
    :meth:`~lightning_module_monitor.kernels.moments.Moments.about`.

    Args:
        moments: This rank's, shape ``(rows,)``; a row that this rank has nothing for is the moments of an empty tensor.
        largest: What the maximum is wanted of, shape ``(numbers,)``, float64, without NaN.
        summed: What the sum is wanted of, shape ``(others,)``, float64.
        ranks: Asked twice, on every rank.
        marks: Where ranks share their input, what tells them of copies, which the first of them alone sums.

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

    own = moments._replace(mean=torch.where(has_any, moments.mean, center)).about(center)
    added = torch.stack(tuple(own._replace(maximum=own.mean, minimum=own.mean)))
    numbers = torch.cat([added.flatten(), summed])
    if marks is None:
        reduced, are_copies = ranks.all_reduce(numbers, "sum"), torch.empty(0, dtype=torch.bool, device=numbers.device)
    else:
        things = torch.cat([marks.of_rows.repeat(len(added)), marks.of_summed])
        reduced, are_copies = _summed_once(numbers, things, marks.marks, ranks)
    total = Moments(*reduced[: added.numel()].view_as(added))
    together = total.about_mean(center)._replace(maximum=maximum, minimum=-minus_minimum)
    return Merged(together, largest, reduced[added.numel() :], are_copies)


def _summed_once(numbers: Tensor, things: Tensor, marks: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """The sum over all ranks, of copies over the first of those that share their input; and which things are copies.

    Which they are is known only when the sum is there. So the numbers of first ranks and those of all others are summed apart,
    and with them the marks: times the number of others on a first rank, times -1 on each of the others. Where all have the same
    these add up to zero, and being integers exactly so.
    """
    nothing, is_first = torch.zeros_like(numbers), ranks.place == 0
    of_place = [numbers, nothing] if is_first else [nothing, numbers]
    factor = ranks.num_sharing - 1 if is_first else -1
    reduced = ranks.all_reduce(torch.cat([*of_place, (marks * factor).flatten()]), "sum")
    of_first, of_others, of_marks = reduced.split([len(numbers), len(numbers), marks.numel()])
    are_copies = (of_marks.view_as(marks) == 0).all(0)
    is_copy = torch.cat([are_copies, are_copies.new_zeros(1)])[things]
    return of_first + of_others.masked_fill(is_copy, 0.0), are_copies
