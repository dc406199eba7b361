"""Hooks, their owner, which removes them, and the states of torch in which they observe nothing."""

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
        """Remove the hook; a second call does nothing."""


NO_BACKWARD = -1

backward_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward pass that runs, or ``NO_BACKWARD``. torch has no public function for it."""


def is_in_backward() -> bool:
    """Whether a backward pass runs: a forward pass within it is the recomputation of a checkpointed one, which was observed before."""
    return backward_pass() != NO_BACKWARD


def is_tracing() -> bool:
    """Whether torch records the operations that run now, or runs them on tensors without data: nothing is observed then.

    The trace would contain the operations of the observation. This holds in ``torch.export`` and ``torch.jit.trace``, in
    ``torch.func.functionalize``, and in every ``TorchDispatchMode``: ``FakeTensorMode``, ``make_fx``, ``aot_function``, selective
    activation checkpointing, counters of operations.
    """
    if _is_exporting() or is_in_torch_dispatch_mode() or jit.is_tracing():
        _note_unobserved()
        return True
    # No public function reports these two. torch.jit.trace also runs a module outside of its tracing, to check the trace; of the
    # transforms of torch.func only functionalize records operations.
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
    """Number of times that :func:`is_tracing` was true in this process, and the message for the user."""

    number = 0
    message = (
        "Modules ran while torch recorded operations or a dispatch mode was active (torch.export, torch.jit.trace, FakeTensorMode, "
        "selective checkpointing, a counter of operations): nothing is observed meanwhile, and no value contains such calls. Do that in "
        "other steps."
    )


def _note_unobserved() -> None:
    Unobserved.number += 1


# As set by ``torch.compiler.assume_constant_result``, which also loads the compiler: a compiler that traces a hook calls the function
# at once, and compiles nothing of it.
_note_unobserved._dynamo_marked_constant = True  # type: ignore[attr-defined]


class HookSet:
    """Owns hook handles; :meth:`close` removes them.

    If ``KeyboardInterrupt`` ends :meth:`close`, the next call removes the rest.
    """

    def __init__(self) -> None:
        self._handles: list[Handle] = []

    def __len__(self) -> int:
        return len(self._handles)

    def add(self, handle: Handle) -> None:
        """Own a handle."""
        self._handles.append(handle)

    def add_forward(self, module: nn.Module, hook: ForwardHook, *, with_kwargs: bool = False) -> None:
        """Register a hook that gets a module, its arguments and its output, after its forward.

        Args:
            module: Any.
            hook: The hook.
            with_kwargs: Whether it gets the keyword arguments too, before the output.
        """
        # A class of the user's may override the method without the keyword.
        self.add(module.register_forward_hook(hook, with_kwargs=True) if with_kwargs else module.register_forward_hook(hook))

    def close(self) -> None:
        """Remove every hook."""
        while self._handles:
            self._handles[-1].remove()
            self._handles.pop()


class ForwardHook:
    """A hook on a module, before or after its forward. It does nothing while torch traces, and nothing on a copy of the module."""

    def __call__(self, *args: Any) -> object:
        """Observe a call of the module, unless torch traces it."""
        return None if is_tracing() else self.see(*args)

    def see(self, *args: Any, **kwargs: Any) -> object:
        """Observe a call of the module.

        Args:
            args: The arguments of the hook.
            kwargs: Empty; lets a subclass name the positional ones.

        Returns:
            A replacement of the module's arguments or output; ``None``: they stay.
        """
        raise NotImplementedError

    def __reduce__(self) -> tuple[type[_CopiedHook], tuple[()]]:
        return _CopiedHook, ()


class _CopiedHook:
    """Does nothing: the hook of a copied module."""

    def __call__(self, *_args: object) -> None:
        pass


class UncopiedHook(ForwardHook):
    """Calls a function.

    Args:
        function: Gets the arguments of the hook. What it returns replaces the module's arguments or output; ``None``: they stay.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def see(self, *args: Any) -> object:
        """Call the function."""
        return self._function(*args)
