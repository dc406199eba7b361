"""Flags of a step with a non-finite value, by its losses and gradients and without hooks.

A non-finite value in the forward pass makes the loss non-finite; in the backward pass it reaches the gradients of earlier layers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_module_monitor.distributed.shards import local_part
from lightning_module_monitor.kernels.torch_kernel import widest
from lightning_module_monitor.model.hooks import is_tracing
from lightning_module_monitor.model.names import ModuleSite
from lightning_module_monitor.nonfinite.magnitudes import UNKNOWN, Magnitudes, extremes

MAX_VECTORS = 16
"""Limit of gradients that are observed lightly, evenly spaced: a non-finite gradient reaches all earlier layers."""


class _Flag(ABC):
    """Observes losses and gradients.

    The gradient of a bias is the sum of the gradients at the module's output: it shows as much as that of the weight, and is smaller.
    """

    def __init__(self, sites: Sequence[ModuleSite]) -> None:
        self._owners = [site.module for site in sites if site.module._parameters]
        self._vectors: list[list[nn.Parameter]] | None = None
        """The biases and normalization weights to observe lightly, in groups; ``None`` before the first gradients."""

    def observe_loss(self, loss: Tensor) -> None:
        """Observe a loss."""
        if not is_tracing():
            self._add(loss)

    @torch.no_grad()
    def observe_gradients(self, *, lightly: bool = False) -> None:
        """Observe the gradients of a backward pass; ``lightly``: only of some biases and normalization weights, by a few operations."""
        if is_tracing():
            return
        if self._vectors is None or not lightly:
            groups, others = self._parameters()
            self._vectors = [members[:: -(-len(members) // MAX_VECTORS)] for members in groups]
        if not lightly:
            for parameter in others:
                if parameter.grad is not None:
                    self._add(local_part(parameter.grad))
        for members in self._vectors if lightly else groups:
            gradients = [parameter.grad for parameter in members if parameter.grad is not None]
            if gradients and type(gradients[0]) is not Tensor:
                gradients = [local_part(gradient) for gradient in gradients]
            if gradients:
                self._add(torch.cat(gradients))

    def _parameters(self) -> tuple[list[list[nn.Parameter]], list[nn.Parameter]]:
        """The biases and normalization weights, in groups, and all others, except weights that a bias stands for."""
        # By device and dtype: reading many vectors at once costs as much as reading a single vector.
        groups: defaultdict[object, list[nn.Parameter]] = defaultdict(list)
        others: list[nn.Parameter] = []
        for owner in self._owners:
            parameters = owner._parameters
            bias = parameters.get("bias")
            is_shown_by_bias = bias is not None and bias.requires_grad and parameters.keys() == {"weight", "bias"}
            shown: Iterable[nn.Parameter | None] = (bias,) if is_shown_by_bias else parameters.values()
            for parameter in shown:
                if parameter is None or is_lazy(parameter):
                    continue
                if parameter.dim() == 1 and parameter.layout is torch.strided:
                    groups[type(parameter), parameter.device, parameter.dtype].append(parameter)
                else:
                    others.append(parameter)
        return [*groups.values()], others

    @abstractmethod
    def _add(self, tensor: Tensor) -> None:
        """Observe a tensor."""


class ReadFlag(_Flag):
    """A flag that the host reads before the update."""

    def __init__(self, sites: Sequence[ModuleSite]) -> None:
        super().__init__(sites)
        self._numbers = Magnitudes()
        self._micro_batches: list[int] = []
        """The micro-batch of each number."""
        self.micro_batch = 0
        """The running micro-batch."""

    def _add(self, tensor: Tensor) -> None:
        if self._numbers.add(tensor) != UNKNOWN:
            self._micro_batches.append(self.micro_batch)

    def first_nonfinite(self) -> int | None:
        """The first micro-batch with a non-finite value, ``None`` if all are finite; one transfer from each device."""
        numbers = zip(self._micro_batches, self._numbers.read(), strict=True)
        return next((micro_batch for micro_batch, value in numbers if not math.isfinite(value)), None)

    def forget(self) -> None:
        """Release the numbers of the step."""
        self._numbers = Magnitudes()
        self._micro_batches.clear()


class MarkedSteps(_Flag):
    """A flag that stays on the devices until a record asks for the first step with a non-finite value: the host never waits."""

    def __init__(self, sites: Sequence[ModuleSite]) -> None:
        super().__init__(sites)
        self._marks: dict[torch.device, _Mark] = {}
        self._first_step: int | None = None
        """The first marked step; ``None`` without one."""
        self._last_step = 0
        """The last marked step."""

    @torch.no_grad()
    def _add(self, tensor: Tensor) -> None:
        least_and_largest = extremes(tensor)
        if least_and_largest is not None:
            device = least_and_largest[0].device
            mark = self._marks.get(device)
            if mark is None:
                mark = self._marks[device] = _Mark(device)
            mark.add(*least_and_largest)

    @torch.no_grad()
    def mark(self, step: int) -> None:
        """End a step: the numbers since the step before are its own."""
        if self._first_step is None:
            self._first_step, self._last_step = step, step - 1
        for mark in self._marks.values():
            mark.count(step - self._last_step)
        self._last_step = step

    @torch.no_grad()
    def steps_since(self, step: int) -> Tensor | None:
        """Number of steps since the first non-finite value, shape ``()``, 0 without one; ``None`` if no step was marked.

        Args:
            step: The step after the last marked one.
        """
        if self._first_step is None or not self._marks:
            return None
        self.mark(step - 1)
        num_finite = [mark.num_finite for mark in self._marks.values()]
        least = num_finite[0] if len(num_finite) == 1 else torch.stack([number.to(num_finite[0].device) for number in num_finite]).min()
        since = (step - self._first_step) - least
        self._marks, self._first_step = {}, None
        return since


class _Mark:
    """The numbers of one device, changed in place: the largest and the smallest element, and the steps in which both were finite."""

    def __init__(self, device: torch.device) -> None:
        self._largest, self._least, self.num_finite = torch.zeros(3, dtype=widest(device), device=device).unbind()
        """``num_finite`` is the number of steps before the first with a non-finite value."""

    def add(self, least: Tensor, largest: Tensor) -> None:
        # Both keep a NaN, and neither overflows.
        torch.maximum(self._largest, largest, out=self._largest)
        torch.minimum(self._least, least, out=self._least)

    def count(self, num_steps: int) -> None:
        is_finite = (self._largest - self._least) < math.inf
        self.num_finite.add_(is_finite, alpha=num_steps)
