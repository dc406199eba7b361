"""The optimizers of one step: each parameter is observed once, at the first step of its own optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_module_monitor.model.hooks import HookSet, not_compiled
from lightning_module_monitor.monitor import ModuleMonitor

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of an optimizer's ``step``."""


@dataclass
class _FirstStep:
    """The first step of one optimizer in a training step."""

    parameters: list[Tensor] | None
    """The parameters that are observed with it; ``None`` for all."""
    has_gradients: bool = False
    """Whether the gradients that it uses were observed."""
    is_decided: bool = False
    """Whether it is known that the optimizer steps, or that a scaler skips its step."""


class OptimizerTracker:
    """Notifies a monitor of parameters, gradients and updates at the right moment of each optimizer.

    A parameter without optimizer is observed with the first optimizer that steps; one whose optimizer does not step, at the end.
    Further steps of an optimizer in the same training step are not observed, nor further calls of its closure (LBFGS).

    Args:
        monitor: The monitor; it has begun a step.
        module: The owner of the parameters.
        optimizers: All optimizers. They get hooks; a step that a ``GradScaler`` skips calls none, unless the optimizer skips it by itself.
        is_automatic: Whether every optimizer is sure to step, and clipping is not the module's own.
        scaler: Scales the loss; ``None`` if the loss is not scaled.
        fail: Receives where an error was raised in a hook, and the error.
    """

    def __init__(
        self,
        monitor: ModuleMonitor,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        is_automatic: bool,
        scaler: GradScaler | None,
        fail: Callable[[str, Exception], None],
    ) -> None:
        self._monitor = monitor
        self._module = module
        self._optimizers = optimizers
        self._is_automatic = is_automatic
        self._scaler = scaler
        self._fail = fail
        self.scale: Tensor | None = None
        """The factor of the loss; shape ``()``."""
        self._first_steps: dict[Optimizer, _FirstStep] = {}
        self._hooks = HookSet()

    @property
    def stepped(self) -> list[Optimizer]:
        """The optimizers that stepped, or whose step was skipped."""
        return [*self._first_steps]

    def attach(self) -> None:
        """Put hooks on the optimizers."""
        for optimizer in self._optimizers:
            self._hooks.add(optimizer.register_step_pre_hook(not_compiled(self._enter_step)))
            self._hooks.add(optimizer.register_step_post_hook(not_compiled(self._leave_step)))

    def begin_backward(self, loss: Tensor) -> None:
        """The backward pass of a loss begins; the loss may be scaled."""
        if self._scaler is not None:
            self.scale = self._scaler.scale(torch.ones((), device=loss.device))
        self._monitor.begin_backward(self.scale)

    def before_clipping(self, optimizer: Optimizer) -> None:
        """The gradients of an optimizer are complete, not clipped, and unscaled unless the optimizer unscales them itself."""
        if not self._monitor.is_monitoring():
            return
        first = self._first_steps.get(optimizer)
        if first is not None:
            # A second step; if no event of the first has arrived, the scaler has skipped that.
            self._decide(first, is_skipped=True)
            return
        first = self._first_steps[optimizer] = _FirstStep(self._parameters_with(optimizer))
        scale = self.scale if getattr(optimizer, "_step_supports_amp_scaling", False) else None
        if self._is_automatic:
            self._monitor.monitor_gradients(before_clip=True, parameters=first.parameters, scale=scale)
        else:
            # Clipping has already happened here. If the scaler skips the step, no further event follows.
            self._observe_gradients(first, scale)
        self._monitor.monitor_parameters(first.parameters)

    def _enter_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Arrange to be notified when the gradients are final.

        It is too early here: Lightning calls ``step`` with a closure that runs forward, backward and clipping. So the closure is
        replaced by one that notifies after its calls: LBFGS makes many, of which the first counts.
        """

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
        self._guarded(self._after_update, optimizer)

    def _guarded(self, notify: Callable[[Optimizer], None], optimizer: Optimizer) -> None:
        if not self._hooks:
            return  # closed by an error since the step was entered
        try:
            notify(optimizer)
        except Exception as error:
            self._fail("optimizer.step", error)

    def _before_update(self, optimizer: Optimizer) -> None:
        """An optimizer is about to use the gradients. Until it ends, calls of its closure are not observed."""
        first = self._first_steps.get(optimizer)
        if first is None:
            # The module has called the optimizer itself, and not Lightning's wrapper.
            first = self._first_steps[optimizer] = _FirstStep(self._parameters_with(optimizer))
            self._monitor.monitor_parameters(first.parameters)
        # A GradScaler sets these two on an optimizer that unscales and skips by itself.
        self._observe_gradients(first, getattr(optimizer, "grad_scale", None))
        self._decide(first, is_skipped=getattr(optimizer, "found_inf", False))
        self._monitor.engine.gate.close(self)

    def _after_update(self, optimizer: Optimizer) -> None:
        """An optimizer has moved its parameters, and nothing else has yet."""
        self._monitor.engine.gate.open(self)
        # After a further step there is no copy of the parameters before it, and so no update.
        self._monitor.monitor_updates(self._first_steps[optimizer].parameters)

    def finish(self) -> None:
        """End the step: observe what no optimizer has moved."""
        self.close()
        for first in self._first_steps.values():
            self._observe_gradients(first, None)
            self._decide(first, is_skipped=True)
        if self._scaler is not None and not self._first_steps:
            self._monitor.monitor_skipped_step(is_skipped=False)
        rest = self._parameters_with(None)
        if rest is None or rest:
            self._monitor.monitor_parameters(rest)
            if self._is_automatic:
                self._monitor.monitor_gradients(parameters=rest)

    def close(self) -> None:
        """Remove the hooks."""
        self._monitor.engine.gate.open(self)
        self._hooks.close()

    def _observe_gradients(self, first: _FirstStep, scale: Tensor | None) -> None:
        if not first.has_gradients:
            first.has_gradients = True
            self._monitor.monitor_gradients(parameters=first.parameters, scale=scale)

    def _decide(self, first: _FirstStep, *, is_skipped: bool | Tensor) -> None:
        """It is known now whether the step is skipped. A tensor is not read: if it is not 0, the parameters do not move."""
        if first.is_decided:
            return
        first.is_decided = True
        if self._scaler is not None:
            self._monitor.monitor_skipped_step(is_skipped)
        if is_skipped is True:
            self._monitor.monitor_updates(first.parameters, is_skipped=True)

    def _parameters_with(self, optimizer: Optimizer | None) -> list[Tensor] | None:
        """The parameters to observe with an optimizer; without one, those not observed yet. ``None`` for all."""
        if len(self._optimizers) <= 1:
            return None if optimizer is not None or not self._first_steps else []
        observed = {id(one) for first in self._first_steps.values() for one in first.parameters or ()}
        own = parameter_ids([] if optimizer is None else [optimizer])
        others = parameter_ids([] if optimizer is None else [one for one in self._optimizers if one is not optimizer])
        return [one for one in self._module.parameters() if id(one) not in observed and (id(one) in own or id(one) not in others)]


def parameter_ids(optimizers: Iterable[Optimizer]) -> set[int]:
    """The ``id`` of every parameter of optimizers, as they are now: groups may be added while training."""
    return {id(parameter) for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]}


class EngineTracker:
    """Notifies a monitor of parameters, gradients and updates where DeepSpeed's engine steps.

    The engine has no hooks, and one optimizer with all parameters: its step is over when the micro-batch is.
    """

    def __init__(self, monitor: ModuleMonitor, engine: DeepSpeedEngine) -> None:
        self._monitor = monitor
        self._engine = engine
        self.scale: Tensor | None = None
        """The factor of the loss; shape ``()``."""
        self._steps = False
        self.stepped: list[Optimizer] = []
        """The engine zeroes its gradients itself."""

    def attach(self) -> None:
        """There are no hooks."""

    def begin_backward(self, loss: Tensor) -> None:
        """The backward pass of a loss begins; under fp16 the engine scales it."""
        if self._engine.fp16_enabled():
            self.scale = torch.tensor(float(self._engine.optimizer.loss_scale), device=loss.device)
        self._monitor.begin_backward(self.scale)

    def before_clipping(self, _optimizer: Optimizer) -> None:
        """The gradients are complete, and the engine is about to step."""
        # Reading takes collectives of training: no rank begins them alone.
        if not self._all_monitor():
            return
        self._steps = True
        self._monitor.monitor_gradients(before_clip=True, scale=self.scale)
        self._monitor.monitor_gradients(scale=self.scale)
        self._monitor.monitor_parameters()

    def finish(self) -> None:
        """End the step: the engine has moved the parameters, unless they overflowed."""
        if self._steps and self._all_monitor():
            is_skipped = not self._engine.was_step_applied()
            if self.scale is not None:
                self._monitor.monitor_skipped_step(is_skipped)
            self._monitor.monitor_updates(is_skipped=is_skipped)

    def close(self) -> None:
        """There are no hooks."""

    def _all_monitor(self) -> bool:
        ranks = self._monitor.engine.model.ranks
        is_monitoring = self._monitor.is_monitoring()
        if ranks is None:
            return is_monitoring
        return bool(ranks.all_reduce(torch.tensor([-float(is_monitoring)], dtype=torch.float64, device="cpu"), "max") < 0)
