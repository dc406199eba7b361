"""The optimizers of one step, followed: of every parameter is told once, at the first step of its own optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_module_monitor.model.hooks import HookSet
from lightning_module_monitor.monitor import ModuleMonitor
from lightning_module_monitor.trainer.updates import watch_update


@dataclass
class _Turn:
    """What was told of one optimizer."""

    parameters: list[Tensor] | None
    """Those that are told of with it; ``None`` for all."""
    has_gradients: bool = False
    """Whether what it uses was told."""
    is_decided: bool = False
    """Whether it is known if it steps, or a scaler skips that."""


class OptimizerSteps:
    """Tells a monitor of parameters, gradients and updates at the moments that are right for each optimizer.

    A parameter that no optimizer has is told of with the first that steps; one whose optimizer does not step, at the end.
    What an optimizer does after its first step in this one is not told, nor what further calls of its closure (LBFGS) do.

    Args:
        monitor: It has begun a step.
        module: Whose parameters they are.
        optimizers: All that there are.
        is_automatic: Whether every optimizer is sure to step, and clipping is not the module's own.
        scaler: What scales the loss, if anything does.
    """

    def __init__(
        self, monitor: ModuleMonitor, module: nn.Module, optimizers: Sequence[Optimizer], *, is_automatic: bool, scaler: GradScaler | None
    ) -> None:
        self._monitor = monitor
        self._module = module
        self._optimizers = optimizers
        self._is_automatic = is_automatic
        self._scaler = scaler
        self._scale: Tensor | None = None
        self._turns: dict[Optimizer, _Turn] = {}
        self._hooks = HookSet()
        self._silence = ExitStack()

    def watch(self, begin: Callable[[Optimizer], None], end: Callable[[Optimizer], None]) -> None:
        """Be told when optimizers step: :meth:`begin` and :meth:`end` are to be called by these."""
        for optimizer in self._optimizers:
            watch_update(optimizer, begin, end, self._hooks)

    def begin_backward(self, loss: Tensor) -> None:
        """The backward pass of a loss, scaled if it is to be, begins."""
        if self._scaler is None:
            self._monitor.begin_backward()
        else:
            self._scale = self._scaler.scale(torch.ones((), device=loss.device))
            self._monitor.begin_backward(self._scale)

    def prepare(self, optimizer: Optimizer) -> None:
        """An optimizer has its gradients: complete, not clipped, and unscaled unless it does that itself."""
        if not self._monitor.is_monitoring():
            return
        turn = self._turns.get(optimizer)
        if turn is not None:
            # Another step, and nothing was heard of the first.
            self._decide(turn, is_skipped=True)
            return
        turn = self._new_turn(optimizer)
        scale = self._scale if getattr(optimizer, "_step_supports_amp_scaling", False) else None
        if self._is_automatic:
            self._monitor.monitor_gradients(before_clip=True, parameters=turn.parameters, scale=scale)
        else:
            # Who clips has done so by now, and where the step is skipped nothing more is heard of it.
            self._see_gradients(turn, scale)
        self._monitor.monitor_parameters(turn.parameters)

    def begin(self, optimizer: Optimizer) -> None:
        """An optimizer is about to use the gradients. What further calls of its closure do, until it ends, does not count."""
        turn = self._turns.get(optimizer)
        if turn is None:
            # It was called past Lightning.
            turn = self._new_turn(optimizer)
            self._monitor.monitor_parameters(turn.parameters)
        # One that unscales and skips by itself was told how by the scaler.
        self._see_gradients(turn, getattr(optimizer, "grad_scale", None))
        self._decide(turn, is_skipped=getattr(optimizer, "found_inf", False))
        self._silence.enter_context(self._monitor.no_monitor())

    def end(self, optimizer: Optimizer) -> None:
        """An optimizer has moved its parameters, and nobody else has yet."""
        self._silence.close()
        # After a further step there is no copy of before, and so no update.
        self._monitor.monitor_updates(self._turns[optimizer].parameters)

    def finish(self) -> None:
        """The step is over: tell of what no optimizer has moved."""
        self.close()
        for turn in self._turns.values():
            self._see_gradients(turn, None)
            self._decide(turn, is_skipped=True)
        if self._scaler is not None and not self._turns:
            self._monitor.monitor_skipped_step(is_skipped=False)
        rest = self._with(None)
        if rest is None or rest:
            self._monitor.monitor_parameters(rest)
            if self._is_automatic:
                self._monitor.monitor_gradients(parameters=rest)

    def close(self) -> None:
        """Follow no longer."""
        self._silence.close()
        self._hooks.close()

    def _see_gradients(self, turn: _Turn, scale: Tensor | None) -> None:
        if not turn.has_gradients:
            turn.has_gradients = True
            self._monitor.monitor_gradients(parameters=turn.parameters, scale=scale)

    def _decide(self, turn: _Turn, *, is_skipped: bool | Tensor) -> None:
        """It is known now whether an optimizer's first step is skipped: where a tensor says so, which is not read, weights do not move."""
        if turn.is_decided:
            return
        turn.is_decided = True
        if self._scaler is not None:
            self._monitor.monitor_skipped_step(is_skipped)
        if is_skipped is True:
            self._monitor.monitor_updates(turn.parameters, is_skipped=True)

    def _new_turn(self, optimizer: Optimizer) -> _Turn:
        turn = self._turns[optimizer] = _Turn(self._with(optimizer))
        return turn

    def _with(self, optimizer: Optimizer | None) -> list[Tensor] | None:
        """The parameters that are told of with an optimizer; without one those that were not told of yet. ``None`` for all."""
        if len(self._optimizers) <= 1:
            return None if optimizer is not None or not self._turns else []
        told = {id(one) for turn in self._turns.values() for one in turn.parameters or ()}
        others = {id(one) for other in self._optimizers if optimizer not in (None, other) for one in _parameters_of(other)}
        own = {id(one) for one in (_parameters_of(optimizer) if optimizer is not None else ())}
        return [one for one in self._module.parameters() if id(one) not in told and (id(one) in own or id(one) not in others)]


def _parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """As they are now: groups may be added while training."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
