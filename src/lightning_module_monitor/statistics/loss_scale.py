"""The factor that a ``GradScaler`` puts on the loss, taken off its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_module_monitor.statistics.running import in_memory


def unscaled(gradient: Tensor, scale: Tensor | None) -> Tensor:
    """A gradient divided by the scale of its loss, without a host read.

    Args:
        gradient: Any shape, any real floating dtype.
        scale: Shape ``()``, on any device; ``None`` if the loss was not scaled.

    Returns:
        The gradient itself if there is no scale. Else a new tensor, in float32 or better: half precision would lose again what
        it only holds because it was scaled. What is not finite stays so. One division rounds once, by a power of two never.
    """
    if scale is None:
        return gradient
    gradient = in_memory(gradient).detach()
    wide = gradient if gradient.dtype in (torch.float32, torch.float64) else gradient.float()
    return wide / scale.to(gradient.device)
