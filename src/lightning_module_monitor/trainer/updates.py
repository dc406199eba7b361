"""The moments right before and right after an optimizer moves the parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from lightning_module_monitor.model.hooks import HookSet


def watch_update(optimizer: Optimizer, before: Callable[[Optimizer], None], after: Callable[[Optimizer], None], hooks: HookSet) -> None:
    """Be told when an optimizer has its gradients and is about to use them, and when it has.

    An optimizer's pre-hook alone comes too early: Lightning hands ``step`` a closure that runs forward, backward and
    clipping inside of it. So the closure is replaced by one that tells when the first call of it is over. A step that a
    ``GradScaler`` skips tells neither, unless the optimizer skips by itself.

    Args:
        optimizer: Any torch optimizer.
        before: Called with it once a step, with final gradients and parameters that have not moved.
        after: Called with it when the step is over.
        hooks: Owns the hooks.
    """
    hooks.add(optimizer.register_step_pre_hook(_PreHook(functools.partial(before, optimizer))))
    hooks.add(optimizer.register_step_post_hook(lambda _optimizer, _args, _kwargs: after(optimizer)))


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _PreHook:
    """Called when ``step`` is entered; may hand it other arguments."""

    def __init__(self, before: Callable[[], None]) -> None:
        self._before = before

    def __call__(self, _optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        closure = kwargs.get("closure")
        if closure is not None:
            return args, {**kwargs, "closure": _TellingClosure(closure, self._before)}
        # The optimizer itself is the first argument.
        if len(args) > 1 and args[1] is not None:
            return (args[0], _TellingClosure(args[1], self._before), *args[2:]), kwargs
        self._before()
        return None


class _TellingClosure:
    """The optimizer's closure, which tells when its first call is over. Optimizers like LBFGS call it many times."""

    def __init__(self, closure: Callable[[], Any], before: Callable[[], None]) -> None:
        self._closure = closure
        self._before: Callable[[], None] | None = before

    def __call__(self) -> object:
        loss = self._closure()
        if self._before is not None:
            before, self._before = self._before, None
            before()
        return loss
