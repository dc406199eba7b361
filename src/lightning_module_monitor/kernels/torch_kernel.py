"""Moments by torch operations: any device and floating dtype. The reference implementation.

A tensor is measured in large portions, each a *piece*, or a matrix whose rows are pieces: about ten vectorized operations, without a
host read and without a copy beyond the portion. Sums are about a center; the moments of all pieces are finished at once, at the end.

Elements are widened to float64, which holds the square of every float32. A device without float64 measures short pieces in float32,
each scaled by a power of two, and merges them in float64 on the host: accurate to 1e-5.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_module_monitor.histogram import NUM_COUNTS
from lightning_module_monitor.kernels.bins_of_floats import counts_of
from lightning_module_monitor.kernels.elements import unwrapped
from lightning_module_monitor.kernels.moments import Moments, Need

CPU_PORTION = 1 << 17
"""Elements that are widened at once on a CPU: a MiB of float64, which stays in the cache, and is worth the operations."""

PORTION = 1 << 22
"""The same on an accelerator: enough to be worth the launches, 32 MiB of float64."""

FLOAT32_PIECE = 4096
"""Elements of a piece on a device without float64: what float32 rounds away in a pairwise sum of so many is below 1e-6."""

CENTER_SHARE = 8
"""The center of a piece is the mean of the first of so many parts. The squares about it are at most about as many times those about the
mean, a digit of float64's, where the mean itself would cost one more pass."""

_SPREAD = Need.DEVIATIONS | Need.POWERS


class _Part(NamedTuple):
    """Figures of the pieces of one matrix."""

    names: Sequence[str]
    figures: Tensor
    """The fields of these names, shape ``(fields, pieces)``."""
    rows: Sequence[int]
    """The rows that every piece belongs to; or the row of each piece."""
    is_row_a_piece: bool
    elements: int
    """Number of elements of a piece."""
    features: int


def has_float64(device: torch.device) -> bool:
    """Whether a device computes in float64."""
    return device.type != "mps"


class TorchKernel:
    """The kernel of any device; see :class:`~lightning_module_monitor.kernels.table.Kernel`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._wide = torch.float64 if has_float64(device) else torch.float32
        self._portion = CPU_PORTION if device.type == "cpu" else PORTION
        self._parts: defaultdict[int, list[_Part]] = defaultdict(list)
        """By needs."""
        self._counts: dict[int, Tensor] = {}

    def add(self, rows: Sequence[int], tensor: Tensor, needs: int, other: Tensor | None = None, shift: Tensor | None = None) -> None:
        """Measure ``tensor - other - shift`` once, as float32 or float64 has it, and merge it into rows."""
        for one in (other, shift):
            if one is not None:
                tensor = _widened(tensor) - _widened(one)
        if needs & Need.HISTOGRAM:
            self._add_counts(rows, unwrapped(counts_of(tensor)))
        if not needs & Need.EVERYTHING:
            return
        features = tensor.shape[-1] if needs & Need.TOKENS and tensor.dim() else 1
        flat = tensor.reshape(-1)
        length = self._piece_length(flat.numel(), features)
        per_portion = max(1, self._portion // length) * length
        for start in range(0, flat.numel(), per_portion):
            portion = flat[start : start + per_portion]
            whole = portion.numel() - portion.numel() % length
            if whole > length:
                self._measure(rows, portion[:whole].view(-1, length), features, needs)
                portion = portion[whole:]
            if portion.numel():
                self._measure(rows, portion, features, needs)

    def add_all(self, rows: Sequence[int], tensors: Sequence[Tensor], needs: Sequence[int]) -> None:
        """:meth:`add` of many tensors: small ones of one shape are stacked."""
        alike: defaultdict[tuple[torch.Size, torch.dtype, int], list[tuple[int, Tensor]]] = defaultdict(list)
        for row, tensor, need in zip(rows, tensors, needs, strict=True):
            alike[tensor.shape, tensor.dtype, need].append((row, tensor))
        for (shape, _dtype, need), members in alike.items():
            size = shape.numel()
            at_once = 1 if need & Need.HISTOGRAM or self._piece_length(size, 1) < size else self._portion // size
            features = shape[-1] if need & Need.TOKENS and shape else 1
            for start in range(0, len(members), max(at_once, 1)):
                part = members[start : start + max(at_once, 1)]
                if len(part) == 1:
                    self.add((part[0][0],), part[0][1], need)
                else:
                    pieces = torch.stack([tensor for _row, tensor in part]).reshape(len(part), -1)
                    self._measure([row for row, _tensor in part], pieces, features, need, is_row_a_piece=True)

    def add_counted(self, row: int, tensor: Tensor, counting: Tensor) -> None:
        """Count the elements of a tensor for which ``counting``, boolean, of its shape, is true."""
        counts = counts_of(torch.where(counting, tensor, torch.nan))
        counts[-1] -= counting.logical_not().sum()  # those that do not count are among the NaN
        self._add_counts((row,), counts)

    def collect(self, num_rows: int) -> Tensor:
        """The moments of the rows, float64, shape ``(NUM_FIELDS, num_rows)``; on the host for a device without float64."""
        device = self._device if self._wide == torch.float64 else torch.device("cpu")
        merged = [Moments.of_nothing(1).to(device)]
        index = [0]
        for parts in self._parts.values():
            moments = _moments(parts, device)
            order: list[int] = []
            start = 0
            for part in parts:
                pieces = range(start, start + part.figures.shape[1])
                if part.is_row_a_piece:
                    order += pieces
                    index += part.rows
                else:
                    for row in part.rows:
                        order += pieces
                        index += [row] * len(pieces)
                start += len(pieces)
            merged.append(moments if len(order) == start else moments.rows(torch.tensor(order, device=device)))
        return torch.stack(Moments.joined(merged).merge(torch.tensor(index, device=device), num_rows))

    def counts(self, rows: Sequence[int]) -> Tensor:
        """The counts of some rows, float64, shape ``(len(rows), NUM_COUNTS)``."""
        nothing = torch.zeros(NUM_COUNTS, dtype=torch.int64, device=self._device)
        counts = torch.stack([self._counts.get(row, nothing) for row in rows])
        return counts.double() if self._wide == torch.float64 else counts.cpu().double()

    def _add_counts(self, rows: Sequence[int], counts: Tensor) -> None:
        for row in rows:
            # Not in place: a step may begin in a validation loop under inference mode, and go on outside of it.
            self._counts[row] = self._counts[row] + counts if row in self._counts else counts

    def _piece_length(self, num_elements: int, features: int) -> int:
        """Elements of a piece, a multiple of the size of a token."""
        longest = self._portion if self._wide == torch.float64 else FLOAT32_PIECE
        return min(num_elements, max(1, longest // features) * features)

    def _measure(self, rows: Sequence[int], pieces: Tensor, features: int, needs: int, *, is_row_a_piece: bool = False) -> None:
        x = pieces.to(self._wide)
        scale = {}
        if self._wide == torch.float32:
            # As rows, whose products are summed in pairs; those of a vector are summed one after another.
            pieces, x = torch.atleast_2d(pieces, x)
            factor = _normalizing_power_of_two(torch.maximum(x.amax(-1), x.amin(-1).neg()))
            x = x * factor.unsqueeze(-1)
            scale = {"scale": factor.reciprocal()}
        figures = _figures(x, pieces, needs, features) | scale
        # Within a transform of torch.func what an operation returns is wrapped, and would not outlive it.
        stacked = unwrapped(torch.stack(list(figures.values()))).view(len(figures), -1)
        self._parts[needs & Need.EVERYTHING].append(_Part(tuple(figures), stacked, rows, is_row_a_piece, pieces.shape[-1], features))


def _widened(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _moments(parts: Sequence[_Part], device: torch.device) -> Moments:
    """The moments of all pieces of parts with the same needs."""
    figures = torch.cat([part.figures for part in parts], dim=1).to(device).double()
    each = [(part.figures.shape[1], (part.elements, part.elements / part.features, part.features**0.5)) for part in parts]
    sizes = [of_piece for num_pieces, of_piece in each for _piece in range(num_pieces)]
    elements, tokens, root = torch.tensor(sizes, dtype=torch.float64).to(device).T
    found = dict.fromkeys(("center", *Moments._fields), torch.zeros_like(elements)) | {"elements": elements, "tokens": tokens}
    found |= {"maximum": torch.full_like(elements, -torch.inf), "minimum": torch.full_like(elements, torch.inf)}
    found |= dict(zip(parts[0].names, figures, strict=True))
    if "scale" in found:
        for name, power in _POWER_OF_SCALE.items():
            found[name] = found[name] * found["scale"] ** power
    moments = Moments(**{name: found[name] for name in Moments._fields}).about_mean(found["center"])
    # The deviations from an infinite mean are not a number, and the squares are infinite.
    squares = torch.where(found["deviations"].isposinf(), torch.inf, moments.deviations + elements * moments.mean**2)
    return moments._replace(squares=squares, token_rms=found["token_norm"] / root)


_POWER_OF_SCALE = {"center": 1, "mean": 1, "deviations": 2, "third": 3, "fourth": 4, "magnitude": 1, "token_norm": 1}
"""How a field grows with the elements."""


def _figures(x: Tensor, pieces: Tensor, needs: int, features: int) -> dict[str, Tensor]:
    """Measure every piece.

    Args:
        x: The pieces in the dtype of the sums, shape ``(pieces, elements)``, scaled where that is float32; or one, ``(elements,)``.
        pieces: The same as they were.
        needs: Bits of :class:`Need`.
        features: Size of a token, of which ``elements`` is a multiple; only read for ``Need.TOKENS``.

    Returns:
        Fields of the moments, each of shape ``(pieces,)``. Sums are about the field ``center``, as those of :meth:`Moments.about`;
        about zero where there is none.
    """
    found: dict[str, Tensor] = {}
    if needs & Need.MAGNITUDE:
        found["magnitude"] = x.abs().sum(-1)  # first, so that what follows gets the memory of the copy
    d = x
    if needs & _SPREAD:
        part = x if needs & Need.POWERS else x[..., : 1 + x.shape[-1] // CENTER_SHARE]
        center = part.mean(-1, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
        d = x - center
        found["center"] = center.squeeze(-1)
    if needs & (_SPREAD | Need.MEAN):
        found["mean"] = d.sum(-1)
    if needs & (_SPREAD | Need.SQUARES):
        found["deviations"] = torch.linalg.vecdot(d, d)
    if needs & Need.POWERS:
        squares = d * d
        found |= {"third": torch.linalg.vecdot(squares, d), "fourth": torch.linalg.vecdot(squares, squares)}
    if needs & Need.EXTREMES:
        found |= {"maximum": pieces.amax(-1), "minimum": pieces.amin(-1)}
    if needs & Need.ZEROS:
        found["zeros"] = (pieces == 0).sum(-1)
    if needs & Need.NONFINITE:
        found["nonfinite"] = (~pieces.isfinite()).sum(-1)
    if needs & Need.TOKENS:
        found["token_norm"] = torch.linalg.vector_norm(x.unflatten(-1, (-1, features)), dim=-1).sum(-1)
    return found


def _normalizing_power_of_two(peak: Tensor) -> Tensor:
    """The power of two that brings ``peak``, float32, into [1, 2), from the exponent's own bits: exact on every device.

    Zero and subnormal peaks get the largest power with a finite inverse, infinite and NaN ones the smallest: a product
    with it is as non-finite as the peak.
    """
    one, bias = 1 << 23, 127
    exponent = (peak.view(torch.int32) & ((2 * bias + 1) * one)).clamp_(one, (2 * bias - 1) * one)
    return (2 * bias * one - exponent).view(peak.dtype)
