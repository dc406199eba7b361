"""Every hook handle has an owner that takes it off again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn


class Handle(Protocol):
    """What torch returns for a registered hook."""

    def remove(self) -> None:
        """Take the hook off; a second call does nothing."""


def is_in_backward() -> bool:
    """Whether a backward pass runs: a forward pass within it is the recomputation of a checkpointed one, which was seen before."""
    return torch._C._current_graph_task_id() != -1


class HookSet:
    """Owns hook handles; :meth:`close` removes every one, also after an error, and may be called again."""

    def __init__(self) -> None:
        self._handles: list[Handle] = []

    def __len__(self) -> int:
        return len(self._handles)

    def add(self, handle: Handle) -> None:
        """Own a handle from now on."""
        self._handles.append(handle)

    def add_forward(self, module: nn.Module, hook: Callable[..., None], *, with_kwargs: bool = False) -> None:
        """Put a hook on that is called with a module, its arguments and its output, after its forward.

        Args:
            module: Any.
            hook: What is called.
            with_kwargs: Whether it is called with the keyword arguments too, before the output.
        """
        # A class of the user's may override the method without the keyword.
        self.add(module.register_forward_hook(hook, with_kwargs=True) if with_kwargs else module.register_forward_hook(hook))

    def close(self) -> None:
        """Remove every hook."""
        while self._handles:
            self._handles.pop().remove()


class ForwardHook:
    """What all hooks on modules are: of a module that is copied or pickled while it is watched, the copy is not watched."""

    def __reduce__(self) -> tuple[type[_CopiedHook], tuple[()]]:
        return _CopiedHook, ()


class _CopiedHook:
    """Stands in the copy of a watched module where the original has its hook, and does nothing."""

    def __call__(self, *_args: object) -> None:
        pass


class UncopiedHook(ForwardHook):
    """Calls a function, and returns nothing: what a module's hook returns replaces the module's arguments or output.

    Args:
        function: Gets what torch gives to the hook.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: object) -> None:
        """Call the function."""
        self._function(*args)


class ReplacingHook(ForwardHook):
    """Calls a function, and gives torch what it returns: ``None``, or what is to take the place of a module's output.

    Args:
        function: Gets what torch gives to the hook.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def __call__(self, *args: object) -> object:
        """Call the function."""
        return self._function(*args)
