"""Mergeable moments: sums and extremes of a tensor, from which statistics can be finished later; some need counts in bins besides.

The moments of two tensors, merged, are up to rounding the moments of both together. Central sums merge by the formulas of
P. Pébay, "Formulas for robust, one-pass parallel computation of covariances and arbitrary-order statistical moments", 2008; for the
second order these are the formulas of Chan, Golub and LeVeque, 1979.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.float64]
"""Numbers on the host: a field of moments, or a matrix of all fields."""


class Need:
    """Bits of the moments that a statistic is computed from. A moment without its bit is not computed and must not be read.

    Integers and not an ``enum.IntFlag``, whose ``&`` costs as much as a small kernel.
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
    FINE_COUNTS = 1 << 10
    """Not a moment: a row of counts in finer bins."""

    COUNTS = HISTOGRAM | FINE_COUNTS
    """All rows of counts."""


class Moments(NamedTuple):
    """Moments of the rows of a table, each float64, shape ``(rows,)``.

    The fields are tensors on one device while a step runs, and numpy arrays when statistics are computed. ``n`` is the number of
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
    """Number of zeros."""
    nonfinite: Any
    """Number of NaN and infinite elements."""
    tokens: Any
    """Number of tokens: elements divided by :func:`num_features`."""
    token_norm: Any
    """Sum of the Euclidean norms of the tokens."""
    token_rms: Any
    """Sum of the root mean squares of the tokens."""

    @classmethod
    def empty(cls, num_rows: int, device: torch.device | str = "cpu") -> Moments:
        """Moments of empty tensors: the identity of :meth:`merge`."""
        zeros = torch.zeros(num_rows, dtype=torch.float64, device=device)
        return cls(*[zeros] * len(cls._fields))._replace(maximum=zeros - torch.inf, minimum=zeros + torch.inf)

    def about(self, center: Tensor | Array) -> Moments:
        """Sums about a center, of shape ``(rows,)``, which can be added: ``mean`` becomes the sum of ``x - center``."""
        n, d = self.elements, self.mean - center
        return self._replace(
            mean=n * d,
            deviations=self.deviations + n * d**2,
            third=self.third + 3 * d * self.deviations + n * d**3,
            fourth=self.fourth + 4 * d * self.third + 6 * d**2 * self.deviations + n * d**4,
        )

    def about_mean(self, center: Tensor) -> Moments:
        """The inverse of :meth:`about`, also after addition: ``deviations``, ``third`` and ``fourth`` are about the mean again."""
        n = self.elements
        d = self.mean / n.clamp(min=1.0)
        return self._replace(
            mean=center + d,
            deviations=(self.deviations - n * d**2).clamp(min=0.0),
            third=self.third - 3 * d * self.deviations + 2 * n * d**3,
            fourth=(self.fourth - 4 * d * self.third + 6 * d**2 * self.deviations - 3 * n * d**4).clamp(min=0.0),
        )

    def merge(self, index: Tensor, num_rows: int) -> Moments:
        """Merge groups of rows.

        Args:
            index: Row of the result that each row is merged into, int64, shape ``(rows,)``.
            num_rows: Number of rows of the result. A row without a source has the moments of an empty tensor.
        """
        elements = _sum_by_row(self.elements, index, num_rows)
        # Weighted means, because the rounding error of a total divided by the count would show in the deviations. A row that is alone in
        # its group keeps its mean to the last bit: its weight is 1.
        mean = _sum_by_row(self.mean * (self.elements / elements.clamp(min=1.0)[index]), index, num_rows)
        about = self.about(mean[index])
        return Moments(*(_sum_by_row(field, index, num_rows) for field in about))._replace(
            mean=mean,
            maximum=_extreme_by_row(self.maximum, index, num_rows, "amax", -torch.inf),
            minimum=_extreme_by_row(self.minimum, index, num_rows, "amin", torch.inf),
        )


NUM_FIELDS = len(Moments._fields)


def _sum_by_row(values: Tensor, index: Tensor, num_rows: int) -> Tensor:
    return torch.zeros(num_rows, dtype=torch.float64, device=values.device).index_add_(0, index, values)


def _extreme_by_row(values: Tensor, index: Tensor, num_rows: int, reduce: str, identity: float) -> Tensor:
    start = torch.full((num_rows,), identity, dtype=torch.float64, device=values.device)
    return start.scatter_reduce_(0, index, values, reduce)


FIELDS_OF_NEED: dict[int, Sequence[str]] = {
    Need.MEAN: ["mean"],
    Need.SQUARES: ["squares"],
    Need.DEVIATIONS: ["mean", "deviations"],
    Need.MAGNITUDE: ["magnitude"],
    Need.EXTREMES: ["maximum", "minimum"],
    Need.ZEROS: ["zeros"],
    Need.NONFINITE: ["nonfinite"],
    Need.TOKENS: ["tokens", "token_norm", "token_rms"],
    Need.POWERS: ["third", "fourth"],
}
"""The fields of :class:`Moments` that are measured for a need."""


def num_features(tensor: Tensor) -> int:
    """Elements of a token: the size of the last dimension; 1 for a tensor without dimensions."""
    return tensor.shape[-1] if tensor.dim() else 1


def merged(shares: Sequence[Array], num_rows: int) -> Array:
    """Merge shares of the same rows on the host, each of shape ``(fields, num_rows)``, as is the result."""
    if len(shares) == 1:
        return shares[0]
    parts = np.stack([*shares, torch.stack(Moments.empty(num_rows)).numpy()], axis=2)
    return merged_groups(parts.reshape(NUM_FIELDS, -1), np.arange(num_rows) * parts.shape[2])


def merged_groups(fields: Array, first: npt.NDArray[np.int64]) -> Array:
    """Merge groups of consecutive rows on the host, as :meth:`Moments.merge` does; this is faster for few rows.

    Args:
        fields: Moments, float64, shape ``(fields, rows)``.
        first: First row of each group, strictly ascending from 0, because a group has at least one row; int64, shape ``(groups,)``.

    Returns:
        Moments of shape ``(fields, groups)``.
    """
    sizes = np.diff(first, append=fields.shape[1])
    parts = Moments(*fields)
    with np.errstate(all="ignore"):
        elements = np.add.reduceat(parts.elements, first)
        mean = np.add.reduceat(parts.mean * (parts.elements / np.maximum(elements, 1.0).repeat(sizes)), first)
        merged = Moments(*np.add.reduceat(np.stack(parts.about(mean.repeat(sizes))), first, axis=1))
    return np.stack(
        merged._replace(mean=mean, maximum=np.maximum.reduceat(parts.maximum, first), minimum=np.minimum.reduceat(parts.minimum, first))
    )
