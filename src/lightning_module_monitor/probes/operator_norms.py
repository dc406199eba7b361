"""Operator norms of weights: their largest singular values, by power iteration."""

from __future__ import annotations

import torch
from torch import Tensor

WARM_ITERATIONS = 6
"""Where there is a start from the step before: a weight moves little from step to step, and its leading direction with it."""

COLD_ITERATIONS = 20
"""Where there is none."""

REFERENCE_ITERATIONS = 100
"""For the reference's own weight, whose norm is computed once. A random matrix has no leading direction, and needs most."""

TOLERANCE = 0.05
"""How much too small a norm can be: that of a random matrix from a random start. Too large it is never, but for rounding."""

_NEW_DIRECTION = 0.1
"""Share of a random vector in a warm start: what has become the leading direction need not have been in the old one."""


class OperatorNorms:
    """Norms by site; the vectors that were found last are the next start."""

    def __init__(self) -> None:
        self._starts: dict[str, Tensor] = {}
        self._of_reference: dict[str, Tensor] = {}

    def clear(self) -> None:
        """Forget every start and the reference's norms."""
        self._starts.clear()
        self._of_reference.clear()

    def starts(self) -> dict[str, Tensor]:
        """The next starts by site, for a run that goes on from here."""
        return dict(self._starts)

    def set_starts(self, starts: dict[str, Tensor]) -> None:
        """Go on from a run's starts."""
        self._starts = dict(starts)

    def of_update(self, site: str, update: Tensor) -> Tensor:
        """The norm of how far a weight has moved.

        Args:
            site: Whose it is.
            update: Matrices, shape ``(groups, rows, columns)``, or a diagonal, shape ``(features,)``; it is overwritten.

        Returns:
            The largest over the groups, float64, shape ``()``.
        """
        if update.dim() == 1:
            return update.abs().max().double()
        before = self._starts.get(site)
        fits = before is not None and before.shape == (*update.shape[::2], 1)
        start = before.to(update.device, update.dtype) if fits and before is not None else None
        norm, self._starts[site] = operator_norm(update, COLD_ITERATIONS if start is None else WARM_ITERATIONS, start)
        return norm

    def of_reference(self, site: str, weight: Tensor) -> Tensor:
        """The norm of the reference's weight, which stays what it is; as :meth:`of_update`."""
        norm = self._of_reference.get(site)
        if norm is None:
            norm = weight.abs().max().double() if weight.dim() == 1 else operator_norm(weight.clone(), REFERENCE_ITERATIONS)[0]
            self._of_reference[site] = norm
        return norm


def operator_norm(matrices: Tensor, num_iterations: int, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The largest singular value of any of several matrices, by power iteration, without a host read.

    Args:
        matrices: Shape ``(groups, rows, columns)``, float32 or float64; overwritten.
        num_iterations: Number of multiplications by the matrix and its transpose.
        start: Vectors, shape ``(groups, columns, 1)``.

    Returns:
        The norm, float64, shape ``()``, and the vectors to start from next time.
    """
    generator = torch.Generator().manual_seed(0)  # of its own, and always the same: nobody's random numbers are touched
    shape = (*matrices.shape[::2], 1)
    random = _normalized(torch.randn(shape, generator=generator, dtype=matrices.dtype).to(matrices.device))
    vectors = random if start is None else _normalized(start + _NEW_DIRECTION * random)
    # Squares of a very small update would leave the range.
    scale = matrices.abs().amax()
    matrices.div_(torch.where(scale > 0, scale, 1.0))
    transposed = matrices.transpose(1, 2)
    norms = matrices.new_zeros(1)
    for _iteration in range(num_iterations):
        vectors = transposed @ _normalized(matrices @ vectors)
        norms = torch.linalg.vector_norm(vectors, dim=(1, 2))
        vectors = _normalized(vectors)
    is_sound = torch.isfinite(norms) & (norms > 0)
    return norms.amax().double() * scale.double(), torch.where(is_sound.view(-1, 1, 1), vectors, random)


def _normalized(vectors: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    return vectors / norms.clamp(min=torch.finfo(vectors.dtype).tiny)
