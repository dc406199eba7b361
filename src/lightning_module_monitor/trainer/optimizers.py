"""The optimizers of a training step: each parameter is observed once, at the first step of its optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_module_monitor.distributed.ranks import least_of_all
from lightning_module_monitor.model.hooks import HookSet, not_compiled
from lightning_module_monitor.monitor import ModuleMonitor

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of an optimizer's ``step``."""


@dataclass
class _FirstStep:
    """The first step of an optimizer in a training step."""

    parameters: list[Tensor] | None
    """The parameters that are observed with the optimizer; ``None`` for all."""
    has_gradients: bool = False
    """Whether the gradients that the optimizer uses were observed."""
    is_decided: bool = False
    """Whether it is known if the optimizer steps, or a scaler skips its step."""
    is_skipped: bool | Tensor = False
    """Whether a scaler skips it: a tensor is not 0 then."""
    is_over: bool = False
    """Whether the optimizer has stepped, or its step was skipped."""


@dataclass(eq=False)
class OptimizerTracker:
    """Notifies a monitor of parameters, gradients and updates at the right moment of each optimizer.

    A parameter without optimizer is observed with the first optimizer that steps; a parameter whose optimizer does not step, at the
    end of the training step. Only the first step of an optimizer is observed, and the first call of its closure (LBFGS).
    """

    monitor: ModuleMonitor
    """The monitor, which has begun a step."""
    module: nn.Module
    """The owner of the parameters."""
    optimizers: Sequence[Optimizer]
    """All optimizers. They get hooks; a step that a ``GradScaler`` skips calls none, unless the optimizer itself skips it."""
    is_automatic: bool
    """Whether Lightning steps every optimizer, and clips."""
    scaler: GradScaler | None
    """Scales the loss; ``None`` if the loss is not scaled."""
    fail: Callable[[str, Exception], None]
    """Receives the name of a hook that raised an error, and the error."""
    scale: Tensor | None = field(default=None, init=False)
    """The factor of the loss; shape ``()``."""
    first_steps: dict[Optimizer, _FirstStep] = field(default_factory=dict, init=False)
    """The first step of each optimizer that stepped, or whose step was skipped."""
    _num_entered: Counter[Optimizer] = field(default_factory=Counter, init=False)
    """Number of running calls of ``step``: torch calls the hooks again for the ``step`` of a base class."""
    _hooks: HookSet = field(default_factory=HookSet, init=False)

    def attach(self) -> None:
        """Register the hooks of the optimizers."""
        for optimizer in self.optimizers:
            self._hooks.add(optimizer.register_step_pre_hook(not_compiled(self._enter_step)))
            self._hooks.add(optimizer.register_step_post_hook(not_compiled(self._leave_step)))

    def begin_backward(self, loss: Tensor) -> None:
        """The backward pass of a loss begins; the loss may be scaled."""
        if self.scaler is not None:
            self.scale = self.scaler.scale(torch.ones((), device=loss.device))
        self.monitor.begin_backward(self.scale)

    def before_clipping(self, optimizer: Optimizer) -> None:
        """The gradients of an optimizer are complete, not clipped, and unscaled unless the optimizer unscales them itself."""
        if not self.monitor.is_monitoring():
            return
        first = self.first_steps.get(optimizer)
        if first is not None:
            # A second step. If no event of the first step has followed, the scaler has skipped the first step.
            self._decide(optimizer, first, is_skipped=True)
            return
        first = self.first_steps[optimizer] = _FirstStep(self._parameters_with(optimizer))
        scale = self.scale if getattr(optimizer, "_step_supports_amp_scaling", False) else None
        if self.is_automatic:
            self.monitor.monitor_gradients(before_clip=True, parameters=first.parameters, scale=scale)
        else:
            # Clipping has already happened here. If the scaler skips the step, no further event follows.
            self._observe_gradients(first, scale)
        self.monitor.monitor_parameters(first.parameters)

    def _enter_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Arrange to be notified when the gradients are final.

        They are not final yet if Lightning passes a closure, which runs forward, backward and clipping. The closure is then replaced
        by a closure that notifies after each call; LBFGS makes many calls, of which the first counts.
        """
        self._num_entered[optimizer] += 1

        def notifying(closure: Callable[[], object]) -> Callable[[], object]:
            def call() -> object:
                loss = closure()
                self._guarded(self._before_update, optimizer)
                return loss

            return call

        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": notifying(kwargs["closure"])}
        # The optimizer itself is the first argument.
        if len(args) > 1 and args[1] is not None:
            return (args[0], notifying(args[1]), *args[2:]), kwargs
        self._guarded(self._before_update, optimizer)
        return None

    def _leave_step(self, optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        self._num_entered[optimizer] -= 1
        if not self._num_entered[optimizer]:
            self._guarded(self._after_update, optimizer)

    def _guarded(self, notify: Callable[[Optimizer], None], optimizer: Optimizer) -> None:
        if not self._hooks:
            return  # closed by an error since the step was entered
        try:
            notify(optimizer)
        except Exception as error:
            self.fail("optimizer.step", error)

    def _before_update(self, optimizer: Optimizer) -> None:
        """An optimizer is about to use the gradients. Until its step ends, further calls of its closure are not observed."""
        first = self.first_steps.get(optimizer)
        if first is None:
            # The module calls the optimizer itself, without Lightning's wrapper.
            first = self.first_steps[optimizer] = _FirstStep(self._parameters_with(optimizer))
            self.monitor.monitor_parameters(first.parameters)
        # A GradScaler sets these two on an optimizer that unscales and skips by itself.
        self._observe_gradients(first, getattr(optimizer, "grad_scale", None))
        self._decide(optimizer, first, is_skipped=getattr(optimizer, "found_inf", False))
        self.monitor.engine.gate.close(self)

    def _after_update(self, optimizer: Optimizer) -> None:
        """An optimizer has moved its parameters; other code has not changed them yet."""
        self.monitor.engine.gate.open(self)
        first = self.first_steps[optimizer]
        # A further step has no update: no copy of the parameters was made before it.
        if not first.is_over:
            first.is_over = True
            self.monitor.monitor_updates(first.parameters, is_skipped=first.is_skipped, optimizers=optimizer)

    def finish(self) -> None:
        """End the step: observe the parameters that no optimizer has moved."""
        self.close()
        for optimizer, first in self.first_steps.items():
            self._observe_gradients(first, None)
            self._decide(optimizer, first, is_skipped=True)
        if self.scaler is not None and not self.first_steps:
            self.monitor.monitor_skipped_step(is_skipped=False)
        rest = self._parameters_with(None)
        if rest is None or rest:
            self.monitor.monitor_parameters(rest)
            if self.is_automatic:
                self.monitor.monitor_gradients(parameters=rest)
            resting = [optimizer for optimizer in self.optimizers if optimizer not in self.first_steps]
            self.monitor.monitor_updates(rest, is_skipped=True, optimizers=resting)

    def close(self) -> None:
        """Remove the hooks."""
        self.monitor.engine.gate.open(self)
        self._hooks.close()

    def _observe_gradients(self, first: _FirstStep, scale: Tensor | None) -> None:
        if not first.has_gradients:
            first.has_gradients = True
            self.monitor.monitor_gradients(parameters=first.parameters, scale=scale)

    def _decide(self, optimizer: Optimizer, first: _FirstStep, *, is_skipped: bool | Tensor) -> None:
        """Record whether the step is skipped. A tensor is not read here: if it is not 0, the parameters do not move."""
        if first.is_decided:
            return
        first.is_decided, first.is_skipped, first.is_over = True, is_skipped, is_skipped is True
        if self.scaler is not None:
            self.monitor.monitor_skipped_step(is_skipped)
        if is_skipped is True:
            self.monitor.monitor_updates(first.parameters, is_skipped=True, optimizers=optimizer)

    def _parameters_with(self, optimizer: Optimizer | None) -> list[Tensor] | None:
        """The parameters to observe with an optimizer; without an optimizer, the parameters not observed yet. ``None`` for all."""
        if len(self.optimizers) <= 1:
            return None if optimizer is not None or not self.first_steps else []
        not_now = {id(parameter) for first in self.first_steps.values() for parameter in first.parameters or ()}
        if optimizer is not None:
            not_now |= parameter_ids(other for other in self.optimizers if other is not optimizer) - parameter_ids([optimizer])
        return [parameter for parameter in self.module.parameters() if id(parameter) not in not_now]


def parameter_ids(optimizers: Iterable[Optimizer]) -> set[int]:
    """The ``id`` of every present parameter of optimizers; groups may be added while training."""
    return {id(parameter) for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]}


@dataclass(eq=False)
class DeepSpeedTracker(OptimizerTracker):
    """Notifies a monitor of parameters, gradients and updates of DeepSpeed's engine.

    The engine has no hooks, and a single optimizer with all parameters, whose step ends with the micro-batch.
    """

    module: DeepSpeedEngine
    """The engine. It zeroes the gradients itself, so that there are no first steps."""
    _has_stepped: bool = field(default=False, init=False)

    def begin_backward(self, loss: Tensor) -> None:
        """The backward pass of a loss begins; under fp16 the engine scales it."""
        if self.module.fp16_enabled():
            self.scale = torch.tensor(float(self.module.optimizer.loss_scale), device=loss.device)
        self.monitor.begin_backward(self.scale)

    def before_clipping(self, _optimizer: Optimizer) -> None:
        """The gradients are complete, and the engine is about to step."""
        # Reading needs collectives of training, which all ranks have to begin together.
        if not self._all_monitor():
            return
        self._has_stepped = True
        self.monitor.monitor_gradients(before_clip=True, scale=self.scale)
        self.monitor.monitor_gradients(scale=self.scale)
        self.monitor.monitor_parameters()

    def finish(self) -> None:
        """End the step: the engine has moved the parameters, unless gradients overflowed."""
        if self._has_stepped and self._all_monitor():
            is_skipped = not self.module.was_step_applied()
            if self.scale is not None:
                self.monitor.monitor_skipped_step(is_skipped)
            self.monitor.monitor_updates(is_skipped=is_skipped)

    def _all_monitor(self) -> bool:
        return least_of_all(self.monitor.is_monitoring(), self.monitor.engine.model.ranks) > 0
