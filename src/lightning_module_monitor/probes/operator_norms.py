"""Operator norms of weights: their largest singular values, by Lanczos's method.

G. Golub and W. Kahan, "Calculating the Singular Values and Pseudo-Inverse of a Matrix", 1965: the norm of a small bidiagonal
matrix is closer to the true norm than a power iteration with as many products. Six steps from a random start reach the accuracy of some
thirty power iterations. A start from the previous step's vector misses a new leading direction (measured: norms a quarter too
small), and is not available to a resumed run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_module_monitor.kernels.elements import to_device
from lightning_module_monitor.kernels.torch_kernel import widest
from lightning_module_monitor.statistics.precision import Difference

NUM_STEPS = 6
"""Number of products with the matrix, and with its transpose."""

NUM_SQUARINGS = 8
"""Number of squarings of the small matrix: its power 256 is nearly a multiple of its leading direction."""

ROUNDING = 1e-4
"""The remainder of a vector without the known directions is a rounding error if it is below this fraction of the first norm."""

TOLERANCE = 0.1
"""Fraction by which a norm can be too small. Measured: nearly 0 for a matrix with a leading direction, such as an update; for 300 random
matrices of up to 512 x 256 2 % (median) to 7 % (largest); if rows also differ by powers of ten, 4 of 1800 were beyond it, up to 14 %.
A norm is never too large, except for rounding errors."""

SMALL_ELEMENTS = 1 << 14
"""Limit of elements of a matrix in a batch. A batched product of larger matrices takes ten times as long on a CPU."""

MAX_ELEMENTS = 1 << 18
"""Limit of elements of a batch: 1 MiB of float32."""


def operator_norms(weights: Mapping[str, Difference]) -> dict[str, Tensor]:
    """The largest singular values of weights or of differences of weights, without a host read.

    Args:
        weights: By site: matrices, shape ``(groups, rows, columns)``, or a diagonal, shape ``(features,)``.

    Returns:
        By site the largest singular value of its matrices, shape ``()``, in float64 if its device has it; within :data:`TOLERANCE`.
    """
    norms: dict[str, Tensor] = {}
    alike: defaultdict[tuple[torch.Size, torch.dtype, torch.device], list[str]] = defaultdict(list)
    for site, weight in weights.items():
        tensor = weight.tensor
        if not tensor.numel():
            norms[site] = torch.zeros((), dtype=widest(tensor.device), device=tensor.device)
        else:
            alike[tensor.shape, tensor.dtype, tensor.device].append(site)
    for (shape, _dtype, _device), sites in alike.items():
        # Small matrices of one shape share their operations, whose launch costs more than their work.
        at_once = max(1, MAX_ELEMENTS // shape.numel()) if shape.numel() <= SMALL_ELEMENTS else 1
        for start in range(0, len(sites), at_once):
            part = sites[start : start + at_once]
            computed = [weights[site].computed() for site in part]
            if len(shape) == 1:
                largest = torch.stack(computed).abs().amax(1)
            else:
                largest = _operator_norms(computed[0] if len(part) == 1 else torch.cat(computed)).view(len(part), -1).amax(1)
            norms.update(zip(part, largest.to(widest(largest.device)).unbind(), strict=True))
    return norms


def _operator_norms(matrices: Tensor) -> Tensor:
    """The operator norm of each matrix, shape ``(groups,)``, in float64 if their device has it."""
    # Squares of a very small update would underflow, and the reciprocal of a subnormal number would overflow.
    largest = torch.maximum(matrices.amax((1, 2), keepdim=True), matrices.amin((1, 2), keepdim=True).neg())
    scale = torch.where(largest > 0, largest.clamp(min=torch.finfo(largest.dtype).tiny), 1.0)
    small = _bidiagonal(matrices, scale.reciprocal())
    wide = widest(scale.device)
    return _norm_of_small(small).to(wide) * scale.to(wide).flatten()


def _bidiagonal(matrices: Tensor, factor: Tensor) -> Tensor:
    """Lanczos's matrices of ``factor * matrices``, shape ``(groups, NUM_STEPS, NUM_STEPS)``."""
    groups, _rows, columns = matrices.shape
    transposed = matrices.transpose(1, 2)
    zero = matrices.new_zeros(groups, 1, 1)
    generator = torch.Generator("cpu").manual_seed(0)  # leaves the program's random state unchanged
    start = torch.randn(columns, generator=generator, dtype=matrices.dtype, device="cpu")
    start /= torch.linalg.vector_norm(start)
    right = to_device(start, matrices.device).view(1, columns, 1).expand(groups, -1, -1)
    left, alpha = _split(torch.bmm(matrices, right * factor), zero)
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
    """Vectors as directions of norm 1, and their norms, shape ``(groups, 1, 1)``; both zero if the norm is at most ``least``."""
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    norms = norms * (norms > least)
    return vectors / torch.where(norms == 0, torch.inf, norms), norms


def _norm_of_small(small: Tensor) -> Tensor:
    """Operator norms of small matrices, shape ``(groups,)``, from the leading direction of a high power."""
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
