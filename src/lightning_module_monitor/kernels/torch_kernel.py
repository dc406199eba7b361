"""Moments by torch operations: any device and floating dtype. The reference implementation.

A tensor is measured in large portions, each a *piece*, or a matrix whose rows are pieces: about ten vectorized operations, without a
host read and without a copy beyond the portion. Sums are about a center; the moments of all pieces are computed at once, at the end.

Elements are widened to float64, which holds the square of every float32. A device without float64 measures short pieces in float32,
each scaled by a power of two, and merges them in float64 on the host: accurate to 1e-5.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_module_monitor.kernels.bins_of_floats import Bins, counts_of, needed_bins
from lightning_module_monitor.kernels.elements import to_device, widened
from lightning_module_monitor.kernels.moments import Moments, Need, num_features

CPU_PORTION = 1 << 17
"""Elements that are widened at once on a CPU: a MiB of float64, which stays in the cache, and outweighs the overhead of an operation."""

PORTION = 1 << 22
"""The same on an accelerator: 32 MiB of float64, which outweigh the overhead of a launch."""

FLOAT32_PIECE = 4096
"""Elements of a piece on a device without float64: the rounding error of such a pairwise sum in float32 is below 1e-6."""

CENTER_SHARE = 8
"""The center of a piece is the mean of its first eighth. The sum of squares about it is at most about 8 times that about the mean, one
digit of float64; the mean itself would cost one more pass."""

_SPREAD = Need.DEVIATIONS | Need.POWERS


class _Pieces(NamedTuple):
    figures: Tensor
    """Shape ``(fields, pieces)``."""
    rows: Sequence[Sequence[int]]
    """The rows that the pieces are merged into: each sequence has one for each piece, or one for all."""
    elements: int
    features: int


WITH_FLOAT64 = frozenset({"cpu", "cuda", "meta"})
"""Types of devices that all compute in float64. ``mps``, ``hpu`` and some ``xpu`` do not, and of others it is not known."""


def widest(device: torch.device) -> torch.dtype:
    """Float64, or float32 for a device that may not compute in float64."""
    return torch.float64 if device.type in WITH_FLOAT64 else torch.float32


class TorchKernel:
    """The kernel of any device; see :class:`~lightning_module_monitor.kernels.table.Kernel`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._wide = widest(device)
        self._portion = CPU_PORTION if device.type == "cpu" else PORTION
        self._pieces: defaultdict[tuple[str, ...], list[_Pieces]] = defaultdict(list)
        """By the names of their fields."""
        self._counts: dict[tuple[Bins, int], Tensor] = {}
        """By set of bins and row."""

    def add(
        self,
        rows: Sequence[int],
        tensor: Tensor,
        needs: int,
        other: Tensor | None = None,
        shift: Tensor | None = None,
        *,
        scale: Tensor | None = None,
    ) -> None:
        """Measure ``(tensor - other - shift) / scale`` once, in float32 or float64, and merge it into rows."""
        for operand in (other, shift):
            if operand is not None:
                tensor = widened(tensor) - widened(operand)
        for bins in needed_bins(needs):
            portions = (counts_of(_divided(portion, scale), bins, self._wide) for portion in tensor.reshape(-1).split(self._portion))
            self._add_counts(bins, rows, functools.reduce(torch.add, portions))
        if not needs & Need.EVERYTHING:
            return
        features = num_features(tensor) if needs & Need.TOKENS else 1
        flat = tensor.reshape(-1)
        length = self._piece_length(flat.numel(), features)
        per_portion = max(1, self._portion // length) * length
        for start in range(0, flat.numel(), per_portion):
            portion = _divided(flat[start : start + per_portion], scale)
            whole = portion.numel() - portion.numel() % length
            for pieces in (portion[:whole].view(-1, length), portion[whole:]) if whole > length else (portion,):
                if pieces.numel():
                    self._measure([(row,) for row in rows], pieces, features, needs)

    def add_all(self, rows: Sequence[int], tensors: Sequence[Tensor], needs: Sequence[int], *, scale: Tensor | None = None) -> None:
        """:meth:`add` of many tensors: small ones of one shape are stacked."""
        alike: defaultdict[tuple[torch.Size, torch.dtype, int], list[tuple[int, Tensor]]] = defaultdict(list)
        for row, tensor, need in zip(rows, tensors, needs, strict=True):
            alike[tensor.shape, tensor.dtype, need].append((row, tensor))
        for (shape, _dtype, need), members in alike.items():
            size = shape.numel()
            at_once = 1 if need & Need.COUNTS or self._piece_length(size, 1) < size else max(1, self._portion // size)
            features = num_features(members[0][1]) if need & Need.TOKENS else 1
            for start in range(0, len(members), at_once):
                stacked_rows, stacked = zip(*members[start : start + at_once], strict=True)
                if len(stacked) == 1:
                    self.add(stacked_rows, stacked[0], need, scale=scale)
                else:
                    pieces = _divided(torch.stack(stacked).reshape(len(stacked), -1), scale)
                    self._measure([stacked_rows], pieces, features, need)

    def add_product(self, row: int, tensor: Tensor, other: Tensor, sign: int) -> None:
        """Measure the mean of ``sign * tensor * other``."""
        for portion, factor in zip(tensor.reshape(-1).split(self._portion), other.reshape(-1).split(self._portion), strict=True):
            self.add((row,), portion.to(self._wide, copy=True).mul_(factor).mul_(sign), Need.MEAN)

    def add_rows(self, rows: Sequence[int], values: Tensor, counted: Tensor, needs: Sequence[int]) -> None:
        """Measure each row of a matrix: its elements for which ``counted``, boolean, is true. Every element is a token."""
        moments = functools.reduce(operator.or_, needs) & Need.EVERYTHING
        if moments:
            self._measure([rows], values, 1, moments, counted)
        for row, elements, is_counted, need in zip(rows, values, counted, needs, strict=True):
            for bins in needed_bins(need):
                counts = counts_of(torch.where(is_counted, elements, torch.nan), bins, self._wide)
                counts[-1] -= is_counted.logical_not().sum()  # elements that do not count are among the NaN
                self._add_counts(bins, (row,), counts)

    def collect(self, num_rows: int) -> Tensor:
        """Moments of the rows, float64, shape ``(NUM_FIELDS, num_rows)``; on the host for a device without float64."""
        device = self._device if self._wide == torch.float64 else torch.device("cpu")
        groups = [Moments.empty(1, device)]
        index = [0]
        for names, matrices in self._pieces.items():
            moments = _moments(names, matrices, device)
            order: list[int] = []
            start = 0
            for matrix in matrices:
                pieces = range(start, start + matrix.figures.shape[1])
                for rows in matrix.rows:
                    order += pieces
                    index += [*rows] * (len(pieces) // len(rows))
                start += len(pieces)
            if len(order) > start:  # some pieces are for several rows
                repeated = to_device(torch.tensor(order, device="cpu"), device)
                moments = Moments(*(field[repeated] for field in moments))
            groups.append(moments)
        moments = Moments(*(torch.cat(fields) for fields in zip(*groups, strict=True)))
        return torch.stack(moments.merge(to_device(torch.tensor(index, device="cpu"), device), num_rows))

    def counts(self, bins: Bins, rows: Sequence[int]) -> Tensor:
        """Counts of some rows, float64, shape ``(len(rows), bins.num_counts)``."""
        nothing = torch.zeros(bins.num_counts, dtype=torch.int64, device=self._device)
        counts = torch.stack([self._counts.get((bins, row), nothing) for row in rows])
        return counts.double() if self._wide == torch.float64 else counts.cpu().double()

    def _add_counts(self, bins: Bins, rows: Sequence[int], counts: Tensor) -> None:
        for row in rows:
            # Not in place: a step may begin in a validation loop under inference mode and continue outside of it.
            self._counts[bins, row] = self._counts[bins, row] + counts if (bins, row) in self._counts else counts

    def _piece_length(self, num_elements: int, features: int) -> int:
        """Elements of a piece, a multiple of the size of a token."""
        longest = self._portion if self._wide == torch.float64 else FLOAT32_PIECE
        return min(num_elements, max(1, longest // features) * features)

    def _measure(self, rows: Sequence[Sequence[int]], pieces: Tensor, features: int, needs: int, counted: Tensor | None = None) -> None:
        x = pieces.to(self._wide)
        if counted is not None:
            x = torch.where(counted, x, 0.0)
        scale = {}
        if self._wide == torch.float32:
            # As rows: torch sums the products of rows in pairs, those of a vector sequentially.
            pieces, x = torch.atleast_2d(pieces, x)
            factor = _normalizing_power_of_two(torch.maximum(x.amax(-1), x.amin(-1).neg()))
            x = x * factor.unsqueeze(-1)
            scale = {"scale": factor.reciprocal()}
        figures = _figures(x, pieces, needs, features, counted) | scale
        stacked = torch.stack(list(figures.values())).view(len(figures), -1)
        self._pieces[tuple(figures)].append(_Pieces(stacked, rows, pieces.shape[-1], features))


def _divided(portion: Tensor, scale: Tensor | None) -> Tensor:
    """Elements divided by a scale; not a whole tensor at once, which would take as much memory again."""
    return portion if scale is None else widened(portion) / scale


def _moments(names: Sequence[str], matrices: Sequence[_Pieces], device: torch.device) -> Moments:
    """The moments of all pieces of matrices with the same fields."""
    figures = torch.cat([matrix.figures for matrix in matrices], dim=1).to(device).double()
    sizes: list[tuple[int, int]] = []
    for matrix in matrices:
        sizes += [(matrix.elements, matrix.features)] * matrix.figures.shape[1]
    elements, features = to_device(torch.tensor(sizes, dtype=torch.float64, device="cpu"), device).T
    fields = dict.fromkeys(("center", *Moments._fields), torch.zeros_like(elements)) | {"elements": elements}
    fields |= {"maximum": torch.full_like(elements, -torch.inf), "minimum": torch.full_like(elements, torch.inf)}
    fields |= dict(zip(names, figures, strict=True))
    if "scale" in fields:
        for name, power in _POWER_OF_SCALE.items():
            fields[name] = fields[name] * fields["scale"] ** power
    moments = Moments(**{name: fields[name] for name in Moments._fields}).about_mean(fields["center"])
    # With an infinite mean the deviations are NaN, but the sum of squares is infinite.
    squares = torch.where(fields["deviations"].isposinf(), torch.inf, moments.deviations + moments.elements * moments.mean**2)
    return moments._replace(squares=squares, tokens=moments.elements / features, token_rms=moments.token_norm / features.sqrt())


_POWER_OF_SCALE = {"center": 1, "mean": 1, "deviations": 2, "third": 3, "fourth": 4, "magnitude": 1, "token_norm": 1}
"""The power of the elements' scale that a field is proportional to."""


def _figures(x: Tensor, pieces: Tensor, needs: int, features: int, counted: Tensor | None) -> dict[str, Tensor]:
    """Measure every piece.

    Args:
        x: The pieces in the dtype of the sums, shape ``(pieces, elements)``, scaled if that is float32; or a single piece, ``(elements,)``.
        pieces: The same pieces in the dtype of the tensor, not scaled.
        needs: Bits of :class:`Need`.
        features: Size of a token, which divides ``elements``; only read for ``Need.TOKENS``.
        counted: Which elements count, boolean, of the same shape; ``None`` for all. The others are zero in ``x``.

    Returns:
        Fields of the moments, each of shape ``(pieces,)``. Sums are about the field ``center``, as in :meth:`Moments.about`, or about
        zero without that field.
    """

    def kept(values: Tensor, instead: float) -> Tensor:
        return values if counted is None else torch.where(counted, values, instead)

    figures: dict[str, Tensor] = {} if counted is None else {"elements": counted.sum(-1)}
    if needs & Need.MAGNITUDE:
        figures["magnitude"] = x.abs().sum(-1)  # first, so that the copy's memory is reused below
    d = x
    if needs & _SPREAD:
        part = x if needs & Need.POWERS else x[..., : 1 + x.shape[-1] // CENTER_SHARE]
        mean = part.mean(-1, keepdim=True) if counted is None else x.sum(-1, keepdim=True) / counted.sum(-1, keepdim=True)
        center = mean.nan_to_num(0.0, 0.0, 0.0)
        d = kept(x - center, 0.0)
        figures["center"] = center.squeeze(-1)
    if needs & (_SPREAD | Need.MEAN):
        figures["mean"] = d.sum(-1)
    if needs & (_SPREAD | Need.SQUARES):
        figures["deviations"] = _sum_of_products(d, d)
    if needs & Need.POWERS:
        squares = d * d
        figures |= {"third": _sum_of_products(squares, d), "fourth": _sum_of_products(squares, squares)}
    if needs & Need.EXTREMES:
        figures |= {"maximum": kept(pieces, -torch.inf).amax(-1), "minimum": kept(pieces, torch.inf).amin(-1)}
    if needs & Need.ZEROS:
        figures["zeros"] = kept(pieces == 0, False).sum(-1)
    if needs & Need.NONFINITE:
        figures["nonfinite"] = kept(~pieces.isfinite(), False).sum(-1)
    if needs & Need.TOKENS:
        figures["token_norm"] = torch.linalg.vector_norm(x.unflatten(-1, (-1, features)), dim=-1).sum(-1)
    return figures


def _sum_of_products(x: Tensor, y: Tensor) -> Tensor:
    """The inner products of rows, shape ``(rows,)``."""
    # Autocast would compute a vecdot of float32, but not of float64, in half precision.
    return torch.linalg.vecdot(x, y) if x.dtype == torch.float64 else (x * y).sum(-1)


def _normalizing_power_of_two(peak: Tensor) -> Tensor:
    """The power of two that brings ``peak``, float32, into [1, 2), from the bits of its exponent: exact on every device.

    Zero and subnormal peaks get the largest power with a finite inverse, infinite and NaN peaks the smallest: a product
    with it is as non-finite as the peak.
    """
    exponent_unit, bias = 1 << 23, 127
    exponent = (peak.view(torch.int32) & ((2 * bias + 1) * exponent_unit)).clamp_(exponent_unit, (2 * bias - 1) * exponent_unit)
    return (2 * bias * exponent_unit - exponent).view(peak.dtype)
