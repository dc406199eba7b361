"""Operator norms of weights: their largest singular values, by Lanczos's method.

G. Golub and W. Kahan, "Calculating the Singular Values and Pseudo-Inverse of a Matrix", 1965: with as many products as a
power iteration, a small bidiagonal matrix whose norm is closer to the true one. Six steps from a random start reach the accuracy of
some thirty power iterations. A start from the step before is not used: it misses a direction that becomes the leading one (measured:
norms a quarter too small), and a resumed run would not have it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_module_monitor.statistics.precision import Difference

NUM_STEPS = 6
"""Products with the matrix, and with its transpose, from a random start."""

NUM_SQUARINGS = 8
"""Of the small matrix, whose power 256 has nearly its leading direction alone."""

ROUNDING = 1e-4
"""The rest of a vector without the known directions is rounding if it is less than this share of the first."""

TOLERANCE = 0.1
"""Share by which a norm can be too small. Measured: nearly 0 for a matrix with a leading direction, as an update has; for random ones 2 %
(the median of 300 of 512 x 256 and less) to 7 % (the largest); where rows also differ in size by powers of ten, 4 of 1800 were beyond it,
by up to 14 %. It is never too large, except for rounding."""


SMALL_ELEMENTS = 1 << 14
"""Elements of a matrix that is batched with others. A batched product of larger ones takes ten times as long on a CPU."""

MAX_ELEMENTS = 1 << 18
"""Elements of a batch: 1 MiB of float32."""


def operator_norms(weights: Mapping[str, Difference]) -> dict[str, Tensor]:
    """The largest singular values of several weights, or differences of weights, without a host read.

    Args:
        weights: By site: matrices, shape ``(groups, rows, columns)``, or a diagonal, shape ``(features,)``.

    Returns:
        By site the largest of any of its matrices, float64, shape ``()``; within :data:`TOLERANCE`.
    """
    norms: dict[str, Tensor] = {}
    alike: defaultdict[tuple[torch.Size, torch.dtype, torch.device], list[str]] = defaultdict(list)
    for site, weight in weights.items():
        tensor = weight.tensor
        if not tensor.numel():
            norms[site] = torch.zeros((), dtype=torch.float64, device=tensor.device)
        else:
            alike[tensor.shape, tensor.dtype, tensor.device].append(site)
    for (shape, _dtype, _device), sites in alike.items():
        # Small ones of one shape share their operations, which cost more to start than to do.
        at_once = max(1, MAX_ELEMENTS // shape.numel()) if shape.numel() <= SMALL_ELEMENTS else 1
        for start in range(0, len(sites), at_once):
            part = sites[start : start + at_once]
            computed = [weights[site].computed() for site in part]
            if len(shape) == 1:
                found = torch.stack(computed).abs().amax(1).double()
            else:
                found = _operator_norms(computed[0] if len(part) == 1 else torch.cat(computed)).view(len(part), -1).amax(1)
            norms.update(zip(part, found.unbind(), strict=True))
    return norms


def _operator_norms(matrices: Tensor) -> Tensor:
    """The operator norm of each matrix, float64, shape ``(groups,)``."""
    # Squares of a very small update would leave the range, and so would the reciprocal of a subnormal number.
    largest = torch.maximum(matrices.amax((1, 2), keepdim=True), matrices.amin((1, 2), keepdim=True).neg())
    scale = torch.where(largest > 0, largest.clamp(min=torch.finfo(largest.dtype).tiny), 1.0)
    small = _bidiagonal(matrices, scale.reciprocal())
    return _norm_of_small(small).double() * scale.double().flatten()


def _bidiagonal(matrices: Tensor, factor: Tensor) -> Tensor:
    """Lanczos's matrices of ``factor * matrices``, shape ``(groups, NUM_STEPS, NUM_STEPS)``."""
    groups, _rows, columns = matrices.shape
    transposed = matrices.transpose(1, 2)
    nothing = matrices.new_zeros(groups, 1, 1)
    generator = torch.Generator("cpu").manual_seed(0)  # its own, so that no random numbers of the program are drawn
    start = torch.randn(columns, generator=generator, dtype=matrices.dtype, device="cpu")
    start /= torch.linalg.vector_norm(start)
    right = start.to(matrices.device).view(1, columns, 1).expand(groups, -1, -1)
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
