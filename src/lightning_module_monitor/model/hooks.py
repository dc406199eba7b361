"""Every hook handle has an owner that takes it off again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.jit import _trace as jit
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


class Handle(Protocol):
    """What torch returns for a registered hook."""

    def remove(self) -> None:
        """Take the hook off; a second call does nothing."""


def is_in_backward() -> bool:
    """Whether a backward pass runs: a forward pass within it is the recomputation of a checkpointed one, which was seen before."""
    return torch._C._current_graph_task_id() != -1


def is_tracing() -> bool:
    """Whether torch records the operations that run now, or runs them on stand-ins for tensors: nothing is observed then.

    The trace would contain what the observation computes, and a stand-in has no elements in memory. So it is in ``torch.export`` and
    ``torch.jit.trace``, in ``torch.func.functionalize``, and in every ``TorchDispatchMode``: ``FakeTensorMode``, ``make_fx``,
    ``aot_function``, selective activation checkpointing, counters of operations.
    """
    if _is_exporting() or is_in_torch_dispatch_mode() or jit.is_tracing():
        _note_unobserved()
        return True
    # No public function tells of these two: torch.jit.trace also runs a module outside of its tracing, to check the trace; and of the
    # transforms of torch.func only this one records operations.
    if jit._trace_module_map is not None or (_transforms() is not None and _functionalizes()):
        _note_unobserved()
        return True
    return False


def _never() -> bool:
    return False


_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", _never)  # since torch 2.7
_transforms = torch._C._functorch.get_interpreter_stack


def _functionalizes() -> bool:
    return any(one.key() == torch._C._functorch.TransformType.Functionalize for one in _transforms() or ())


class Unobserved:
    """What was not observed in this process because :func:`is_tracing` was true. Where it grows, the message is to be reported."""

    number = 0
    message = (
        "Modules ran while torch recorded operations or a dispatch mode was active (torch.export, torch.jit.trace, FakeTensorMode, "
        "selective checkpointing, a counter of operations): nothing is observed meanwhile, and no value contains such calls. Do that in "
        "other steps."
    )


def _note_unobserved() -> None:
    Unobserved.number += 1


# ``torch.compiler.assume_constant_result`` sets this, and loads the compiler. A compiler that traces a hook then calls the function
# at once, and compiles nothing of it.
_note_unobserved._dynamo_marked_constant = True  # type: ignore[attr-defined]


class HookSet:
    """Owns hook handles; :meth:`close` removes every one, also after an error, and may be called again.

    A hook is owned until it is removed: where ``KeyboardInterrupt`` ends :meth:`close`, the next call removes the rest.
    """

    def __init__(self) -> None:
        self._handles: list[Handle] = []

    def __len__(self) -> int:
        return len(self._handles)

    def add(self, handle: Handle) -> None:
        """Own a handle from now on."""
        self._handles.append(handle)

    def add_forward(self, module: nn.Module, hook: ForwardHook, *, with_kwargs: bool = False) -> None:
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
            self._handles[-1].remove()
            self._handles.pop()


class ForwardHook:
    """A hook on a module, before or after its forward. It does nothing while torch traces, and nothing in a copy of the module."""

    def __call__(self, *args: Any) -> object:
        """Observe a call of the module, unless torch traces it."""
        return None if is_tracing() else self.see(*args)

    def see(self, *args: Any, **kwargs: Any) -> object:
        """Observe a call of the module.

        Args:
            args: What torch gives to the hook. There are no keyword arguments; they let a subclass name the positional ones.
            kwargs: Empty.

        Returns:
            What takes the place of the module's arguments or output; ``None``: they stay.
        """
        raise NotImplementedError

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

    def __call__(self, *args: Any) -> None:
        """Call the function, unless torch traces the module. No hook is called as often: there is no call in between."""
        if not is_tracing():
            self._function(*args)


class ReplacingHook(ForwardHook):
    """Calls a function, and gives torch what it returns: ``None``, or what is to take the place of a module's output.

    Args:
        function: Gets what torch gives to the hook.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def see(self, *args: Any) -> object:
        """Call the function."""
        return self._function(*args)
