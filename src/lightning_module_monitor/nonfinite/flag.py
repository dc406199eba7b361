"""Flags of a step with a non-finite value, by its losses and gradients and without hooks.

A non-finite value in the forward pass makes the loss non-finite; in the backward pass it reaches the gradients of earlier layers.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_module_monitor.distributed.shards import local_part
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
    def _add(self, tensor: Tensor) -> None: ...


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
        self._marks: dict[tuple[torch.device, torch.dtype], _Mark] = {}
        self._first_step: int | None = None

    @torch.no_grad()
    def _add(self, tensor: Tensor) -> None:
        found = extremes(tensor)
        if found is not None:
            least, largest = found
            mark = self._marks.get((least.device, least.dtype))
            if mark is None:
                mark = self._marks[least.device, least.dtype] = _Mark(least)
            mark.add(least)
            if largest is not least:
                mark.add(largest)

    @torch.no_grad()
    def mark(self, step: int) -> None:
        """End a step: the numbers since the step before are its own."""
        if self._first_step is None:
            self._first_step = step
        for mark in self._marks.values():
            mark.count(step - self._first_step + 1)

    @torch.no_grad()
    def steps_since(self, step: int) -> Tensor | None:
        """Number of steps since the first non-finite value, shape ``()``, 0 without one; ``None`` if no step was marked.

        Args:
            step: The step after the last marked one.
        """
        if self._first_step is None or not self._marks:
            return None
        self.mark(step - 1)
        first, *others = (mark.num_finite for mark in self._marks.values())
        least = functools.reduce(torch.minimum, (other.to(first.device, first.dtype) for other in others), first)
        since = (step - self._first_step) - least
        for mark in self._marks.values():
            mark.reset()
        self._first_step = None
        return since


class _Mark:
    """The numbers of one device and dtype, changed in place: each operation of torch counts in a step that is not monitored.

    Args:
        like: A tensor of this device and dtype.
    """

    def __init__(self, like: Tensor) -> None:
        self._zero, self._sum = torch.zeros(2, dtype=like.dtype, device=like.device).unbind()
        """``_sum`` is the sum of all extremes, each times 0: it is NaN from the first non-finite value on."""
        self._dtype = torch.promote_types(like.dtype, torch.float32)  # wide enough for numbers of steps
        self._one = torch.ones((), dtype=self._dtype, device=like.device)
        self.num_finite, self._step = torch.zeros(2, dtype=self._dtype, device=like.device).unbind()
        """``num_finite`` is the number of steps before the first with a non-finite value."""

    def add(self, extreme: Tensor) -> None:
        self._sum.addcmul_(extreme, self._zero)

    def count(self, num_steps: int) -> None:
        """End the last of so many steps."""
        sum_of_zeros = self._sum if self._sum.dtype == self._dtype else self._sum.to(self._dtype)
        torch.add(sum_of_zeros, self._one, alpha=num_steps, out=self._step)
        torch.fmax(self.num_finite, self._step, out=self.num_finite)  # leaves out NaN

    def reset(self) -> None:
        self._sum.zero_()
        self.num_finite.zero_()
