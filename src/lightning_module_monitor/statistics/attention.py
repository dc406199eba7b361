"""What attention does with its keys, per query token: entropy and sink of the weights, and the largest logit.

The softmax is computed again, before dropout, block by block: a matrix of all queries by all keys is never there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MAX_QUERIES = 2048
"""Query tokens of a call that are measured: of more, evenly spaced ones, the same in every step."""

HIDING_BIAS = -1e4
"""An additive mask hides its key from here on, as minus infinity does: people write -10000, -1e9 and the dtype's minimum."""

CPU_BLOCK_LOGITS = 1 << 17
"""Logits that are there at once on a CPU: they and their weights stay in the second-level cache."""

BLOCK_LOGITS = 1 << 24
"""Logits that are there at once on an accelerator: enough to be worth the launches."""

_HIDDEN_LOGIT = -1e30
"""Finite, so that the weight zero times it is zero, and not NaN."""

Slices = tuple[slice, slice, slice]
"""Of batch, heads and queries."""


class AttentionFigures(NamedTuple):
    """Figures of the query tokens that were measured, each of shape ``(batch, heads, queries)``, float32 (of float64: float64).

    Those of a token that sees no key mean nothing, nor does the relative entropy of one that sees a single key.
    """

    entropy: Tensor
    """Of the weights, in nats: 0 where all weight is on one key, ``log(visible)`` where it is even."""
    relative_entropy: Tensor
    """Entropy over ``log(visible)``: 0 to 1."""
    max_logit: Tensor
    """Largest of what the softmax gets for the visible keys: scaled, and with an additive mask added."""
    sink: Tensor
    """Weight on the first key, 0 to 1."""
    visible: Tensor
    """Number of keys that the token sees."""


def stride_of(num_queries: int) -> int:
    """Every how many-th query token is measured.

    >>> stride_of(MAX_QUERIES), stride_of(MAX_QUERIES + 1)
    (1, 2)
    """
    return max(1, math.ceil(num_queries / MAX_QUERIES))


@torch.no_grad()
def attention_figures(
    query: Tensor, key: Tensor, masks: Sequence[Tensor] = (), *, is_causal: bool = False, scale: float | None = None
) -> AttentionFigures:
    r"""What the softmax of scaled dot product attention looks like, per query token.

    With logits :math:`l_j = s\, q \cdot k_j + m_j` of the visible keys, :math:`d_j = l_j - \max l` and
    :math:`Z = \sum_j e^{d_j}`, the entropy is :math:`\ln Z - \sum_j e^{d_j} d_j / Z`: two terms that are never negative, so
    that nothing cancels, and a weight of nearly one has an entropy of nearly zero.

    Args:
        query: Shape ``(batch, heads, queries, features)``, any real floating dtype; half precision is computed in float32. Of
            more than ``MAX_QUERIES`` query tokens evenly spaced ones are measured.
        key: Shape ``(batch, heads, keys, features)``, at least one key.
        masks: Each of four dimensions, of the size of ``(batch, heads, queries, keys)`` or of size 1. Of booleans, true lets
            a key be seen; others are added to the logits, and hide a key that they lower by 10,000 or more.
        is_causal: Whether query token i sees keys 0 to i only, as torch has it for any number of keys.
        scale: Factor of the logits; ``None`` is one over the square root of ``features``.

    Returns:
        Figures of the measured query tokens. Where a visible logit is not finite, figures are not.
    """
    stride = stride_of(query.shape[2])
    positions = range(stride // 2, query.shape[2], stride)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    query = query[:, :, positions.start :: stride].to(dtype) * (1 / math.sqrt(query.shape[3]) if scale is None else scale)
    key = key.to(dtype).transpose(2, 3)
    masks = [mask if mask.shape[2] == 1 else mask[:, :, positions.start :: stride] for mask in masks]
    shape = (*query.shape[:3], key.shape[3])
    figures = torch.empty((len(AttentionFigures._fields), *shape[:3]), dtype=dtype, device=query.device)
    for part in _blocks(shape, CPU_BLOCK_LOGITS if query.is_cpu else BLOCK_LOGITS):
        batch, heads, queries = part
        hiding, end = [], shape[3]
        if is_causal:
            seen = positions[queries]
            end = min(end, seen[-1] + 1)
            rows = torch.arange(seen.start, seen.stop, stride, device=query.device)
            hiding.append(torch.arange(end, device=query.device) > rows.unsqueeze(1))
        logits = torch.matmul(query[part], key[batch, heads, :, :end])
        for mask in masks:
            of_block = _of_block(mask, part, end)
            if of_block.dtype == torch.bool:
                hiding.append(~of_block)
            else:
                logits += of_block
                hiding.append(of_block <= HIDING_BIAS)
        for figure, whole in zip(_figures(logits, hiding), figures, strict=True):
            whole[part] = figure
    return AttentionFigures(*figures)


def _figures(logits: Tensor, hiding: Sequence[Tensor]) -> AttentionFigures:
    """Figures of logits of shape ``(batch, heads, queries, keys)``, which are overwritten; ``hiding`` is true of hidden keys."""
    num_keys = logits.shape[3]
    visible = torch.full((), float(num_keys), dtype=logits.dtype, device=logits.device)
    if hiding:
        hidden = hiding[0]
        for more in hiding[1:]:
            hidden = hidden | more
        logits.masked_fill_(hidden, _HIDDEN_LOGIT)
        visible = visible - hidden.expand(*hidden.shape[:-1], num_keys).sum(-1)
    max_logit = logits.amax(3, keepdim=True)
    below = logits.sub_(max_logit)
    weights = below.exp()
    total = weights.sum(3)
    sink = weights[..., 0] / total
    entropy = total.log() - weights.mul_(below).sum(3) / total
    # The entropy over its own largest value may be rounded up to more than 1.
    return AttentionFigures(entropy, (entropy / visible.log()).clamp_(max=1.0), max_logit.squeeze(3), sink, visible)


def _blocks(shape: tuple[int, ...], most: int) -> Iterator[Slices]:
    """Cut ``(batch, heads, queries, keys)`` into blocks of about ``most`` logits: of whole samples if possible, else of whole heads."""
    batch, heads, queries, keys = shape
    sizes = (batch, heads, queries)
    steps = (most // (heads * queries * keys), most // (queries * keys), most // keys)
    starts = (range(0, size, max(1, step)) for size, step in zip(sizes, steps, strict=True))
    for corner in itertools.product(*starts):
        batch_part, heads_part, queries_part = (slice(at, at + max(1, step)) for at, step in zip(corner, steps, strict=True))
        yield batch_part, heads_part, queries_part


def _of_block(mask: Tensor, part: Slices, end: int) -> Tensor:
    """A mask's share of a block; a dimension of size 1 is shared by all blocks."""
    batch, heads, queries, keys = (
        slice(None) if size == 1 else of_size for size, of_size in zip(mask.shape, (*part, slice(end)), strict=True)
    )
    return mask[batch, heads, queries, keys]
