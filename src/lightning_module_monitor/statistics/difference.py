"""A difference of tensors, which is measured without being computed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_module_monitor.statistics.loss_scale import widened


@dataclass(frozen=True)
class Difference:
    """``tensor - other - shift``. Of half-precision tensors it is computed in float32, which does not round it again.

    Attributes:
        tensor: Any shape, any real floating dtype.
        other: Of the same shape; ``None`` for zero.
        shift: Of a shape that is broadcast to that; ``None`` for zero.

    Raises:
        ValueError: If the shapes of ``tensor`` and ``other`` differ.
    """

    tensor: Tensor
    other: Tensor | None = None
    shift: Tensor | None = None

    def __post_init__(self) -> None:
        if self.other is not None and self.tensor.shape != self.other.shape:
            raise ValueError(f"its shape is {tuple(self.tensor.shape)}, and that of what it is compared with {tuple(self.other.shape)}")

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
