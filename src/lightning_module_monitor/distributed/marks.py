"""Marks: two small integers for all that is known of a thing, by which ranks find out whether they have the same of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BITS = 31
"""Of each of the two. Marks of a million ranks still add up exactly in float64."""

# The finalizer of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014), as signed integers.
_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


class Marks(NamedTuple):
    """What tells whether ranks that share their input have the same of something: a replicated activation, say, which counts once."""

    marks: Tensor
    """Integers from 0 to ``2**BITS - 1``, float64, shape ``(2, things)``: all but sure to differ where anything of a thing does."""
    of_rows: Tensor
    """The thing that a row is of, int64, shape ``(rows,)``; ``things`` where it is of none, and every rank's counts."""
    of_summed: Tensor
    """The thing that a number to be summed is of, in the same way."""


def marks_of(numbers: Tensor, things: Tensor, num_things: int) -> Tensor:
    """The marks of things that numbers are known of.

    Args:
        numbers: Float64, shape ``(numbers,)``, in an order that every rank has alike. Every NaN is the same, and so is every zero.
        things: The thing that each of them is of, int64, of the same shape; ``num_things`` where it is of none.
        num_things: How many there are.

    Returns:
        As :attr:`Marks.marks`.
    """
    bits = torch.where(numbers.isnan(), torch.nan, numbers + 0.0).view(torch.int64)
    mixed = _mixed(bits + _GOLDEN * torch.arange(1, len(bits) + 1, device=bits.device))
    of_things = _mixed(torch.zeros(num_things + 1, dtype=torch.int64, device=bits.device).index_add(0, things, mixed))[:num_things]
    mask = (1 << BITS) - 1
    return torch.stack([of_things & mask, (of_things >> BITS) & mask]).double()


def _mixed(bits: Tensor) -> Tensor:
    """Integers of 64 bits, every bit of each of which depends on all bits of one that came in; what leaves the range wraps around."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        bits = (bits ^ (bits >> shift)) * factor
    return bits ^ (bits >> 31)
