"""Mergeable moments: sums and extremes of a tensor from which every built-in statistic can be finished later.

Rows merge exactly: the moments of two tensors, merged, are the moments of both together. Central sums merge by the formulas of
P. Pébay, "Formulas for robust, one-pass parallel computation of covariances and arbitrary-order statistical moments", 2008; for the
second order these are the formulas of Chan, Golub and LeVeque, 1979.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.float64]
"""A field of moments on the host."""


class Need:
    """The moments that a statistic is finished from, as bits of an integer.

    A moment that no statistic needs is not computed, and must not be read. Integers and not an ``enum.IntFlag``, whose ``&``
    costs as much as a small kernel.
    """

    NOTHING = 0
    MEAN = 1 << 0
    SQUARES = 1 << 1
    DEVIATIONS = 1 << 2
    MAGNITUDE = 1 << 3
    EXTREMES = 1 << 4
    ZEROS = 1 << 5
    NONFINITE = 1 << 6
    TOKENS = 1 << 7
    POWERS = 1 << 8
    """The third and fourth central powers."""

    EVERYTHING = (1 << 9) - 1
    """All moments."""

    HISTOGRAM = 1 << 9
    """Not a moment: a row of counts."""


class Moments(NamedTuple):
    """Moments of the rows of a table, each float64, shape ``(rows,)``.

    The fields are tensors on one device while a step runs, and numpy arrays when statistics are finished. ``n`` is the number of
    elements ``x``, and ``m`` their mean.
    """

    elements: Any
    """``n``."""
    mean: Any
    deviations: Any
    """Sum of ``(x - m)**2``."""
    third: Any
    """Sum of ``(x - m)**3``."""
    fourth: Any
    """Sum of ``(x - m)**4``."""
    squares: Any
    """Sum of ``x**2``."""
    magnitude: Any
    """Sum of ``|x|``."""
    maximum: Any
    minimum: Any
    zeros: Any
    """Number of elements that are zero."""
    nonfinite: Any
    """Number of elements that are NaN or infinite."""
    tokens: Any
    """Number of tokens: elements over the size of the last dimension."""
    token_norm: Any
    """Sum over the tokens of their Euclidean norm."""
    token_rms: Any
    """Sum over the tokens of their root mean square."""

    @classmethod
    def of_nothing(cls, num_rows: int) -> Moments:
        """Moments of empty tensors, on the host: the identity of :meth:`merge`."""
        zeros = torch.zeros(num_rows, dtype=torch.float64, device="cpu")
        return cls(*[zeros] * len(cls._fields))._replace(maximum=zeros - torch.inf, minimum=zeros + torch.inf)

    @classmethod
    def joined(cls, parts: Iterable[Moments]) -> Moments:
        """The rows of several, one after the other."""
        return cls(*(torch.cat(fields) for fields in zip(*parts, strict=True)))

    def to(self, device: torch.device) -> Moments:
        """The same on a device."""
        return Moments(*(field.to(device) for field in self))

    def rows(self, index: Tensor) -> Moments:
        """The rows that ``index``, int64 of shape ``(selected,)``, names, in its order."""
        return Moments(*(field[index] for field in self))

    def about(self, center: Tensor) -> Moments:
        """The same with sums about a center, shape ``(rows,)``, which add up: ``mean`` becomes the sum of ``x - center``."""
        n, d = self.elements, self.mean - center
        return self._replace(
            mean=n * d,
            deviations=self.deviations + n * d**2,
            third=self.third + 3 * d * self.deviations + n * d**3,
            fourth=self.fourth + 4 * d * self.third + 6 * d**2 * self.deviations + n * d**4,
        )

    def about_mean(self, center: Tensor) -> Moments:
        """The inverse of :meth:`about`, of added sums: ``deviations``, ``third`` and ``fourth`` are about the mean again."""
        n = self.elements
        d = self.mean / n.clamp(min=1.0)
        return self._replace(
            mean=center + d,
            deviations=(self.deviations - n * d**2).clamp(min=0.0),
            third=self.third - 3 * d * self.deviations + 2 * n * d**3,
            fourth=(self.fourth - 4 * d * self.third + 6 * d**2 * self.deviations - 3 * n * d**4).clamp(min=0.0),
        )

    def merge(self, index: Tensor, num_rows: int) -> Moments:
        """Merge rows that belong together.

        Args:
            index: For each of these rows the row it is merged into, int64, shape ``(rows,)``.
            num_rows: Number of rows of the result. A row that nothing is merged into is the moments of an empty tensor.
        """
        elements = _total(self.elements, index, num_rows)
        # The mean of means and not the sum over the count, whose rounding the squares of the spread would show. A row
        # alone in its group keeps its mean to the last bit: its share is 1.
        mean = _total(self.mean * (self.elements / elements.clamp(min=1.0)[index]), index, num_rows)
        about = self.about(mean[index])
        return Moments(*(_total(field, index, num_rows) for field in about))._replace(
            mean=mean,
            maximum=_extreme(self.maximum, index, num_rows, "amax", -torch.inf),
            minimum=_extreme(self.minimum, index, num_rows, "amin", torch.inf),
        )


NUM_FIELDS = len(Moments._fields)


def _total(values: Tensor, index: Tensor, num_rows: int) -> Tensor:
    return torch.zeros(num_rows, dtype=torch.float64, device=values.device).index_add_(0, index, values)


def _extreme(values: Tensor, index: Tensor, num_rows: int, reduce: str, identity: float) -> Tensor:
    start = torch.full((num_rows,), identity, dtype=torch.float64, device=values.device)
    return start.scatter_reduce_(0, index, values, reduce)


def merged(shares: list[Tensor], num_rows: int, device: torch.device) -> Tensor:
    """Merge shares of the same rows.

    Args:
        shares: Each of shape ``(fields, num_rows)``, float64, on the device, as is the result. No share is the moments of empty tensors.
        num_rows: Number of rows of each.
        device: Where they are.
    """
    if len(shares) == 1:
        return shares[0]
    parts = [*(Moments(*share) for share in shares), Moments.of_nothing(num_rows).to(device)]
    return torch.stack(Moments.joined(parts).merge(torch.arange(num_rows, device=device).repeat(len(parts)), num_rows))


def moments_of_rows(values: Tensor, counts: Tensor, needs: int) -> Moments:
    """Moments of the rows of a matrix, without the elements that do not count; of many short rows at once, in float64 where needed.

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
