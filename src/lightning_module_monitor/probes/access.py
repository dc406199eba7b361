"""How parameters and their gradients are read."""

from __future__ import annotations

from torch import Tensor

from lightning_module_monitor.distributed.shards import gradient_of, is_flattened


class ParameterAccess:
    """Reads parameters and gradients where torch has them. A strategy that keeps them elsewhere has its own."""

    makes_copies = False
    """Whether a read takes memory of its own: then one is read after the other."""

    def parameter(self, parameter: Tensor) -> Tensor | None:
        """All elements of a parameter; of one that is laid out over ranks by torch, the tensor that says so."""
        return parameter

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Its gradient, in the same way; ``None`` if there is none."""
        return gradient_of(parameter)

    def is_empty(self, parameter: Tensor) -> bool:
        """Whether it has no element, on any rank."""
        return not parameter.numel() and not is_flattened(parameter)
