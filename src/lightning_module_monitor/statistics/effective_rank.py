"""The effective rank, which needs all singular values: those of the Gram matrix, the sums of the products of features.

Squares halve the digits, so everything is in float64: singular values below 1e-7 of the largest are lost, and count as zero. The device
computes sums (:func:`gram_sums`), which are additive over batches of rows; the host finishes them (:func:`singular_values`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_module_monitor.kernels.moments import Array
from lightning_module_monitor.kernels.torch_kernel import CPU_PORTION, PORTION, widest
from lightning_module_monitor.record import UNDEFINED

MAX_FEATURES = 1024
"""Limit of the features by default. The eigenvalues of as many take about a tenth of a second on the host, and the sums 8 MiB."""

MOST_FEATURES = 4096
"""Limit of the features on request: five seconds, and 128 MiB."""

ROUNDING = 16
"""An eigenvalue below so many units of rounding of the sum of all squares, of features that are not centred, is a rounding error."""


class GramSums(NamedTuple):
    """Sums over rows, from which singular values are computed. They are on the host if the device has no float64."""

    products: Tensor
    """Sums of products of each two features: the Gram matrix ``X^T X``, float64, shape ``(features, features)``."""
    totals: Tensor
    """Sums of the features, to center them: float64, shape ``(features,)``."""
    num_rows: int

    def plus(self, other: GramSums) -> GramSums:
        """The sums of both together, of other rows of the same features.

        Raises:
            ValueError: If their numbers of features differ.
        """
        if len(other.totals) != len(self.totals):
            raise ValueError(f"it has {len(other.totals)} features, and another call of the step had {len(self.totals)}; expected as many")
        return GramSums(self.products + other.products, self.totals + other.totals, self.num_rows + other.num_rows)


def gram_sums(rows: Tensor, max_features: int = MAX_FEATURES) -> GramSums:
    """The sums of rows, without a host read on a device with float64.

    Args:
        rows: Shape ``(..., features)``, any real floating dtype.
        max_features: The limit of features, at most ``MOST_FEATURES``.

    Raises:
        ValueError: If there are more features, or the limit is too large.
    """
    if not 1 <= max_features <= MOST_FEATURES:
        raise ValueError(f"max_features is {max_features}; expected 1 to {MOST_FEATURES}")
    num_features = rows.shape[-1]
    if num_features > max_features:
        raise ValueError(f"it has {num_features} features; expected at most max_features={max_features}: time grows with their third power")
    rows = rows.detach().reshape(rows.shape[:-1].numel(), num_features)
    if widest(rows.device) is not torch.float64:
        rows = rows.cpu()
    products = rows.new_zeros(num_features, num_features, dtype=torch.float64)
    totals = rows.new_zeros(num_features, dtype=torch.float64)
    for part in rows.split(max(1, (CPU_PORTION if rows.is_cpu else PORTION) // max(1, num_features))):
        wide = part.double()
        products.addmm_(wide.T, wide)
        totals += wide.sum(0)
    return GramSums(products, totals, len(rows))


def gram_sums_of_matrix(matrix: Tensor, max_features: int = MAX_FEATURES) -> GramSums:
    """The sums of the smaller side of a whole matrix, which have its singular values; as :func:`gram_sums`, and not additive.

    Args:
        matrix: Shape ``(rows, columns)``, any real floating dtype.
        max_features: The limit of the smaller side, at most ``MOST_FEATURES``.

    Raises:
        ValueError: If the smaller side is larger, or the limit is too large.
    """
    return gram_sums(matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T, max_features)


def singular_values(products: Array, totals: Array | None = None, num_rows: int = 0) -> Array:
    """The singular values of rows from their sums, on the host.

    Args:
        products: :attr:`GramSums.products`.
        totals: :attr:`GramSums.totals` for the singular values of centred features ``X - mean``; ``None`` for those of ``X``. Where
            means are larger than what the features vary by, the square of their ratio is lost in digits.
        num_rows: Number of rows. It counts for centred features.

    Returns:
        From the largest on, float64, shape ``(features,)``. Rounding errors are zero. All are NaN if a sum is not finite, as with an
        element that is not, or with one in float64 whose square overflows.
    """
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        scatter = products if totals is None else products - np.outer(totals, totals) / max(num_rows, 1)
    if not np.isfinite(scatter).all():
        return np.full(len(products), np.nan)
    eigenvalues = np.linalg.eigvalsh(scatter)[::-1]
    rounding = ROUNDING * np.finfo(np.float64).eps * np.trace(products)
    return np.sqrt(np.where(eigenvalues > rounding, eigenvalues, 0.0))


def effective_rank(values: Array) -> float:
    """``exp(-sum_i p_i ln p_i)`` with ``p_i = s_i / sum_j s_j``: of k equal singular values k.

    O. Roy and M. Vetterli, "The Effective Rank: A Measure of Effective Dimensionality", 2007.

    Args:
        values: All singular values, float64, shape ``(values,)``.

    Returns:
        From 1 to the number of values; NaN if a value is NaN, and ``UNDEFINED`` if all are zero.
    """
    total = values.sum()
    if total == 0:
        return UNDEFINED
    shares = values[values != 0] / total
    return math.exp(-float((shares * np.log(shares)).sum()))


def stable_rank(values: Array) -> float:
    """``sum_i s_i^2 / max_i s_i^2``, M. Rudelson and R. Vershynin, "Sampling from Large Matrices", 2007; as :func:`effective_rank`."""
    largest = values.max(initial=0.0)
    return UNDEFINED if largest == 0 else float(((values / largest) ** 2).sum())
