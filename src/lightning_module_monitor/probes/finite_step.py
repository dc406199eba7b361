"""A flag for each step: whether its losses are finite, and the gradients that show what arrived at their modules."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_module_monitor.distributed.shards import local_part
from lightning_module_monitor.model.hooks import is_tracing
from lightning_module_monitor.model.names import ModuleSite
from lightning_module_monitor.statistics.magnitudes import Magnitudes


class FiniteStep:
    """Takes the largest magnitude of losses and gradients; needs no hook.

    A non-finite value of the forward pass makes the loss non-finite; one of the backward pass reaches the gradients of earlier layers. The
    gradient of a bias is the sum of what arrives at its module: where there is one, it shows as much as that of the weight, and is small.

    Args:
        sites: The modules.
    """

    def __init__(self, sites: Sequence[ModuleSite]) -> None:
        self._owners = [site.module for site in sites if site.module._parameters]
        self._numbers = Magnitudes()
        self._micro_batches: list[int] = []
        """The micro-batch of every number."""
        self.micro_batch = 0
        """The running one."""

    def observe_loss(self, loss: Tensor) -> None:
        """Observe a loss."""
        if not is_tracing():
            self._numbers.add(loss)
            self._note()

    @torch.no_grad()
    def observe_gradients(self) -> None:
        """Observe the gradients of a backward pass."""
        if is_tracing():
            return
        # By device and dtype; on a CPU by dtype alone, which is quicker.
        small: defaultdict[object, list[Tensor]] = defaultdict(list)
        for owner in self._owners:
            own = owner._parameters
            bias = own.get("bias")
            is_shown_by_bias = bias is not None and bias.requires_grad and len(own) == 2 and "weight" in own
            for parameter in (bias,) if is_shown_by_bias else own.values():
                gradient = None if parameter is None else parameter.grad
                if gradient is None:
                    continue
                if type(gradient) is not Tensor:
                    gradient = local_part(gradient)
                if gradient.dim() == 1 and gradient.layout is torch.strided:
                    small[gradient.dtype if gradient.is_cpu else (gradient.device, gradient.dtype)].append(gradient)
                else:
                    self._numbers.add(gradient)
        for gradients in small.values():
            # Reading all of them at once costs as much as reading one.
            self._numbers.add(torch.cat(gradients))
        self._note()

    def _note(self) -> None:
        self._micro_batches += [self.micro_batch] * (len(self._numbers) - len(self._micro_batches))

    def is_finite(self) -> bool:
        """Whether all values are finite; as :meth:`first_nonfinite`."""
        return self.first_nonfinite() is None

    def first_nonfinite(self) -> int | None:
        """The first micro-batch with a non-finite value; ``None`` if all values are finite.

        Reads everything by one transfer, where it does not lie in the host's memory.
        """
        if not self._numbers.may_have_nonfinite():
            return None
        numbers = zip(self._micro_batches, self._numbers.read(), strict=True)
        return next((micro_batch for micro_batch, value in numbers if not math.isfinite(value)), None)

    def forget(self) -> None:
        """The step is over."""
        self._numbers.clear()
        self._micro_batches.clear()
