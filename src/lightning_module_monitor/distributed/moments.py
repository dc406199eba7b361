"""Rows of moments over several ranks: two collectives, whatever the number of rows and ranks. Copies count once.

Parameters that are not laid out over ranks are *replicas*: every rank has them, and all should have the same. The first collective, a
maximum, shows whether they do.

Ranks that share their input, as tensor parallel ones do, may have equal copies or different parts of a tensor. Its *fingerprint* shows
which: two integers made from all its figures, which differ with near certainty where any figure differs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_module_monitor.distributed.ranks import Ranks
from lightning_module_monitor.kernels.moments import Moments

BITS = 31
"""Bits of each integer. Those of a million ranks still add up exactly in float64."""

# The finalizer of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014), as signed integers.
_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


class Fingerprints(NamedTuple):
    """Show which items are equal on the ranks that share their input: a replicated activation, for example, counts once."""

    values: Tensor
    """Integers from 0 to ``2**BITS - 1``, float64, shape ``(2, items)``."""
    of_numbers: Tensor
    """The item that each number to be summed belongs to (all fields of the moments, then ``summed``), int64; ``items``: to none."""


ROUNDING = 1e-12
"""Relative difference of a float64 number between ranks that have the same tensor, and added it up in another order."""


class Replicas(NamedTuple):
    """Items that every rank should have alike, as a parameter that is not laid out over ranks: where all do, the first rank's counts."""

    first_rows: Tensor
    """The row of each item that is compared: by its number of elements, mean and sum of squares. Int64, shape ``(items,)``."""
    are_parts: Tensor
    """Whether this rank has a part of an item that no other rank counts, float64, shape ``(items,)``."""
    of_numbers: Tensor
    """As in :class:`Fingerprints`."""

    def checks(self, moments: Moments) -> Tensor:
        """Numbers whose maximum over ranks shows whether all have the same: shape ``(7, items)``."""
        known = torch.stack([moments.elements, moments.mean, moments.squares])[:, self.first_rows]
        largest = torch.finfo(known.dtype).max
        known = known.nan_to_num(largest, largest, -largest)
        return torch.cat([known, -known, self.are_parts.unsqueeze(0)])

    @staticmethod
    def compared(checks: Tensor) -> tuple[Tensor, Tensor]:
        """Which items all ranks have alike, and which ones differ between ranks, by the maxima of the checks."""
        largest, smallest, are_parts = checks[:3], -checks[3:6], checks[6] > 0
        elements, _mean, squares = largest
        size = torch.stack([elements, (squares / elements.clamp(min=1.0)).sqrt(), squares])
        is_same = (largest - smallest <= ROUNDING * size).all(0)
        return is_same & ~are_parts, ~(is_same | are_parts)


def fingerprints_of(numbers: Tensor, items: Tensor, num_items: int) -> Tensor:
    """:attr:`Fingerprints.values` from everything that is known of the items.

    Args:
        numbers: Float64, shape ``(numbers,)``, in an order that every rank has alike. Every NaN is the same, and so is every zero.
        items: The item that each number belongs to, int64, of the same shape; ``num_items`` where it belongs to none.
        num_items: Number of items.
    """
    bits = torch.where(numbers.isnan(), torch.nan, numbers + 0.0).view(torch.int64)
    mixed = _mixed(bits + _GOLDEN * torch.arange(1, len(bits) + 1, device=bits.device))
    of_items = _mixed(torch.zeros(num_items + 1, dtype=torch.int64, device=bits.device).index_add(0, items, mixed))[:num_items]
    mask = (1 << BITS) - 1
    return torch.stack([of_items & mask, (of_items >> BITS) & mask]).double()


def _mixed(bits: Tensor) -> Tensor:
    """Mix integers of 64 bits: each bit of a result depends on all bits of the argument. Overflow wraps around."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        bits = (bits ^ (bits >> shift)) * factor
    return bits ^ (bits >> 31)


class Reduced(NamedTuple):
    """The result of all ranks, the same on every one."""

    moments: Moments
    largest: Tensor
    summed: Tensor
    are_copies: Tensor
    """Which items are copies, boolean, shape ``(items,)``; empty without fingerprints."""
    differ: Tensor
    """Which replicas differ between ranks, boolean, shape ``(items,)``; empty without replicas."""


def reduce_moments(
    moments: Moments,
    largest: Tensor,
    summed: Tensor,
    ranks: Ranks,
    fingerprints: Fingerprints | None = None,
    *,
    replicas: Replicas | None = None,
) -> Reduced:
    """Merge every row with the same row of all other ranks, and reduce further numbers in the same two collectives.

    The deviations of a rank are about its own mean, which the others do not know. So the first collective, a maximum, also
    agrees on a center for every row, the largest of the ranks' means, and the second, a sum, adds sums about it; see
    :meth:`~lightning_module_monitor.kernels.moments.Moments.about`.

    Args:
        moments: This rank's, shape ``(rows,)``; a row that this rank has nothing for is the moments of an empty tensor.
        largest: Numbers to take the maximum of, shape ``(numbers,)``, float64, without NaN.
        summed: Numbers to add up, shape ``(others,)``, float64.
        ranks: Every rank makes this call.
        fingerprints: Where ranks share their input, they show copies, of which only the first rank's count.
        replicas: Rows that all ranks are expected to have alike; the maximum shows whether they do.

    Returns:
        The moments of the tensors of all ranks together, and the two reduced tensors.
    """
    has_any = moments.elements > 0
    extremes = torch.stack([moments.maximum, -moments.minimum])
    # Whether a maximum keeps NaN depends on the backend: NaN travels as a flag.
    own_center = torch.where(has_any & moments.mean.isfinite(), moments.mean, -torch.inf)
    is_nan = extremes.isnan()
    of_rows = torch.cat([extremes.masked_fill(is_nan, -torch.inf), is_nan.double(), own_center.unsqueeze(0)])
    checks = of_rows.new_empty(7, 0) if replicas is None else replicas.checks(moments)
    given = [of_rows, checks, largest]
    arrived = ranks.all_reduce(torch.cat([one.flatten() for one in given]), "max").split([one.numel() for one in given])
    of_rows, checks, largest = (one.view_as(part) for one, part in zip(arrived, given, strict=True))
    are_alike, differ = Replicas.compared(checks)
    maximum, minus_minimum = of_rows[:2].masked_fill(of_rows[2:4] > 0, torch.nan)
    center = torch.where(of_rows[4].isfinite(), of_rows[4], 0.0)

    own = moments._replace(mean=torch.where(has_any, moments.mean, center)).about(center)
    added = torch.stack(tuple(own._replace(maximum=own.mean, minimum=own.mean)))
    numbers = torch.cat([added.flatten(), summed])
    if replicas is not None and ranks.index > 0:
        is_copy = torch.cat([are_alike, are_alike.new_zeros(1)])
        numbers = numbers.masked_fill(is_copy[replicas.of_numbers], 0.0)
    if fingerprints is None:
        reduced, are_copies = ranks.all_reduce(numbers, "sum"), torch.empty(0, dtype=torch.bool, device=numbers.device)
    else:
        reduced, are_copies = _summed_once(numbers, fingerprints, ranks)
    total = Moments(*reduced[: added.numel()].view_as(added))
    together = total.about_mean(center)._replace(maximum=maximum, minimum=-minus_minimum)
    return Reduced(together, largest, reduced[added.numel() :], are_copies, differ)


def _summed_once(numbers: Tensor, fingerprints: Fingerprints, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """The sum over all ranks, of copies over the first of those that share their input; and which items are copies.

    Only the sum shows which they are. So the numbers of first ranks and those of all others are summed apart, and with them the
    fingerprints: times the number of others on a first rank, times -1 on each of the others. Where all are equal they add up to zero.
    """
    nothing, is_first = torch.zeros_like(numbers), ranks.place == 0
    of_place = [numbers, nothing] if is_first else [nothing, numbers]
    factor = ranks.num_sharing - 1 if is_first else -1
    reduced = ranks.all_reduce(torch.cat([*of_place, (fingerprints.values * factor).flatten()]), "sum")
    of_first, of_others, of_fingerprints = reduced.split([len(numbers), len(numbers), fingerprints.values.numel()])
    are_copies = (of_fingerprints.view_as(fingerprints.values) == 0).all(0)
    is_copy = torch.cat([are_copies, are_copies.new_zeros(1)])[fingerprints.of_numbers]
    return of_first + of_others.masked_fill(is_copy, 0.0), are_copies
