"""Operator norms of weights: their largest singular values, by Lanczos's method.

G. Golub and W. Kahan, "Calculating the Singular Values and Pseudo-Inverse of a Matrix", 1965: with as many products as a
power iteration, a small bidiagonal matrix whose norm is closer to the sought one than any power's. From a random start it
needs five steps for what power iteration has after some twenty, and so it needs no start from the step before: that misses
a direction which takes the lead anew (seen: norms that were a quarter too small), and a run that is resumed would not have
it.
"""

from __future__ import annotations

import torch
from torch import Tensor

NUM_STEPS = 5
"""Products with the matrix, and with its transpose."""

NUM_SQUARINGS = 8
"""Of the small matrix, whose power 256 is that of its leading direction, near enough."""

ROUNDING = 1e-4
"""What is left of a vector when the known directions are taken out is rounding if it is this small a share of the first."""

TOLERANCE = 0.05
"""How much too small a norm can be: that of a large random matrix, which has no leading direction, is 2 to 4 % too small.
Too large it is never, but for rounding."""


class OperatorNorms:
    """Norms by site. The reference's are computed once."""

    def __init__(self) -> None:
        self._of_reference: dict[str, Tensor] = {}

    def clear(self) -> None:
        """Forget the reference's norms: there is another reference."""
        self._of_reference.clear()

    def of_reference(self, site: str, weight: Tensor) -> Tensor:
        """The norm of a weight that stays what it is; see :func:`operator_norm`."""
        if site not in self._of_reference:
            self._of_reference[site] = operator_norm(weight)
        return self._of_reference[site]


def operator_norm(weight: Tensor) -> Tensor:
    """The largest singular value, without a host read.

    Args:
        weight: Matrices, shape ``(groups, rows, columns)``, or a diagonal, shape ``(features,)``; float32 or float64.

    Returns:
        The largest of any of the matrices, float64, shape ``()``; within :data:`TOLERANCE`.
    """
    if weight.dim() == 1:
        return weight.abs().max().double()
    # Squares of a very small update would leave the range.
    smallest, largest = torch.aminmax(weight)
    scale = torch.maximum(largest, smallest.neg())
    small = _bidiagonal(weight, torch.where(scale > 0, scale, 1.0).reciprocal())
    return _norm_of_small(small).amax().double() * scale.double()


def _bidiagonal(matrices: Tensor, factor: Tensor) -> Tensor:
    """Lanczos's matrices of ``factor * matrices``, shape ``(groups, NUM_STEPS, NUM_STEPS)``."""
    groups, _rows, columns = matrices.shape
    transposed = matrices.transpose(1, 2)
    generator = torch.Generator().manual_seed(0)  # of its own, and always the same: nobody's random numbers are touched
    start = torch.randn((1, columns, 1), generator=generator, dtype=matrices.dtype).to(matrices.device)
    nothing = matrices.new_zeros(groups, 1, 1)
    right = (start / torch.linalg.vector_norm(start)).expand(groups, -1, -1)
    left, alpha = _split(torch.bmm(matrices, right * factor), nothing)
    least = alpha * ROUNDING
    basis, alphas, betas = right, [alpha], []
    for _step in range(NUM_STEPS - 1):
        product = torch.bmm(transposed, left * factor)
        right, beta = _split(torch.baddbmm(product, basis, torch.bmm(basis.transpose(1, 2), product), alpha=-1), least)
        left, alpha = _split(torch.baddbmm(left * -beta, matrices, right * factor), least)
        basis = torch.cat([basis, right], dim=2)
        alphas.append(alpha)
        betas.append(beta)
    return torch.diag_embed(torch.cat(alphas, dim=2)[:, 0]) + torch.diag_embed(torch.cat(betas, dim=2)[:, 0], offset=1)


def _split(vectors: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors as directions of norm 1, and norms, shape ``(groups, 1, 1)``; both zero where a norm is no more than ``least``."""
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    norms = norms * (norms > least)
    return vectors / torch.where(norms == 0, torch.inf, norms), norms


def _norm_of_small(small: Tensor) -> Tensor:
    """Operator norms of small matrices, shape ``(groups,)``: of their leading direction, which is left of a high power."""
    power = torch.bmm(small.transpose(1, 2), small)
    for squaring in range(NUM_SQUARINGS):
        if squaring % 2 == 0:
            traces = power.diagonal(dim1=1, dim2=2).sum(1).view(-1, 1, 1)
            power = power / traces.masked_fill(traces == 0, 1.0)
        power = torch.bmm(power, power)
    column = power.diagonal(dim1=1, dim2=2).argmax(1).view(-1, 1, 1).expand(-1, NUM_STEPS, 1)
    direction = power.gather(2, column)
    norms: Tensor = torch.linalg.vector_norm(torch.bmm(small, direction), dim=(1, 2))
    length = torch.linalg.vector_norm(direction, dim=(1, 2))
    return norms / torch.where(length == 0, 1.0, length)
