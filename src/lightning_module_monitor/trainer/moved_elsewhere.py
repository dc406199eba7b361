"""Parameters that are moved by other code than the steps of the Trainer's optimizers."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_module_monitor.errors import shortened
from lightning_module_monitor.kernels.table import Scale
from lightning_module_monitor.model.hooks import HookSet, register_gradient_hook
from lightning_module_monitor.trainer.run import Run
from lightning_module_monitor.trainer.strategy import can_run_again

MESSAGE = (
    "{names}: moved by other code than the steps of the Trainer's optimizers, such as an optimizer within the backward pass. "
    "Step {step} has no parameter, gradient and update of them; later ones have the parameters from before the step, their change in the "
    "whole step, and the first gradients that arrive."
)


class MovedElsewhere:
    """Finds parameters that other code moves, and notifies the monitor of them: an optimizer that steps within the backward pass, say.

    A parameter is one if its version changes before an optimizer's step that has no gradient of it, or if no optimizer has it. The step
    that shows it has no values of it, as it has already moved. Strategies that lay parameters out change versions themselves, and are
    left out.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._is_on = can_run_again(run.trainer)
        self.parameters: dict[int, Tensor] = {}
        """Those that were found, by ``id``."""
        self._is_known: list[Tensor] = []
        """Those that were found before the open step."""
        self._trained: Sequence[Tensor] = ()
        self._versions: Sequence[int] = ()
        """The versions of the trained parameters when the step began."""
        self._hooks = HookSet()
        self._arrived: set[int] = set()
        self.scale: Scale = None
        """What the loss is multiplied by."""

    def begin_step(self) -> None:
        """A monitored step begins: what is known to move elsewhere is read now."""
        self.close()
        if not self._is_on:
            return
        self._is_known = [*self.parameters.values()]
        self._arrived.clear()
        if self._is_known:
            self._run.monitor.monitor_parameters(self._is_known)
            for parameter in self._is_known:
                self._hooks.add(register_gradient_hook(parameter, functools.partial(self._arrive, parameter)))
        if len(self._trained) != len(self._run.planner.index.parameters):
            tensors = [site.tensor() for site in self._run.planner.index.parameters]
            self._trained = [tensor for tensor in tensors if tensor is not None and not tensor.is_inference()]
        self._versions = [parameter._version for parameter in self._trained]

    def look(self, among: Sequence[Tensor] | None, optimized: set[int]) -> None:
        """Look for parameters that have moved since the step began, of some or of all, which an optimizer has not stepped yet.

        Args:
            among: The parameters; ``None`` for all.
            optimized: Of each parameter that an optimizer has, its ``id``.
        """
        if among is not None and not among:
            return
        pairs = zip(self._trained, self._versions, strict=False)
        moved = [parameter for parameter, version in pairs if parameter._version != version and parameter.requires_grad]
        if not moved:
            return
        ids = None if among is None else {*map(id, among)}
        found = {
            id(parameter): parameter
            for parameter in moved
            if (ids is None or id(parameter) in ids) and (parameter.grad is None or id(parameter) not in optimized)
        }
        new = found.keys() - self.parameters.keys()
        self.parameters |= found
        if new:
            names = [site.name for site in self._run.planner.index.parameters if id(site.tensor()) in new]
            step = self._run.engine.begun
            self._run.reporter.log_once(MESSAGE.format(names=shortened(names), step=step), logging.WARNING, MESSAGE)

    def without(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Those of some parameters that no other code moves."""
        return [parameter for parameter in parameters if id(parameter) not in self.parameters]

    def end_step(self) -> None:
        """The step is over: what has moved is known now."""
        self._hooks.close()
        if self._is_known:
            self._run.monitor.monitor_updates(self._is_known)

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.close()

    def _arrive(self, parameter: Tensor, gradient: Tensor) -> None:
        """The hook on a parameter, before its gradient is accumulated. It returns nothing, which would replace the gradient."""
        step = self._run.engine.observing_step
        if step is not None and id(parameter) not in self._arrived:
            self._arrived.add(id(parameter))
            with torch.no_grad():
                step.observe_arriving(parameter, gradient, self.scale)
