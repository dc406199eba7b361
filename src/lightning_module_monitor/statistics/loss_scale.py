"""The factor that a ``GradScaler`` puts on the loss, taken off its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_module_monitor.statistics.running import in_memory

WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)
"""The dtypes that tensors of others are computed with in."""


def widened(tensor: Tensor) -> Tensor:
    """A tensor of a narrower dtype in float32, or in complex64; any other as it is."""
    if tensor.dtype in WIDE:
        return tensor
    return tensor.to(torch.complex64 if tensor.is_complex() else torch.float32)


def unscaled(gradient: Tensor, scale: Tensor | None) -> Tensor:
    """A gradient divided by the scale of its loss, without a host read.

    Args:
        gradient: Any shape, any floating or complex dtype.
        scale: Shape ``()``, on any device; ``None`` if the loss was not scaled.

    Returns:
        The gradient itself if there is no scale. Else a new tensor, in float32 or better: half precision would lose again what
        it only holds because it was scaled. What is not finite stays so. One division rounds once, by a power of two never.
    """
    if scale is None:
        return gradient
    gradient = in_memory(gradient).detach()
    return widened(gradient) / scale.to(gradient.device)
