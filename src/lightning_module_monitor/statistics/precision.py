"""Differences of tensors, and gradients divided by the scale of their loss, in float32 or float64."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_module_monitor.kernels.elements import in_memory, widened
from lightning_module_monitor.kernels.table import Scale


def divided_by_scale(gradient: Tensor, scale: Scale) -> Tensor:
    """A gradient divided by the scale of its loss, without a host read.

    Args:
        gradient: Any shape, any floating or complex dtype.
        scale: The scale of the loss.

    Returns:
        The gradient itself if there is no scale. Else a new tensor in float32 or better, because half precision would underflow without
        the scale. A division by a power of two is exact, and non-finite elements stay non-finite.
    """
    if scale is None:
        return gradient
    gradient = in_memory(gradient).detach()
    return widened(gradient) / (scale.to(gradient.device) if isinstance(scale, Tensor) else scale)


@dataclass(frozen=True)
class Difference:
    """``tensor - other - shift``. For half-precision tensors it is computed in float32, and not rounded again.

    Attributes:
        tensor: Any shape, any real floating dtype.
        other: Of the same shape; ``None`` for zero.
        shift: Broadcast to that shape; ``None`` for zero.

    Raises:
        ValueError: If the shapes of ``tensor`` and ``other`` differ.
    """

    tensor: Tensor
    other: Tensor | None = None
    shift: Tensor | None = None

    def __post_init__(self) -> None:
        if self.other is not None and self.tensor.shape != self.other.shape:
            raise ValueError(
                f"its shape is {tuple(self.tensor.shape)}, and it is compared with a tensor of shape {tuple(self.other.shape)}"
            )

    def written(self) -> Tensor:
        """The difference as a tensor; without ``other`` and ``shift`` the tensor itself, in its own precision."""
        return self.tensor if self.other is None and self.shift is None else self.computed()

    def computed(self) -> Tensor:
        """The difference, in float32 or float64."""
        result = widened(self.tensor)
        for other in (self.other, self.shift):
            if other is not None:
                result = result - widened(other)
        return result
