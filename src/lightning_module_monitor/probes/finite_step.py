"""A flag for each step: whether its losses are finite, and the gradients that show what arrived at their modules."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lightning_module_monitor.distributed.shards import local_part
from lightning_module_monitor.model.hooks import is_tracing
from lightning_module_monitor.model.names import ModuleSite
from lightning_module_monitor.statistics.magnitudes import Magnitudes

MAX_VECTORS = 16
"""As many gradients are observed lightly, evenly spaced from the first on: what is not finite reaches every layer before it."""


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
        self._vectors: list[list[nn.Parameter]] | None = None
        """The biases and gains to observe lightly, those that go together; ``None`` before :meth:`observe_gradients`."""
        self._since: Tensor | None = None
        """The first step that :meth:`mark` found, shape ``()``, on the device of the loss; -1 if there is none."""

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
        vectors = []
        for owner in self._owners:
            own = owner._parameters
            bias = own.get("bias")
            is_shown_by_bias = bias is not None and bias.requires_grad and len(own) == 2 and "weight" in own
            for parameter in (bias,) if is_shown_by_bias else own.values():
                if parameter is None or nn.parameter.is_lazy(parameter):
                    continue
                if parameter.dim() == 1 and parameter.layout is torch.strided:
                    vectors.append(parameter)
                elif parameter.grad is not None:
                    self._numbers.add(local_part(parameter.grad))
        # By device and dtype: reading many vectors at once costs as much as reading one.
        groups: defaultdict[object, list[nn.Parameter]] = defaultdict(list)
        for parameter in vectors:
            groups[type(parameter), parameter.device, parameter.dtype].append(parameter)
        self._vectors = [members[:: -(-len(members) // MAX_VECTORS)] for members in groups.values()]
        self._observe_vectors(groups.values())
        self._note()

    @torch.no_grad()
    def observe_lightly(self, loss: Tensor | None, *, with_gradients: bool) -> None:
        """Observe a loss and the gradients of some biases and gains, after a backward pass, at the cost of a few operations."""
        if is_tracing():
            return
        if loss is not None:
            self._numbers.add(loss)
        if with_gradients and self._vectors is None:
            self.observe_gradients()
        elif with_gradients:
            self._observe_vectors(self._vectors or ())
        self._note()

    def _observe_vectors(self, groups: Iterable[Sequence[nn.Parameter]]) -> None:
        for members in groups:
            gradients = [parameter.grad for parameter in members if parameter.grad is not None]
            if gradients and type(gradients[0]) is not Tensor:
                gradients = [local_part(gradient) for gradient in gradients]
            if gradients:
                self._numbers.add(torch.cat(gradients))

    def _note(self) -> None:
        self._micro_batches += [self.micro_batch] * (len(self._numbers) - len(self._micro_batches))

    def first_nonfinite(self) -> int | None:
        """The first micro-batch with a non-finite value; ``None`` if all values are finite. One transfer for each other device."""
        if not self._numbers.may_have_nonfinite():
            return None
        numbers = zip(self._micro_batches, self._numbers.read(), strict=True)
        return next((micro_batch for micro_batch, value in numbers if not math.isfinite(value)), None)

    def mark(self, step: int) -> None:
        """Note on the device, without a read, whether a step is the first one with a non-finite value since :meth:`steps_since`."""
        is_bad = self._numbers.nonfinite()
        since = torch.full_like(is_bad, -1, dtype=torch.float32) if self._since is None else self._since
        self._since = torch.where((since < 0) & is_bad, float(step), since)
        self.forget()

    def steps_since(self, step: int) -> Tensor | None:
        """How many steps before this one the first marked one was, shape ``()``, 0 if there is none; ``None`` if no step was looked at."""
        since, self._since = self._since, None
        return None if since is None else torch.where(since < 0, 0.0, step - since)

    def forget(self) -> None:
        """Forget the step."""
        self._numbers.clear()
        self._micro_batches.clear()
