"""Cosines of updates, and of what optimizers keep, with the gradient and with the update of the monitored step before."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_module_monitor.errors import shortened
from lightning_module_monitor.probes.base import StepTools, WatchedParameter
from lightning_module_monitor.statistics.stream import Stream


class PreviousUpdates:
    """The last update of every parameter that has moved, or this rank's part of it, from one monitored step to the next."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def of(self, site: str, update: Tensor) -> Tensor | None:
        """The update before this one; ``None`` if there was none of its shape."""
        previous = self._kept.get(site)
        return previous if previous is not None and previous.shape == update.shape else None

    def replace(self, site: str, update: Tensor, dtype: torch.dtype, is_skipped: Tensor | bool) -> None:
        """Keep an update, unless the step was skipped: the elements of a tensor are not read here.

        Args:
            site: The name of the parameter.
            update: It is not written into any more.
            dtype: That of the parameter.
            is_skipped: Not 0 in a skipped step.
        """
        if is_skipped is True:
            return
        previous, kept = self.of(site, update), update.detach().to(dtype)
        if isinstance(is_skipped, Tensor) and previous is not None:
            kept = torch.where(is_skipped.to(kept.device) == 0, kept, previous.to(kept.device))
        self._kept[site] = kept

    def forget_others(self, sites: Collection[str]) -> None:
        """Release the updates of all other parameters."""
        self._kept = {site: update for site, update in self._kept.items() if site in sites}


class Cosines:
    """Compares updates and states after an optimizer's step.

    Args:
        tools: The tools of the step.
        gradient: Reads the gradient of a parameter.
        own_part: Returns the part of a tensor that this rank counts for a stream.
        previous: The updates of the monitored step before.
    """

    def __init__(
        self,
        tools: StepTools,
        gradient: Callable[[Tensor], Tensor | None],
        own_part: Callable[[Stream, Tensor], Tensor | None],
        previous: PreviousUpdates,
    ) -> None:
        self._tools = tools
        self._gradient = gradient
        self._own_part = own_part
        self._previous = previous
        self._versions: dict[str, tuple[int, int]] = {}
        """By site the ``id`` and the version of a gradient that an optimizer is about to use."""

    def keep_versions(self, watched: Iterable[WatchedParameter]) -> None:
        """The gradients are those that optimizers are about to use."""
        for target in watched:
            for stream in target.streams.values():
                if "gradient" in stream.compared_with:
                    parameter = target.site.tensor()
                    if parameter is not None and parameter.grad is not None:
                        self._versions[target.site.name] = id(parameter.grad), parameter.grad._version

    def compare_with_gradient(
        self, stream: Stream, target: WatchedParameter, tensor: Tensor, optimizers: Sequence[Optimizer], *, is_negated: bool = False
    ) -> None:
        """Compare an update (with the opposite sign), or a state, with the gradient that the optimizer has left."""
        parameter = target.site.tensor() if "gradient" in stream.compared_with else None
        gradient = None if parameter is None else self._gradient(parameter)
        if gradient is None:
            return
        known, version = self._versions.get(target.site.name, (None, None))
        # A fused optimizer takes the scale of the loss out of gradients, and counts as writing even without a scale.
        writing = [optimizer for optimizer in optimizers if not any(group.get("fused") for group in optimizer.param_groups)]
        if id(gradient) == known and gradient._version != version and writing:
            names = shortened([type(optimizer).__name__ for optimizer in writing])
            why = f"{names} writes into the gradients as it steps, and what it used is lost"
            self._tools.reporter.log_once(f"cosine_to_gradient: {why}: NaN is recorded. Try foreach=False.", logging.WARNING)
            return
        part, gradient_part = self._own_part(stream, tensor), self._own_part(stream, gradient)
        if part is not None and gradient_part is not None:
            self._tools.accumulator.measure_comparison(stream, "gradient", part, gradient_part, is_negated=is_negated)

    def compare_with_previous(self, stream: Stream, update: Tensor, dtype: torch.dtype, is_skipped: bool | Tensor) -> None:
        """Compare an update with that of the monitored step before, in whose place it is kept in the dtype of the parameter."""
        part = self._own_part(stream, update) if "previous" in stream.compared_with else None
        if part is None:
            return
        previous = self._previous.of(stream.site, part)
        if previous is not None:
            self._tools.accumulator.measure_comparison(stream, "previous", part, previous)
        self._previous.replace(stream.site, part, dtype, is_skipped)
