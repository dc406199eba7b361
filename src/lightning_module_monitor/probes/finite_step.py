"""Whether a step is finite: its losses, and of the gradients those that tell of what has arrived at their modules."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_module_monitor.modules.names import ModuleSite
from lightning_module_monitor.modules.shards import local_part
from lightning_module_monitor.statistics.magnitudes import Magnitudes

_WEIGHT_AND_BIAS = {"weight", "bias"}


class FiniteStep:
    """Looks at losses and gradients with one number each, and puts no hook on anything.

    What is not finite and reaches the loss makes it so; what arises in the backward pass reaches the gradients of what lies before. A bias
    adds up the gradient that arrives at its module: where there is one, it tells as much as the weight does, and is small.

    Args:
        sites: The modules.
    """

    def __init__(self, sites: Sequence[ModuleSite]) -> None:
        self._owners = [site.module for site in sites if site.module._parameters]
        self._numbers = Magnitudes()

    def see_loss(self, loss: Tensor) -> None:
        """A loss is there."""
        self._numbers.add(loss)

    @torch.no_grad()
    def see_gradients(self) -> None:
        """The gradients of a backward pass are there."""
        small: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for owner in self._owners:
            own = owner._parameters
            bias = own.get("bias")
            is_told_by_bias = bias is not None and bias.requires_grad and own.keys() == _WEIGHT_AND_BIAS
            for parameter in (bias,) if is_told_by_bias else own.values():
                gradient = None if parameter is None else parameter.grad
                if gradient is None:
                    continue
                gradient = local_part(gradient)
                if gradient.dim() == 1 and gradient.layout is torch.strided:
                    small[gradient.device, gradient.dtype].append(gradient)
                else:
                    self._numbers.add(gradient)
        for gradients in small.values():
            # One look at all of them costs what one of them does.
            self._numbers.add(torch.cat(gradients))

    def is_finite(self) -> bool:
        """Whether all was finite; reads everything by one transfer, where it does not lie in the host's memory."""
        return not self._numbers.may_have_nonfinite() or all(map(math.isfinite, self._numbers.read()))

    def forget(self) -> None:
        """The step is over."""
        self._numbers.clear()
