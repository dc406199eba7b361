"""The optimizers of a training step: each parameter is observed once, at the first step of its optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_module_monitor.distributed.ranks import least_of_all
from lightning_module_monitor.model.hooks import HookSet, not_compiled
from lightning_module_monitor.monitor import ModuleMonitor
from lightning_module_monitor.trainer.moved_elsewhere import MovedElsewhere

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
    is_skipped: bool | Tensor | None = None
    """Whether a scaler skips the step: a tensor is not 0 then; ``None`` while it is not known."""
    is_over: bool = False
    """Whether the optimizer has stepped, or its step was skipped."""


@dataclass(eq=False)
class OptimizerTracker:
    """Notifies a monitor of parameters, gradients and updates at the right moment of each optimizer.

    Each optimizer is observed at its first step in a training step, and at the first call of its closure (LBFGS). A parameter that
    no optimizer has is observed with the first optimizer that steps. A parameter whose optimizer does not step is observed at the end.
    """

    monitor: ModuleMonitor
    """The monitor, which has begun a step."""
    module: nn.Module
    """The owner of the parameters."""
    optimizers: Sequence[Optimizer]
    """All optimizers. Their hooks are not called in a step that a ``GradScaler`` skips, unless the optimizer itself skips it."""
    is_automatic: bool
    """Whether Lightning steps every optimizer, and clips."""
    scaler: GradScaler | None
    """Scales the loss; ``None`` if the loss is not scaled."""
    elsewhere: MovedElsewhere
    """Finds parameters that other code moves, of which it notifies the monitor itself."""
    fail: Callable[[str, Exception], None]
    """Receives the name of a hook that raised an error, and the error."""
    scale: Tensor | None = field(default=None, init=False)
    """The factor of the loss; shape ``()``."""
    first_steps: dict[Optimizer, _FirstStep] = field(default_factory=dict, init=False)
    """The first step of each optimizer that has stepped, or whose step was skipped, in this training step."""
    _num_entered: Counter[Optimizer] = field(default_factory=Counter, init=False)
    """Number of running calls of ``step``: torch calls the hooks again for the ``step`` of a base class."""
    _hooks: HookSet = field(default_factory=HookSet, init=False)
    _unhooked: list[Optimizer] = field(default_factory=list, init=False)
    """Optimizers that take no hooks: what their steps leave is observed at the end."""
    _unowned: list[Tensor] = field(default_factory=list, init=False)
    """Parameters that no optimizer has: they may move after its step."""

    def attach(self) -> None:
        """Register the hooks of the optimizers."""
        for optimizer in self.optimizers:
            try:
                self._hooks.add(optimizer.register_step_pre_hook(not_compiled(self._enter_step)))
                self._hooks.add(optimizer.register_step_post_hook(not_compiled(self._leave_step)))
            except AttributeError:  # its class does not call Optimizer.__init__, as that of Opacus does not
                self._unhooked.append(optimizer)

    def begin_backward(self, loss: Tensor) -> None:
        """The backward pass of a loss begins; the loss may be scaled."""
        if self.scaler is not None:
            self.scale = self.elsewhere.scale = self.scaler.scale(torch.ones((), device=loss.device))
        self.monitor.begin_backward(self.scale)

    def before_step(self, optimizer: Optimizer) -> None:
        """The gradients of an optimizer are complete, and unscaled unless the optimizer unscales them itself.

        Lightning clips them afterwards. Under manual optimization the module may have clipped them already.
        """
        if not self.monitor.is_monitoring():
            return
        if optimizer in self.first_steps:
            # A second step. If no event of the first step has followed, the scaler has skipped the first step.
            if optimizer not in self._unhooked:
                self._note_skipped(optimizer, is_skipped=True)
            return
        first = self._begin_first_step(optimizer)
        scale = self.scale if getattr(optimizer, "_step_supports_amp_scaling", False) else None
        if self.is_automatic:
            self.monitor.monitor_gradients(before_clip=True, parameters=first.parameters, scale=scale)
        else:
            # If the scaler skips the step, no further event follows.
            self._observe_gradients(first, scale)

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
        # There is none yet if the module calls the optimizer itself, without Lightning's wrapper.
        first = self.first_steps.get(optimizer) or self._begin_first_step(optimizer)
        # A GradScaler sets these two on an optimizer that unscales and skips by itself.
        self._observe_gradients(first, getattr(optimizer, "grad_scale", None))
        self._note_skipped(optimizer, is_skipped=getattr(optimizer, "found_inf", False))
        self.monitor.engine.gate.close(self)

    def _after_update(self, optimizer: Optimizer) -> None:
        """An optimizer has moved its parameters; other code has not changed them yet."""
        self.monitor.engine.gate.open(self)
        first = self.first_steps[optimizer]
        # A further step has no update: no copy of the parameters was made before it.
        if not first.is_over:
            first.is_over = True
            is_skipped = False if first.is_skipped is None else first.is_skipped
            parameters = first.parameters
            if self._unowned:
                unowned = {*map(id, self._unowned)}
                stepped = self.module.parameters() if parameters is None else parameters
                parameters = [parameter for parameter in stepped if id(parameter) not in unowned]
            self.monitor.monitor_updates(parameters, is_skipped=is_skipped, optimizers=optimizer)

    def finish(self) -> None:
        """End the step: observe the parameters that no optimizer has moved."""
        self.close()
        for optimizer, first in self.first_steps.items():
            self._observe_gradients(first, None)
            self._note_skipped(optimizer, is_skipped=optimizer not in self._unhooked)
            if optimizer in self._unhooked:
                self._after_update(optimizer)
        if self.scaler is not None and not self.first_steps:
            self.monitor.monitor_skipped_step(is_skipped=False)
        rest = self._own(self._not_observed() if len(self.optimizers) > 1 or self.first_steps else None, is_over=True)
        if rest is None or rest:
            self.monitor.monitor_parameters(rest)
            if self.is_automatic:
                self.monitor.monitor_gradients(parameters=rest)
            resting = [optimizer for optimizer in self.optimizers if optimizer not in self.first_steps]
            self.monitor.monitor_updates(rest, is_skipped=True, optimizers=resting)
        if self._unowned:
            self.monitor.monitor_updates(self._unowned)
        self.elsewhere.end_step()

    def close(self) -> None:
        """Remove the hooks."""
        self.monitor.engine.gate.open(self)
        self._hooks.close()
        self.elsewhere.close()

    def _begin_first_step(self, optimizer: Optimizer) -> _FirstStep:
        parameters = None
        if len(self.optimizers) > 1:
            of_others = parameter_ids(other for other in self.optimizers if other is not optimizer) - parameter_ids([optimizer])
            parameters = [parameter for parameter in self._not_observed() if id(parameter) not in of_others]
        parameters = self._own(parameters, is_over=False)
        self.monitor.monitor_parameters(parameters)
        first = self.first_steps[optimizer] = _FirstStep(parameters)
        return first

    def _own(self, parameters: list[Tensor] | None, *, is_over: bool) -> list[Tensor] | None:
        """Some parameters, or all, without those that other code moves; ``None`` for all. No optimizer steps them if the step is over."""
        optimized = parameter_ids(self.optimizers)
        self._unowned = self.elsewhere.unowned(optimized)
        self.elsewhere.look(parameters, optimized, is_over=is_over)
        if not self.elsewhere.parameters:
            return parameters
        return self.elsewhere.without(self.module.parameters() if parameters is None else parameters)

    def _not_observed(self) -> list[Tensor]:
        """The parameters that were observed with no optimizer yet."""
        observed = [first.parameters for first in self.first_steps.values()]
        if None in observed:
            return []
        known = {id(parameter) for parameters in observed for parameter in parameters or ()}
        return [parameter for parameter in self.module.parameters() if id(parameter) not in known]

    def _observe_gradients(self, first: _FirstStep, scale: Tensor | None) -> None:
        if not first.has_gradients:
            first.has_gradients = True
            self.monitor.monitor_gradients(parameters=first.parameters, scale=scale)

    def _note_skipped(self, optimizer: Optimizer, *, is_skipped: bool | Tensor) -> None:
        """Note whether the first step is skipped, when it is known. A tensor is not read here: if it is not 0, the parameters stay."""
        first = self.first_steps[optimizer]
        if first.is_skipped is not None:
            return
        first.is_skipped, first.is_over = is_skipped, is_skipped is True
        if self.scaler is not None and optimizer not in self._unhooked:
            self.monitor.monitor_skipped_step(is_skipped)
        if is_skipped is True:
            self.monitor.monitor_updates(first.parameters, is_skipped=True, optimizers=optimizer)


def parameter_ids(optimizers: Iterable[Optimizer]) -> set[int]:
    """The ``id`` of every present parameter of optimizers; groups may be added while training."""
    return {id(parameter) for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]}


class DeepSpeedTracker:
    """Notifies a monitor of parameters, gradients and updates of DeepSpeed's engine.

    The engine has no hooks, and a single optimizer with all parameters, whose step ends with the micro-batch.
    """

    def __init__(self, monitor: ModuleMonitor, engine: DeepSpeedEngine) -> None:
        self._monitor = monitor
        self._engine = engine
        self.scale: float | None = None
        """The factor of the loss."""
        self.first_steps: Mapping[Optimizer, object] = {}
        """Always empty, as the engine zeroes the gradients."""
        self._has_stepped = False

    def attach(self) -> None:
        """Register no hook."""

    close = attach

    def begin_backward(self, loss: Tensor) -> None:
        """The backward pass of a loss begins; under fp16 the engine scales it."""
        if self._engine.fp16_enabled():
            self.scale = float(self._engine.optimizer.loss_scale)
        self._monitor.begin_backward(self.scale)

    def before_step(self, _optimizer: Optimizer) -> None:
        """The gradients are complete, and the engine is about to step."""
        # Reading needs collectives of training, which all ranks have to begin together.
        if not self._all_monitor():
            return
        self._has_stepped = True
        self._monitor.monitor_gradients(before_clip=True, scale=self.scale)
        self._monitor.monitor_gradients(scale=self.scale)
        self._monitor.monitor_parameters()

    def finish(self) -> None:
        """End the step: the engine has moved the parameters, unless gradients overflowed."""
        if self._has_stepped and self._all_monitor():
            is_skipped = not self._engine.was_step_applied()
            if self.scale is not None:
                self._monitor.monitor_skipped_step(is_skipped)
            self._monitor.monitor_updates(is_skipped=is_skipped)

    def _all_monitor(self) -> bool:
        return least_of_all(self._monitor.is_monitoring(), self._monitor.engine.model.ranks) > 0
