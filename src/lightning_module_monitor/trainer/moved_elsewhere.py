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
    "Step {step} has no parameter, gradient, update and total of them; later ones have the parameters from before the step, their change "
    "in the whole step, and{gradients}."
)
FIRST_GRADIENTS, NO_GRADIENTS = " the first gradients that arrive", ", on several ranks, no gradient"


class MovedElsewhere:
    """Finds parameters that other code moves, and notifies the monitor of them: an optimizer that steps within the backward pass, say.

    A parameter is one if its version has changed before its optimizer's step, which has no gradient of it, or when the step is over and
    no optimizer has stepped it. The step that shows it has no values of it, as it has already moved. Once its optimizer steps it with a
    gradient, it is one no longer. Strategies that lay parameters out change versions themselves, and are left out.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._is_on = can_run_again(run.trainer)
        self.parameters: dict[int, Tensor] = {}
        """Parameters that other code moves, by ``id``."""
        self._known: list[Tensor] = []
        """Those that were known before the open step."""
        self._tensors: Sequence[Tensor] = ()
        self._ids: frozenset[int] = frozenset()
        """``id`` of each parameter that required a gradient when they were read."""
        self._versions: Sequence[int] = ()
        """The versions of all parameters when the step began."""
        self._hooks = HookSet()
        self._arrived: set[int] = set()
        """``id`` of each parameter whose gradient has arrived in this step."""
        self._returned: set[int] = set()
        """``id`` of each parameter that an optimizer has stepped in this step."""
        self.trained: frozenset[int] = frozenset()
        """``id`` of each parameter that ever got a gradient."""
        self.scale: Scale = None
        """The factor of the loss."""

    def begin_step(self) -> None:
        """A monitored step begins: what is known to move elsewhere is read now."""
        self.close()
        if not self._is_on:
            return
        for identity in self._returned:
            self.parameters.pop(identity, None)
        self._returned.clear()
        self._arrived.clear()
        self._known = [*self.parameters.values()]
        if self._known:
            self._run.monitor.monitor_parameters(self._known)
            # Elsewhere the gradients that arrive are this rank's own, and are reduced later.
            for parameter in self._known if self._run.trainer.world_size == 1 else ():
                self._hooks.add(register_gradient_hook(parameter, functools.partial(self._arrive, parameter)))
        if len(self._tensors) != len(self._run.planner.index.parameters):
            tensors = [site.tensor() for site in self._run.planner.index.parameters]
            self._tensors = [tensor for tensor in tensors if tensor is not None and not tensor.is_inference()]
            self._ids = frozenset(id(tensor) for tensor in self._tensors if tensor.requires_grad)
        self._versions = [parameter._version for parameter in self._tensors]

    def look(self, parameters: Sequence[Tensor] | None, optimized: set[int], *, is_over: bool) -> None:
        """Look for parameters that have moved since the step began, of some or of all, which no optimizer has stepped yet.

        Args:
            parameters: These; ``None`` for all.
            optimized: Of each parameter that an optimizer has, its ``id``.
            is_over: Whether the step is over, and no optimizer will step them; else one is about to.
        """
        if parameters is not None and not parameters:
            return
        pairs = zip(self._tensors, self._versions, strict=False)
        moved = {id(parameter): parameter for parameter, version in pairs if parameter._version != version and parameter.requires_grad}
        ids = None if parameters is None else {*map(id, parameters)}
        elsewhere = {
            identity: parameter
            for identity, parameter in moved.items()
            if (ids is None or identity in ids) and (is_over or parameter.grad is None or identity not in optimized)
        }
        if not is_over:
            for identity, parameter in self.parameters.items():
                if identity in optimized and parameter.grad is not None and (ids is None or identity in ids):
                    self._returned.add(identity)
        new = elsewhere.keys() - self.parameters.keys()
        self.parameters |= elsewhere
        step = self._run.engine.open_step
        if new and step is not None:
            step.accumulator.has_totals = False
            names = [site.name for site in self._run.planner.index.parameters if id(site.tensor()) in new]
            gradients = FIRST_GRADIENTS if self._run.trainer.world_size == 1 else NO_GRADIENTS
            message = MESSAGE.format(names=shortened(names), step=step.step, gradients=gradients)
            self._run.reporter.log_once(message, logging.WARNING, MESSAGE)

    def unowned(self, optimized: set[int]) -> list[Tensor]:
        """The parameters that require a gradient, no optimizer has, and are not known to move elsewhere."""
        missing = self._ids - optimized - self.parameters.keys() if optimized else frozenset()
        return [parameter for parameter in self._tensors if id(parameter) in missing] if missing else []

    def without(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """The parameters that no other code moves."""
        return [parameter for parameter in parameters if id(parameter) not in self.parameters]

    def end_step(self) -> None:
        """The step is over: what has moved is known now."""
        self._hooks.close()
        if self._known:
            self._run.monitor.monitor_updates(self._known)

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.close()

    def _arrive(self, parameter: Tensor, gradient: Tensor) -> None:
        """The hook on a parameter, before its gradient is accumulated. It returns nothing, which would replace the gradient."""
        step = self._run.engine.observing_step
        if step is not None and id(parameter) not in self._arrived:
            self._arrived.add(id(parameter))
            self.trained |= {id(parameter)}
            with torch.no_grad():
                step.observe_arriving(parameter, gradient, self.scale)
