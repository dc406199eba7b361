"""Figures of attention per query token: entropy and sink of the weights, and the largest logit.

The softmax is computed again, before dropout, block by block, so that a matrix of all queries by all keys never exists.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

MAX_QUERIES = 2048
"""Limit of query tokens measured in a call, of all samples together, at least one of each. From longer calls evenly spaced tokens are
measured, the same in every step."""

HIDING_BIAS = -1e4
"""An additive mask of this or less hides its key, as minus infinity does: -10000, -1e9 and the dtype's minimum are in use."""

CPU_BLOCK_LOGITS = 1 << 18
"""Logits in a block on a CPU: they and their weights fit in the second-level cache."""

BLOCK_LOGITS = 1 << 24
"""Logits in a block on an accelerator: enough to outweigh the cost of the launches."""

CAUSAL_PARTS = 4
"""Number of parts into which the queries of causal attention are cut, which saves three eighths of the logits."""

HIDDEN = 1e30
"""Subtracted from the logit of a hidden key. It is finite, so that its product with the weight zero is zero and not NaN."""

LOWEST_EXPONENT = -87.0
"""``exp(-87)`` times the largest weight is negligible, and near the smallest float32, below which ``exp`` is slow."""

NO_WEIGHT = 1.001 * math.exp(LOWEST_EXPONENT)


class AttentionFigures(NamedTuple):
    """Figures of the measured query tokens, each of shape ``(batch, heads, queries)``, float32 (for float64 input float64).

    They are undefined for a token without a visible key, and the relative entropy also for one with a single visible key.
    """

    entropy: Tensor
    """Entropy of the weights in nats: 0 if all weight is on one key, ``log(visible)`` if it is uniform."""
    relative_entropy: Tensor
    """Entropy over ``log(visible)``: 0 to 1."""
    max_logit: Tensor
    """Largest input of the softmax for a visible key: scaled, with the additive mask."""
    sink: Tensor
    """Weight on the first key, 0 to 1."""
    visible: Tensor
    """Number of keys to which the token attends."""


def query_stride(batch: int, num_queries: int) -> int:
    """The distance between measured query tokens.

    >>> query_stride(1, MAX_QUERIES), query_stride(1, MAX_QUERIES + 1), query_stride(8, 512), query_stride(10_000, 4)
    (1, 2, 2, 4)
    """
    return max(1, min(math.ceil(batch * num_queries / MAX_QUERIES), num_queries))


@torch.no_grad()
def attention_figures(
    query: Tensor, key: Tensor, masks: Sequence[Tensor] = (), *, is_causal: bool = False, scale: float | None = None
) -> AttentionFigures:
    r"""Figures of the softmax of scaled dot product attention, per query token.

    With logits :math:`l_j = s\, q \cdot k_j + m_j` of the visible keys, :math:`d_j = l_j - \max l` and
    :math:`Z = \sum_j e^{d_j}`, the entropy is :math:`\ln Z - \sum_j e^{d_j} d_j / Z`. Neither term is negative, so
    nothing cancels, and a weight near 1 gives an entropy near 0.

    Args:
        query: Shape ``(batch, heads, queries, features)``, any real floating dtype; half precision is computed in float32. If
            there are more than ``MAX_QUERIES`` query tokens in the batch, evenly spaced tokens are measured.
        key: Shape ``(batch, heads, keys, features)``, at least one key.
        masks: Four dimensions each, of the size of ``(batch, heads, queries, keys)`` or of size 1. A boolean mask is true for
            visible keys. Any other mask is added to the logits, and hides keys whose logits it lowers by 10,000 or more.
        is_causal: Whether query token i attends to keys 0 to i only, as in torch for any number of keys.
        scale: Factor of the logits; ``None`` stands for ``1 / sqrt(features)``.

    Returns:
        Figures of the measured query tokens. They are non-finite where any logit is, including those of hidden keys.
    """
    stride = query_stride(query.shape[0], query.shape[2])
    positions = range(stride // 2, query.shape[2], stride)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    scale = 1 / math.sqrt(query.shape[3]) if scale is None else scale
    query = query[:, :, positions.start :: stride].to(dtype).contiguous()
    key = key.to(dtype).contiguous().transpose(2, 3)
    masks = [mask if mask.shape[2] == 1 else mask[:, :, positions.start :: stride] for mask in masks]
    batch, heads, num_queries, num_keys = (*query.shape[:3], key.shape[3])
    sums = query.new_empty((4, batch, heads, num_queries))
    visible = query.new_full((batch, heads, num_queries), num_keys)
    if is_causal:
        visible.copy_(torch.arange(positions.start, positions.stop, stride, device=query.device).add_(1).clamp_(max=num_keys))
    max_logits = max(num_keys, CPU_BLOCK_LOGITS if query.is_cpu else BLOCK_LOGITS)
    scratch = query.new_empty((2, min(max_logits, batch * heads * num_queries * num_keys)))
    # Causal blocks are cut by queries first: early queries have fewer visible keys.
    parts = min(CAUSAL_PARTS, math.ceil(batch * heads * num_queries * num_keys / max_logits)) if is_causal else 1
    for queries in _slices(num_queries, min(max_logits // num_keys, math.ceil(num_queries / parts))):
        measured = positions[queries]
        end = min(num_keys, measured[-1] + 1) if is_causal else num_keys
        rows = torch.arange(measured.start, measured.stop, measured.step, device=query.device).unsqueeze(1)
        causal = [(torch.arange(end, device=query.device) <= rows)[None, None]] if is_causal else []
        per_head = len(measured) * num_keys
        for block in itertools.product(_slices(batch, max_logits // (heads * per_head)), _slices(heads, max_logits // per_head), [queries]):
            query_block, key_block = query[block], key[block[:2]][..., :end]
            shape = (*query_block.shape[:3], end)
            logits, weights = (buffer[: math.prod(shape)].view(shape) for buffer in scratch)
            flat = logits.flatten(0, 1)
            # Written into a buffer: autocast would round the logits, but keeps the dtype of a buffer.
            torch.baddbmm(flat, query_block.flatten(0, 1), key_block.flatten(0, 1), beta=0, alpha=scale, out=flat)
            block_masks = causal + [_mask_of_block(mask, block, end) for mask in masks]
            if block_masks:
                logits += functools.reduce(torch.add, [_bias(mask, dtype) for mask in block_masks])
            if masks:
                hidden = functools.reduce(torch.logical_or, map(_hidden, block_masks))
                visible[block] = end - hidden.expand(-1, -1, -1, end).sum(3)
            sums[:, block[0], block[1], queries] = _softmax_sums(logits, weights)
    max_logit, total, below, first = sums
    entropy = total.log() - below / total
    # Rounding can give more than 1.
    relative = (entropy / visible.log()).clamp(max=1.0)
    return AttentionFigures(entropy, relative, max_logit, F.threshold(first, NO_WEIGHT, 0.0) / total, visible)


def _hidden(mask: Tensor) -> Tensor:
    return ~mask if mask.dtype == torch.bool else mask <= HIDING_BIAS


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as an addend of the logits."""
    if mask.dtype == torch.bool:
        return (mask.to(dtype) - 1.0) * HIDDEN
    return mask.to(dtype).masked_fill(_hidden(mask), -HIDDEN)


def _softmax_sums(logits: Tensor, weights: Tensor) -> Tensor:
    """Sums over the keys of logits of shape ``(batch, heads, queries, keys)``, for the figures; overwrites both arguments.

    Returns:
        Shape ``(4, batch, heads, queries)``: the largest logit; the sum of the weights, scaled so that the largest is 1; the sum of
        weight times difference from the largest logit; the weight on the first key.
    """
    max_logit = logits.amax(3, keepdim=True)
    below = logits.sub_(max_logit).clamp_(min=LOWEST_EXPONENT)
    torch.exp(below, out=weights)
    total, first = weights.sum(3), weights[..., 0].clone()
    return torch.stack([max_logit.squeeze(3), total, weights.mul_(below).sum(3), first])


def _slices(size: int, step: int) -> list[slice]:
    """Cut a dimension into slices of length ``step``, or of 1 if that is 0."""
    return [slice(start, start + max(1, step)) for start in range(0, size, max(1, step))]


def _mask_of_block(mask: Tensor, block: tuple[slice, slice, slice], end: int) -> Tensor:
    """The part of a mask for a block; a dimension of size 1 applies to all blocks."""
    return mask[tuple(slice(None) if size == 1 else part for size, part in zip(mask.shape, (*block, slice(end)), strict=True))]
