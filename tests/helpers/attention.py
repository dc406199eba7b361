"""Softmax attention in numpy's float64, written down from its definition."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]


class Truth(NamedTuple):
    """Figures of query tokens, each of shape ``(batch, heads, queries)``; NaN for a token with too few visible keys."""

    attention_entropy: Array
    attention_relative_entropy: Array
    attention_max_logit: Array
    attention_sink: Array


def truth(
    query: Tensor,
    key: Tensor,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Truth:
    """The figures of attention, key by key.

    Args:
        query: Shape ``(batch, heads, queries, features)``.
        key: Shape ``(batch, heads or fewer, keys, features)``; head h reads key head ``h * key_heads // heads``.
        visible: Whether a key is visible, broadcastable.
        bias: Added to the logits, broadcastable.
        is_causal: Whether token i attends to keys 0 to i only.
        scale: Factor of the logits.
    """
    q, k = query.detach().double().numpy(), key.detach().double().numpy()
    batch, heads, queries, features = q.shape
    shape = (batch, heads, queries, k.shape[2])
    is_visible = np.ones(shape, dtype=bool) if visible is None else np.broadcast_to(visible.numpy(), shape)
    added = np.zeros(shape) if bias is None else np.broadcast_to(bias.double().numpy(), shape)
    figures = np.full((4, batch, heads, queries), np.nan)
    for b, h, i in np.ndindex(batch, heads, queries):
        logits = k[b, h * k.shape[1] // heads] @ q[b, h, i] * (features**-0.5 if scale is None else scale) + added[b, h, i]
        keys = [j for j in range(shape[3]) if is_visible[b, h, i, j] and (not is_causal or j <= i) and added[b, h, i, j] > -1e4]
        if not keys:
            continue
        weights = np.zeros(shape[3])
        weights[keys] = np.exp(logits[keys] - logits[keys].max())
        weights /= weights.sum()
        entropy = -sum(p * np.log(p) for p in weights if p > 0)
        relative = entropy / np.log(len(keys)) if len(keys) > 1 else np.nan
        figures[:, b, h, i] = entropy, relative, logits[keys].max(), weights[0]
    return Truth(*figures)
