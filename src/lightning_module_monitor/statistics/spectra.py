"""Spectra of matrices: the largest singular values, the spectral norm and the stable rank, by Golub and Kahan's bidiagonalization.

G. Golub and W. Kahan, "Calculating the Singular Values and Pseudo-Inverse of a Matrix", 1965: from a start vector ``v1`` follow
orthonormal ``V`` and ``U`` with ``A V = U B``, where ``B`` is upper bidiagonal: ``alphas`` on its diagonal, ``betas`` beside it. The
largest singular values of ``B`` approach those of ``A``. Both sides are orthogonalized against all earlier directions; otherwise
rounding errors bring converged values back (H. Simon and H. Zha, "Low-Rank Matrix Approximation Using the Lanczos Bidiagonalization
Process", 2000).

The device computes the few numbers of each matrix (:func:`bidiagonals`), without a host read. They reach the host with everything else of a
step, and are finished there in float64 (:func:`spectra`, :func:`spectral_norms`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_module_monitor.kernels.elements import to_device, widened
from lightning_module_monitor.kernels.moments import Array
from lightning_module_monitor.kernels.torch_kernel import widest
from lightning_module_monitor.model.unchanged import float32_products, full_precision
from lightning_module_monitor.record import UNDEFINED
from lightning_module_monitor.statistics.precision import Difference

NUM_STEPS = 40
"""Number of products with the matrix, and with its transpose; fewer if it has a smaller side."""

TOLERANCE = 1e-3
"""Fraction by which a spectral norm is too small at most. Where the largest value is 1 % above the next it is 1e-5, mostly a rounding
error. It is never too large, except for rounding errors: those of float32, up to 5e-5 for 20,000 rows that are equal. Matrices that are
made to miss the tolerance exist: the largest value is up to 0.5 % above a dense spectrum, and the start vector happens to contain nearly
nothing of its direction. Measured for such spectra of 300 to 4096 values: up to 18 % of random start vectors miss 1e-3, none 7e-3."""

CONVERGED = 1e-2
"""A singular value has converged if its residual, and that of every larger one, is at most this fraction of the largest one, and not larger
than the value."""

ROUNDING = 1 << 10
"""A vector without the known directions is a rounding error if its norm is below so many units of rounding of the norm of the matrix. A sum
of thousands of elements in float32 reaches a hundred units."""

CUT = ROUNDING * float(torch.finfo(torch.float32).eps)
"""This limit as a fraction, in float32: by so much a residual is larger where it was reached."""

MAX_ELEMENTS = 1 << 24
"""Limit of elements of the matrices that are computed at once: 64 MiB of float32, which outweigh the overhead of a launch."""

CPU_ELEMENTS = 1 << 21
"""The same on a CPU: 8 MiB, which may stay in a cache over all steps."""

_SEED = 0x5BEC7
"""Of the start vectors. Zero, of which programs like to make their weights, would give start vectors that are rows of these."""

_FIRST_ALPHA = 2
"""The first numbers of a matrix are its largest magnitude and its Frobenius norm."""

_Owner = TypeVar("_Owner")


def as_matrices(tensor: Tensor, groups: int = 1, *, is_transposed: bool = False) -> Tensor:
    """A tensor as the matrices whose spectra describe it.

    A tensor of more than two dimensions has the output features as rows, and everything else as columns. A vector, as of a bias or a
    normalization layer, is one row: its spectral norm is its norm, and its rank is 1. A matrix stays as it is, also one of several
    projections such as ``in_proj_weight``.

    Args:
        tensor: Any shape.
        groups: Groups of a convolution, each of which is a matrix of its own. It counts for tensors of more than two dimensions.
        is_transposed: Whether it is the weight of a transposed convolution, of shape ``(inputs, outputs / groups, *kernel)``.

    Returns:
        A view where there is one, shape ``(groups, rows, columns)``.

    Raises:
        ValueError: If the first dimension is no multiple of ``groups``.
    """
    if tensor.dim() <= 2:
        return tensor.reshape(1, -1, tensor.shape[-1] if tensor.dim() else 1)
    if tensor.shape[0] % groups:
        raise ValueError(f"its first dimension is {tensor.shape[0]}; expected a multiple of its {groups} groups")
    parts = tensor.reshape(groups, tensor.shape[0] // groups, *tensor.shape[1:])
    return (parts.transpose(1, 2) if is_transposed else parts).flatten(2)


# On the device


def bidiagonals(weights: Mapping[_Owner, Difference]) -> list[tuple[list[_Owner], Tensor]]:
    """The numbers of the bidiagonal matrices of weights or of differences, without a host read.

    Matrices of one shape, or of that of their transposes, share their operations, whose launch costs more than their work.

    Args:
        weights: By owner, its matrices: any real floating dtype, shape ``(groups, rows, columns)``, as of :func:`as_matrices`.

    Returns:
        Batches: the owner of each matrix, and the numbers of :func:`bidiagonal`, shape ``(matrices, 2 * steps + 2)``. The matrices of an
        owner are beside each other, in their order. An owner without a matrix is absent.
    """
    alike: defaultdict[object, list[_Owner]] = defaultdict(list)
    for owner, weight in weights.items():
        tensor = weight.tensor
        alike[min(tensor.shape[1:]), max(tensor.shape[1:]), tensor.dtype, tensor.device].append(owner)
    batches = []
    for owners in alike.values():
        for part in _parts(owners, [weights[owner].tensor for owner in owners]):
            matrices = [_tall(weights[owner].computed()) for owner in part]
            owner_of_matrix = [owner for owner, each in zip(part, matrices, strict=True) for _matrix in range(len(each))]
            if owner_of_matrix:
                batches.append((owner_of_matrix, bidiagonal(matrices[0] if len(part) == 1 else torch.cat(matrices))))
    return batches


def _parts(owners: Iterable[_Owner], tensors: Iterable[Tensor]) -> Iterator[list[_Owner]]:
    """The owners of the tensors that fit into memory together; of a tensor that is larger than the limit, the owner alone."""
    part: list[_Owner] = []
    num_elements = 0
    for owner, tensor in zip(owners, tensors, strict=True):
        if part and num_elements + tensor.numel() > (CPU_ELEMENTS if tensor.is_cpu else MAX_ELEMENTS):
            yield part
            part, num_elements = [], 0
        part.append(owner)
        num_elements += tensor.numel()
    yield part


def _tall(matrices: Tensor) -> Tensor:
    """Matrices with at least as many rows as columns: transposed if they have fewer."""
    return matrices if matrices.shape[1] >= matrices.shape[2] else matrices.transpose(1, 2)


def bidiagonal(matrices: Tensor) -> Tensor:
    """The numbers of the bidiagonal matrix of each matrix, without a host read, and with random states as they were.

    Args:
        matrices: Shape ``(groups, rows, columns)``, any real floating dtype and device.

    Returns:
        Shape ``(groups, 2 * steps + 2)`` with ``steps = min(rows, columns, NUM_STEPS)``, in float32 or float64: the largest magnitude of an
        element; and of the matrix divided by it the Frobenius norm, the ``alphas`` and the ``betas``. The last beta is that of the
        residual. The first number is not finite if an element is not; other matrices are not affected.
    """
    with torch.no_grad(), full_precision(matrices.device), float32_products():
        return _bidiagonal(_tall(widened(matrices))) if matrices.numel() else matrices.new_zeros(len(matrices), _FIRST_ALPHA)


def _bidiagonal(matrices: Tensor) -> Tensor:
    groups, rows, columns = matrices.shape
    steps = min(columns, NUM_STEPS)
    largest = torch.maximum(matrices.amax((1, 2), keepdim=True), matrices.amin((1, 2), keepdim=True).neg())
    # Squares of elements could overflow or underflow.
    if columns == 1:
        # Of vectors the norm, in float64 if the device has it: sums of many thousand squares in float32 lose digits.
        vectors = (matrices / largest.masked_fill(largest == 0, 1.0)).to(widest(matrices.device))
        norms = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
        return torch.cat([largest, norms, norms, torch.zeros_like(norms)], dim=2)[:, 0]
    scaled = torch.div(matrices, largest.masked_fill(largest == 0, 1.0), out=matrices.new_empty(matrices.shape))
    transposed = scaled.transpose(1, 2)
    generator = torch.Generator("cpu").manual_seed(_SEED)  # leaves the program's random state unchanged
    noise = to_device(torch.randn(rows + steps, generator=generator, dtype=scaled.dtype, device="cpu"), scaled.device)
    left, right = (_Basis(scaled.new_empty(groups, steps + 1, size), noise) for size in (rows, columns))
    right.extend(scaled.new_zeros(groups, 1, columns), 0.0)
    alphas = [left.extend(torch.bmm(right.directions[0], transposed), 0.0)]
    betas: list[Tensor] = []
    least: Tensor | float = 0.0
    for step in range(steps):
        if step:
            product = torch.baddbmm(left.directions[step - 1] * betas[-1], right.directions[step], transposed, beta=-1)
            alphas.append(left.extend(product, least))
        product = torch.baddbmm(right.directions[step] * alphas[-1], left.directions[step], scaled, beta=-1)
        if not step:  # the norm of the product with the first direction, which is at most that of the matrix
            norms = torch.hypot(torch.linalg.vector_norm(product, dim=2, keepdim=True), alphas[0])
            least = norms * (ROUNDING * torch.finfo(scaled.dtype).eps)
        betas.append(right.extend(product, least))
    # Row by row, and these in float64 if the device has it: a sum of millions of squares in float32 would lose digits.
    of_rows = torch.linalg.vector_norm(scaled, dim=2, keepdim=True).to(widest(scaled.device))
    frobenius = torch.linalg.vector_norm(of_rows, dim=1, keepdim=True)
    return torch.cat([largest, frobenius, *alphas, *betas], dim=2)[:, 0]


class _Basis:
    """Orthonormal directions on one side of each matrix.

    All vectors are rows: on a CPU a batched product with columns takes ten times as long.

    Args:
        memory: For the directions, shape ``(groups, directions, size)``.
        noise: Random numbers, at least ``size + directions - 1``.
    """

    def __init__(self, memory: Tensor, noise: Tensor) -> None:
        self._memory = memory
        self.directions = memory.split(1, dim=1)
        """Each of shape ``(groups, 1, size)``."""
        self._random = noise.unfold(0, memory.shape[2], 1)
        """A random vector for each direction."""
        self._num_known = 0

    def extend(self, vectors: Tensor, least: Tensor | float) -> Tensor:
        """Add a direction: what vectors have beyond the known directions.

        Where this is nothing, as in a matrix of low rank or with equal singular values, the direction is a random one.

        Args:
            vectors: Nearly orthogonal to the known directions, shape ``(groups, 1, size)``.
            least: A vector of at most this norm is nothing.

        Returns:
            The norm of what vectors have beyond the known directions, 0 for nothing; shape ``(groups, 1, 1)``.
        """
        index = self._num_known
        is_nothing = torch.linalg.vector_norm(vectors, dim=2, keepdim=True) <= least
        vectors = torch.where(is_nothing, self._random[index], vectors)
        if index:
            known = self._memory[:, :index]
            vectors = torch.baddbmm(vectors, torch.bmm(vectors, known.transpose(1, 2)), known, alpha=-1)
        norms: Tensor = torch.linalg.vector_norm(vectors, dim=2, keepdim=True)
        torch.div(vectors, norms, out=self.directions[index])
        self._num_known += 1
        return norms.masked_fill_(is_nothing, 0.0)


# On the host


class Spectra(NamedTuple):
    """Figures of the spectra of matrices, in float64. All figures of a matrix with an element that is not finite are NaN."""

    spectral_norm: Array
    """The largest singular value of each matrix, within ``TOLERANCE``, whether it has converged or not; shape ``(matrices,)``."""
    stable_rank: Array
    """Squared Frobenius norm over squared spectral norm, within twice ``TOLERANCE``, and ``UNDEFINED`` for a zero matrix; shape
    ``(matrices,)``. M. Rudelson and R. Vershynin, "Sampling from Large Matrices", 2007."""
    values: Array
    """The largest singular values from the largest on, shape ``(matrices, values)``. One that has not converged (``CONVERGED``) or
    does not exist is ``UNDEFINED``."""
    residuals: Array
    """How far each value is from a singular value of the matrix at most, but for rounding errors (``ROUNDING``), also where it has not
    converged; shape ``(matrices, values)``."""


def spectra(numbers: Array, num_values: int = 5) -> Spectra:
    """Finish spectra.

    With ``B = P S Q^T`` each singular value ``s_i`` of ``B`` has the residual ``|A^T U p_i - s_i V q_i| = beta_k |P_ki|``, where
    ``beta_k`` is the last beta. At least one singular value of ``A`` is so close to ``s_i``. One that occurs several times may be found
    fewer times.

    Args:
        numbers: Those of :func:`bidiagonal`, shape ``(matrices, 2 * steps + 2)``, float64.
        num_values: Number of singular values.
    """
    small, scales, frobenius = _small(numbers)
    directions, values, _right = np.linalg.svd(small)
    with np.errstate(all="ignore"):
        values = np.fmin(values, frobenius[:, np.newaxis])
        residuals = numbers[:, -1:] * np.abs(directions[:, -1]) if values.size else values
        norms = values.max(1, initial=0.0)
        # Where a vector was taken for a rounding error, what it had is missing in the bidiagonal matrix.
        residuals = residuals + np.where(_was_cut(numbers), CUT * norms, 0.0)[:, np.newaxis]
        stable_ranks = np.where(norms == 0, UNDEFINED, np.maximum(frobenius / norms, 1.0) ** 2)
        is_known = (residuals <= CONVERGED * norms[:, np.newaxis]) & (residuals <= values)
        has_converged = np.logical_and.accumulate(is_known, axis=1)
        known = np.where(has_converged, values * scales[:, np.newaxis], UNDEFINED)
    is_bad = np.isnan(scales)
    known[is_bad], residuals[is_bad], stable_ranks[is_bad] = np.nan, np.nan, np.nan
    return Spectra(norms * scales, stable_ranks, _padded(known, num_values), _padded(residuals * scales[:, np.newaxis], num_values))


def _padded(values: Array, num_values: int) -> Array:
    """The first values of each matrix, ``UNDEFINED`` where there are fewer."""
    return np.pad(values[:, :num_values], ((0, 0), (0, max(0, num_values - values.shape[1]))), constant_values=UNDEFINED)


def spectral_norms(numbers: Array) -> Array:
    """The spectral norms alone, shape ``(matrices,)``, from the same numbers as :func:`spectra`."""
    small, scales, frobenius = _small(numbers)
    norms: Array = np.fmin(np.linalg.svd(small, compute_uv=False).max(1, initial=0.0), frobenius) * scales
    return norms


def _was_cut(numbers: Array) -> Array:
    """Whether a direction of each matrix was a random one, in place of a rounding error; the last residual may be one."""
    num_steps = (numbers.shape[1] - _FIRST_ALPHA) // 2
    alphas, betas = np.split(numbers[:, _FIRST_ALPHA:], 2, axis=1)
    return np.asarray((alphas == 0).any(1) | (betas[:, : num_steps - 1] == 0).any(1))


def _small(numbers: Array) -> tuple[Array, Array, Array]:
    """Bidiagonal matrices, shape ``(matrices, steps, steps)``; scales, NaN where a matrix is not finite; Frobenius norms without scale."""
    num_steps = (numbers.shape[1] - _FIRST_ALPHA) // 2
    is_finite = np.asarray(np.isfinite(numbers).all(1, keepdims=True))
    alphas, betas = np.split(np.where(is_finite, numbers[:, _FIRST_ALPHA:], 0.0), 2, axis=1)
    small = np.zeros((len(numbers), num_steps, num_steps))
    diagonal = np.arange(num_steps)
    small[:, diagonal, diagonal] = alphas
    small[:, diagonal[:-1], diagonal[1:]] = betas[:, :-1]
    return small, np.where(is_finite[:, 0], numbers[:, 0], np.nan), numbers[:, 1]
