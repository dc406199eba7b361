"""Merge rows of moments over ranks, by two collectives for any number of rows and ranks. Copies count once.

Unsharded parameters are *replicas*: they should be equal on all ranks, and the first collective, a maximum, shows whether they are.

Ranks that share their input, e.g. in tensor parallel training, hold either copies or different parts of a tensor. Its *fingerprint* shows
which: two integers computed from all its figures, which differ with near certainty if any figure differs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_module_monitor.distributed.ranks import Ranks
from lightning_module_monitor.kernels.moments import Moments

BITS = 31
"""Bits of each integer. The sum over a million ranks is still exact in float64."""

# The finalizer of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014), as signed integers.
_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


class Fingerprints(NamedTuple):
    """Fingerprints of items (streams), to find those that are equal on the ranks that share their input."""

    values: Tensor
    """Integers from 0 to ``2**BITS - 1``, float64, shape ``(2, items)``."""
    item_of_number: Tensor
    """Item of each number to be summed (all fields of the moments, then ``summed``), int64; the number of items stands for none."""


ROUNDING = 1e-12
"""Relative difference between float64 sums of the same tensor in a different order."""


class Replicas(NamedTuple):
    """Items that must be equal on all ranks, such as unsharded parameters; rank 0's copy counts."""

    first_rows: Tensor
    """Row of each item whose number of elements, mean and sum of squares are compared. Int64, shape ``(items,)``."""
    are_parts: Tensor
    """Whether this rank holds a part of an item that no other rank counts, float64, shape ``(items,)``."""
    item_of_number: Tensor
    """As in :class:`Fingerprints`."""

    def checks(self, moments: Moments) -> Tensor:
        """Numbers whose maxima over ranks show whether the items are equal: shape ``(7, items)``."""
        figures = torch.stack([moments.elements, moments.mean, moments.squares])[:, self.first_rows]
        largest = torch.finfo(figures.dtype).max
        figures = figures.nan_to_num(largest, largest, -largest)
        return torch.cat([figures, -figures, self.are_parts.unsqueeze(0)])

    @staticmethod
    def compared(checks: Tensor) -> tuple[Tensor, Tensor]:
        """Which items are equal on all ranks, and which differ, by the maxima of the checks."""
        largest, smallest, are_parts = checks[:3], -checks[3:6], checks[6] > 0
        elements, _mean, squares = largest
        size = torch.stack([elements, (squares / elements.clamp(min=1.0)).sqrt(), squares])
        is_same = (largest - smallest <= ROUNDING * size).all(0)
        return is_same & ~are_parts, ~(is_same | are_parts)


def fingerprints_of(numbers: Tensor, items: Tensor, num_items: int) -> Tensor:
    """:attr:`Fingerprints.values` from all numbers of the items.

    Args:
        numbers: Float64, shape ``(numbers,)``, in the same order on all ranks. All NaN are equal, and so are both zeros.
        items: Item of each number, int64, of the same shape; ``num_items`` stands for none.
        num_items: Number of items.
    """
    bits = torch.where(numbers.isnan(), torch.nan, numbers + 0.0).view(torch.int64)
    mixed = _mixed(bits + _GOLDEN * torch.arange(1, len(bits) + 1, device=bits.device))
    sums = torch.zeros(num_items + 1, dtype=torch.int64, device=bits.device).index_add(0, items, mixed)
    hashes = _mixed(sums)[:num_items]
    mask = (1 << BITS) - 1
    return torch.stack([hashes & mask, (hashes >> BITS) & mask]).double()


def _mixed(bits: Tensor) -> Tensor:
    """Mix integers of 64 bits: each bit of a result depends on all bits of the argument. Overflow wraps around."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        bits = (bits ^ (bits >> shift)) * factor
    return bits ^ (bits >> 31)


class ReducedMoments(NamedTuple):
    """The result of all ranks, equal on every rank."""

    moments: Moments
    largest: Tensor
    summed: Tensor
    are_copies: Tensor
    """Which items are copies, boolean, shape ``(items,)``; empty without fingerprints."""
    differ: Tensor
    """Which replicas differ between ranks, boolean, shape ``(items,)``."""


def reduce_moments(
    moments: Moments,
    largest: Tensor,
    summed: Tensor,
    ranks: Ranks,
    replicas: Replicas,
    *,
    fingerprints: Fingerprints | None = None,
) -> ReducedMoments:
    """Merge each row over all ranks, and reduce further numbers in the same two collectives.

    A rank's deviations are about its mean, which other ranks do not know. The first collective, a maximum, therefore agrees on a
    center for each row, the largest mean; the second, a sum, adds sums about that center; see
    :meth:`~lightning_module_monitor.kernels.moments.Moments.about`.

    Args:
        moments: Moments of this rank, shape ``(rows,)``; those of an empty tensor for rows that it has not observed.
        largest: Numbers to take the maximum of, shape ``(numbers,)``, float64, without NaN.
        summed: Numbers to add, shape ``(others,)``, float64.
        ranks: Every rank makes this call.
        replicas: Items that must be equal on all ranks.
        fingerprints: Show copies on ranks that share their input; only the first rank's copy counts.

    Returns:
        The moments of the tensors of all ranks together, and the two reduced tensors.
    """
    is_observed = moments.elements > 0
    extremes = torch.stack([moments.maximum, -moments.minimum])
    # Whether a maximum propagates NaN depends on the backend: NaN is sent as a flag.
    is_nan = extremes.isnan()
    center = torch.where(is_observed & moments.mean.isfinite(), moments.mean, -torch.inf)
    row_numbers = torch.cat([extremes.masked_fill(is_nan, -torch.inf), is_nan.double(), center.unsqueeze(0)])
    parts = [row_numbers, replicas.checks(moments), largest]
    maxima = ranks.all_reduce(torch.cat([part.flatten() for part in parts]), "max").split([part.numel() for part in parts])
    row_numbers, checks, largest = (values.view_as(part) for values, part in zip(maxima, parts, strict=True))
    are_equal, differ = Replicas.compared(checks)
    maximum, minus_minimum = row_numbers[:2].masked_fill(row_numbers[2:4] > 0, torch.nan)
    center = torch.where(row_numbers[4].isfinite(), row_numbers[4], 0.0)

    sums = moments._replace(mean=torch.where(is_observed, moments.mean, center)).about(center)
    stacked = torch.stack(tuple(sums._replace(maximum=sums.mean, minimum=sums.mean)))
    numbers = torch.cat([stacked.flatten(), summed])
    if ranks.index > 0:
        is_copy = torch.cat([are_equal, are_equal.new_zeros(1)])
        numbers = numbers.masked_fill(is_copy[replicas.item_of_number], 0.0)
    if fingerprints is None:
        reduced, are_copies = ranks.all_reduce(numbers, "sum"), torch.empty(0, dtype=torch.bool, device=numbers.device)
    else:
        reduced, are_copies = _summed_once(numbers, fingerprints, ranks)
    total = Moments(*reduced[: stacked.numel()].view_as(stacked))
    merged = total.about_mean(center)._replace(maximum=maximum, minimum=-minus_minimum)
    return ReducedMoments(merged, largest, reduced[stacked.numel() :], are_copies, differ)


def _summed_once(numbers: Tensor, fingerprints: Fingerprints, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Sum over all ranks, counting the copies of ranks that share their input once; also returns which items are copies.

    Only the sum shows which items are copies. The numbers of first ranks and of all others are therefore summed separately, together with
    the fingerprints, multiplied by the number of others on a first rank and by -1 on the others: if all are equal, the sum is zero.
    """
    zeros, is_first = torch.zeros_like(numbers), ranks.sharing_index == 0
    separated = [numbers, zeros] if is_first else [zeros, numbers]
    factor = ranks.num_sharing - 1 if is_first else -1
    reduced = ranks.all_reduce(torch.cat([*separated, (fingerprints.values * factor).flatten()]), "sum")
    firsts, others, fingerprint_sums = reduced.split([len(numbers), len(numbers), fingerprints.values.numel()])
    are_copies = (fingerprint_sums.view_as(fingerprints.values) == 0).all(0)
    is_copy = torch.cat([are_copies, are_copies.new_zeros(1)])[fingerprints.item_of_number]
    return firsts + others.masked_fill(is_copy, 0.0), are_copies
