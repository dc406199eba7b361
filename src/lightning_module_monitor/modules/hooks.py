"""Every hook handle has an owner that takes it off again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


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
        self._tables: list[dict[int, Any]] = []
        """What modules know of their hooks, by number: those that have one of the number below. They may have others in the end."""
        self._flags: list[dict[int, Any]] = []
        """Likewise what modules know of the hooks that get keyword arguments."""
        self._number = -1

    def __len__(self) -> int:
        return len(self._handles) + len(self._tables)

    def add(self, handle: Handle) -> None:
        """Own a handle from now on."""
        self._handles.append(handle)

    def add_forward(self, module: nn.Module, hook: Callable[..., None], *, with_kwargs: bool = False) -> None:
        """Put a hook on that is called with a module, its arguments and its output, after its forward.

        As ``register_forward_hook`` does, whose handle of three weak references takes longer than what such a hook does. One of its
        numbers is enough for all modules, each of which has hooks by number.

        Args:
            module: Any.
            hook: What is called.
            with_kwargs: Whether it is called with the keyword arguments too, before the output.
        """
        if self._number < 0:
            self._number = RemovableHandle(OrderedDict()).id
        table = module._forward_hooks
        if type(module).register_forward_hook is not nn.Module.register_forward_hook or self._number in table:
            self.add(module.register_forward_hook(hook, with_kwargs=True) if with_kwargs else module.register_forward_hook(hook))
            return
        table[self._number] = hook
        self._tables.append(table)
        if with_kwargs:
            module._forward_hooks_with_kwargs[self._number] = True
            self._flags.append(module._forward_hooks_with_kwargs)

    def add_forwards(self, modules: Sequence[nn.Module], hooks: Sequence[Callable[..., None]]) -> None:
        """:meth:`add_forward` of many modules, each there once, and of as many hooks. It is cheaper where nothing was added before."""
        kinds: set[type[nn.Module]] = set(map(type, modules))
        if self._number >= 0 or not all(kind.register_forward_hook is nn.Module.register_forward_hook for kind in kinds):
            for module, hook in zip(modules, hooks, strict=True):
                self.add_forward(module, hook)
            return
        self._number = number = RemovableHandle(OrderedDict()).id
        self._tables = [module._forward_hooks for module in modules]
        for table, hook in zip(self._tables, hooks, strict=True):
            table[number] = hook

    def close(self) -> None:
        """Remove every hook."""
        number = self._number
        for tables in (self._tables, self._flags):
            while tables:
                tables.pop().pop(number, None)
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
