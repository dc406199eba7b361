"""Mergeable moments: what is kept of a tensor so that every built-in statistic can be finished later.

A tensor is cut into *pieces* of a few thousand elements. Pieces of one length lie together in a *block*, which is
measured by a handful of vectorized operations on its own device, without a host read. The pieces' figures are then
merged, in float64, into one :class:`Moments` row per site, by the formula of Chan, Golub and LeVeque, "Updating
Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.

Three things keep float32 figures equal to the float64 textbook formula:

* every piece is first multiplied by the power of two that brings its largest magnitude into [1, 2): exact, and no
  square can leave float32;
* deviations are taken from the piece's own mean, and the sum of the deviations, which would be zero if that mean were
  exact, corrects both the mean and the squares;
* a piece is short, so that little is rounded away inside a sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Need:
    """Which moments a statistic is finished from, as bits of an integer.

    What nobody needs is not computed, and must not be read. Integers and not an ``enum.IntFlag``, whose ``&`` costs as
    much as a small kernel.
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

    EVERYTHING = (1 << 8) - 1
    """All moments."""
    SCALED = MEAN | SQUARES | DEVIATIONS | MAGNITUDE | TOKENS
    """The sums and sums of squares: they could leave the dtype, so their block is scaled first."""

    HISTOGRAM = 1 << 8
    """Not a moment: a row of counts."""


Figures = dict[str, Tensor]
"""What is measured of every piece of a block: figure by name, each of shape ``(pieces,)``, in the block's dtype.

``factor``: the power of two by which the piece was multiplied first; ``center``, ``residual``, ``deviations``,
``squares``, ``token_norm`` and ``magnitude`` are those of the multiplied piece. ``center``: its rounded mean.
``residual`` and ``deviations``: sum of the deviations from ``center``, and of their squares. ``squares``: sum of squares.
``token_norm``: sum over the tokens of their Euclidean norm. ``magnitude``: sum of magnitudes. ``maximum``, ``minimum``.
``zeros``, ``finite``: how many.
"""


class Moments(NamedTuple):
    """Moments of the rows of a table, each of shape ``(rows,)``, float64, on one device.

    Rows merge: the moments of two tensors, merged, are the moments of both together.
    """

    elements: Tensor
    """Number of elements."""
    mean: Tensor
    squares: Tensor
    """Sum of squares."""
    deviations: Tensor
    """Sum of squared deviations from the mean."""
    magnitude: Tensor
    """Sum of magnitudes."""
    maximum: Tensor
    minimum: Tensor
    zeros: Tensor
    """Number of elements that are zero."""
    nonfinite: Tensor
    """Number of elements that are NaN or infinite."""
    tokens: Tensor
    """Number of tokens: elements over the size of the last dimension."""
    token_norm: Tensor
    """Sum over the tokens of their Euclidean norm."""
    token_rms: Tensor
    """Sum over the tokens of their root mean square."""

    @classmethod
    def of_nothing(cls, num_rows: int) -> Moments:
        """Moments of empty tensors, on the host: the identity of :meth:`merge`."""
        zeros = torch.zeros(num_rows, dtype=torch.float64, device="cpu")
        return cls(*[zeros] * len(cls._fields))._replace(maximum=zeros - torch.inf, minimum=zeros + torch.inf)

    def to(self, device: torch.device) -> Moments:
        """The same on a device."""
        return Moments(*(field.to(device) for field in self))

    def rows(self, index: Tensor) -> Moments:
        """The rows that ``index``, int64 of shape ``(selected,)``, names, in its order."""
        return Moments(*(field[index] for field in self))

    def merge(self, index: Tensor, num_rows: int) -> Moments:
        """Merge rows that belong together.

        Args:
            index: For each of these rows the row it is merged into, int64, shape ``(rows,)``.
            num_rows: Number of rows of the result. A row that nothing is merged into is the moments of an empty tensor.

        Returns:
            Merged moments of shape ``(num_rows,)``.
        """

        def total(values: Tensor) -> Tensor:
            return torch.zeros(num_rows, dtype=torch.float64, device=values.device).index_add_(0, index, values)

        def extreme(values: Tensor, reduce: str, identity: float) -> Tensor:
            start = torch.full((num_rows,), identity, dtype=torch.float64, device=values.device)
            return start.scatter_reduce_(0, index, values, reduce)

        elements = total(self.elements)
        # The mean of means and not the sum over the count, whose rounding the squares of the spread would show. A row
        # alone in its group keeps its mean to the last bit: its share is 1.
        mean = total(self.mean * (self.elements / elements.clamp(min=1.0)[index]))
        spread = self.mean - mean[index]
        return Moments(
            elements=elements,
            mean=mean,
            squares=total(self.squares),
            deviations=total(self.deviations + self.elements * spread * spread),
            magnitude=total(self.magnitude),
            maximum=extreme(self.maximum, "amax", -torch.inf),
            minimum=extreme(self.minimum, "amin", torch.inf),
            zeros=total(self.zeros),
            nonfinite=total(self.nonfinite),
            tokens=total(self.tokens),
            token_norm=total(self.token_norm),
            token_rms=total(self.token_rms),
        )


Array = npt.NDArray[np.float64]


class HostMoments(NamedTuple):
    """:class:`Moments` on the host, each of shape ``(sites,)``, float64: what statistics are finished from.

    Arrays, and no tensors: at the end of a step the code of either has left the caches, and torch's is ten times as large.
    """

    elements: Array
    mean: Array
    squares: Array
    deviations: Array
    magnitude: Array
    maximum: Array
    minimum: Array
    zeros: Array
    nonfinite: Array
    tokens: Array
    token_norm: Array
    token_rms: Array


def joined(parts: Iterable[Moments]) -> Moments:
    """Rows one after the other."""
    return Moments(*(torch.cat(fields) for fields in zip(*parts, strict=True)))


def merged(shares: Sequence[Tensor], num_rows: int, device: torch.device) -> Tensor:
    """Shares of the same rows, all on one device, together; where nothing but empty tensors was seen there is no share.

    Args:
        shares: Each of shape ``(fields, num_rows)``, as is what is returned.
        num_rows: Number of rows of each.
        device: Where they are.
    """
    if len(shares) == 1:
        return shares[0]
    together = joined([*(Moments(*share) for share in shares), Moments.of_nothing(num_rows).to(device)])
    return torch.stack(together.merge(torch.arange(num_rows, device=device).repeat(len(shares) + 1), num_rows))


@dataclass(frozen=True)
class Scratch:
    """Two buffers that blocks of one dtype and device are measured in."""

    scaled: Tensor
    other: Tensor
    num_elements: int
    """Size of each."""

    @classmethod
    def allocate(cls, num_elements: int, dtype: torch.dtype, device: torch.device) -> Scratch:
        """Two uninitialized buffers of ``num_elements``."""
        with torch.inference_mode(mode=False):
            first, second = (torch.empty(num_elements, dtype=dtype, device=device) for _ in range(2))
        return cls(first, second, num_elements)

    def views(self, num_pieces: int, length: int) -> tuple[Tensor, Tensor]:
        """The buffers in the shape of a block."""
        size = num_pieces * length
        return self.scaled[:size].view(num_pieces, length), self.other[:size].view(num_pieces, length)


def measure(pieces: Tensor, needs: int, features: int, scratch: Scratch) -> Figures:
    """Measure every piece.

    What one dispatch can do for all pieces it does; what needs a second buffer is done block by block, so that a block
    stays in the cache from its scaling to its last sum.

    Args:
        pieces: Pieces of one length, shape ``(pieces, length)``, float32 or float64. They are only read.
        needs: Which moments to take, bits of :class:`Need`.
        features: Size of the tensor's last dimension, of which ``length`` is a multiple; only read for ``Need.TOKENS``.
        scratch: Buffers of the pieces' dtype, on their device, each at least ``length`` long.

    Returns:
        The figures that are needed, on the pieces' device.
    """
    num_pieces, length = pieces.shape
    figures: Figures = {}
    factor = None
    if needs & (Need.SCALED | Need.EXTREMES):
        # Two reductions: along a dimension, aminmax takes seven times as long as both on a CPU.
        figures["maximum"], figures["minimum"] = pieces.amax(1), pieces.amin(1)
    if needs & Need.SCALED:
        figures["factor"] = _normalizing_power_of_two(torch.maximum(figures["maximum"], figures["minimum"].neg()))
        factor = figures["factor"].unsqueeze(1)
    if needs & ~Need.EXTREMES:
        by_block: defaultdict[str, list[Tensor]] = defaultdict(list)
        at_once = max(1, scratch.num_elements // length)
        scaled, other = scratch.views(min(at_once, num_pieces), length)
        for start in range(0, num_pieces, at_once):
            size = min(at_once, num_pieces - start)
            if size < len(scaled):
                scaled, other = scaled[:size], other[:size]
            block = pieces if size == num_pieces else pieces.narrow(0, start, size)
            block_factor = factor if factor is None or size == num_pieces else factor.narrow(0, start, size)
            _measure_block(block, block_factor, needs, features, scaled, other, by_block)
        for name, parts in by_block.items():
            figures[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
    return figures


def _measure_block(  # noqa: PLR0917  # a record for seven arguments would cost more than it tells
    block: Tensor, factor: Tensor | None, needs: int, features: int, scaled: Tensor, other: Tensor, figures: Mapping[str, list[Tensor]]
) -> None:
    """Add what is measured of a block to lists of figures; ``scaled`` and ``other`` are buffers of its shape.

    Squares are written out and summed: ``sum`` adds pairwise, while ``vector_norm`` adds one after the other in float32
    and is off by 3e-6 where one element of a few thousand stands out.
    """
    if needs & Need.ZEROS:
        # As 0.0 and 1.0, here and below: a float buffer is summed faster than a boolean one.
        figures["zeros"].append(torch.eq(block, 0, out=other).sum(1))
    if factor is None:
        torch.abs(block, out=scaled)
    else:
        torch.mul(block, factor, out=scaled)
    if needs & Need.TOKENS or needs & (Need.SQUARES | Need.DEVIATIONS) == Need.SQUARES:
        squares = torch.mul(scaled, scaled, out=other)
        figures["squares"].append(squares.sum(1))
        if needs & Need.TOKENS:
            figures["token_norm"].append(squares.view(len(scaled), -1, features).sum(2).sqrt_().sum(1))
    if needs & (Need.MEAN | Need.DEVIATIONS):
        center = scaled.mean(1, keepdim=True)
        figures["center"].append(center.squeeze(1))
        if needs & Need.DEVIATIONS:
            torch.sub(scaled, center, out=other)
            figures["residual"].append(other.sum(1))
            figures["deviations"].append(other.square_().sum(1))
    if needs & (Need.MAGNITUDE | Need.NONFINITE):
        scaled.abs_()
        if needs & Need.MAGNITUDE:
            figures["magnitude"].append(scaled.sum(1))
        if needs & Need.NONFINITE:
            figures["finite"].append(scaled.lt_(torch.inf).sum(1))


def _normalizing_power_of_two(peak: Tensor) -> Tensor:
    """The power of two that brings ``peak`` into [1, 2), from the exponent's own bits: exact on every device.

    Zero and subnormal peaks get the largest power with a finite inverse, infinite and NaN ones the smallest: a product
    with it is as non-finite as the peak.
    """
    integers, mantissa_bits, bias = (torch.int64, 52, 1023) if peak.dtype == torch.float64 else (torch.int32, 23, 127)
    one = 1 << mantissa_bits
    exponent = (peak.view(integers) & ((2 * bias + 1) * one)).clamp_(one, (2 * bias - 1) * one)
    return (2 * bias * one - exponent).view(peak.dtype)


def moments_of_pieces(figures: Figures, length: Tensor, features: int) -> Moments:
    """Turn what was measured of pieces into their moments.

    Args:
        figures: Of all pieces, each float64 of shape ``(pieces,)``.
        length: Number of elements of each piece, float64, shape ``(pieces,)``.
        features: Size of the last dimension of the tensors that the pieces are from.

    Returns:
        Moments of shape ``(pieces,)``; what was not needed is zero.
    """
    nothing = torch.zeros_like(length)
    scale = figures["factor"].reciprocal() if "factor" in figures else nothing
    residual = figures.get("residual", nothing)
    residual_mean = residual / length
    mean = (figures.get("center", nothing) + residual_mean) * scale
    # Multiplied twice: the square of a large float64 scale is infinite, and zero times infinite is not zero.
    deviations = (figures.get("deviations", nothing) - residual * residual_mean).clamp(min=0.0) * scale * scale
    squares = figures["squares"] * scale * scale if "squares" in figures else deviations + length * mean * mean
    if "maximum" in figures:
        # Of an infinite element the deviations are not a number, and the squares are infinite.
        has_infinity = figures["maximum"].isinf() | figures["minimum"].isinf()
        squares = torch.where(has_infinity & ~figures["maximum"].isnan(), torch.inf, squares)
    token_norm = figures.get("token_norm", nothing) * scale
    return Moments(
        elements=length,
        mean=mean,
        squares=squares,
        deviations=deviations,
        magnitude=figures.get("magnitude", nothing) * scale,
        maximum=figures.get("maximum", nothing),
        minimum=figures.get("minimum", nothing),
        zeros=figures.get("zeros", nothing),
        nonfinite=length - figures["finite"] if "finite" in figures else nothing,
        tokens=length / features,
        token_norm=token_norm,
        token_rms=token_norm / features**0.5,
    )


def moments_of_rows(values: Tensor, counts: Tensor, needs: int) -> Moments:
    """Moments of the rows of a matrix, of those elements of it that count.

    It happens at once for all rows, in float64 where anything would be lost: for many short rows, of which some elements may have
    to be left out.

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
    if needs & (Need.MEAN | Need.DEVIATIONS):
        found["mean"] = kept.sum(1, dtype=torch.float64) / elements.clamp(min=1.0)
    if needs & Need.DEVIATIONS:
        found["deviations"] = torch.where(counts, values - found["mean"].unsqueeze(1), 0.0).square().sum(1)
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
