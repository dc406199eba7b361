"""A tensor that is the difference of others, which need not be written down to be measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Difference:
    """``tensor - other - shift``. In half precision it is taken in float32, which does not round it again.

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
        """The difference as a tensor: the tensor itself where nothing is taken from it, in its own precision."""
        return self.tensor if self.other is None and self.shift is None else self.computed()

    def computed(self, out: Tensor | None = None) -> Tensor:
        """The difference, in float32 or float64; written into ``out`` if given, a tensor of its shape and dtype."""
        result = _wide(self.tensor)
        for other in (self.other, self.shift):
            if other is not None:
                result = torch.sub(result, _wide(other), out=out)
        return result


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
