"""Hooks, their owner, the states of torch in which they observe nothing, and compiled code, which runs none of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.jit import _trace as jit
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, is_in_torch_dispatch_mode
from torch.utils.hooks import RemovableHandle

Result = TypeVar("Result")

backward_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward pass that runs, or -1. torch has no public function for it."""


def is_in_backward() -> bool:
    """Whether a backward pass runs: a forward pass within it is the recomputation of a checkpointed one, which was observed before."""
    return backward_pass() != -1


def is_tracing() -> bool:
    """Whether torch records the operations that run now, or runs them on tensors without data: nothing is observed then.

    The trace would contain the operations of the observation. This holds in ``torch.export`` and ``torch.jit.trace``, in
    ``torch.func.functionalize``, and in every ``TorchDispatchMode``: ``FakeTensorMode``, ``make_fx``, ``aot_function``, selective
    activation checkpointing, counters of operations.
    """
    if torch.compiler.is_compiling() or _dispatch_mode() or jit.is_tracing():
        _note_unobserved()
        return True
    # No public function reports these two. torch.jit.trace also runs a module outside of its tracing, to check the trace; of the
    # transforms of torch.func only functionalize records operations.
    transforms = _transforms()
    if jit._trace_module_map is not None or (transforms and any(one.key() == _FUNCTIONALIZE for one in transforms)):
        _note_unobserved()
        return True
    return False


# torch 2.4 leaves its flag set after a mode that was entered twice, as FakeTensorMode is by each operation on a DTensor.
_dispatch_mode: Callable[[], object] = (
    is_in_torch_dispatch_mode if hasattr(TorchDispatchMode(), "old_dispatch_mode_flags") else _get_current_dispatch_mode_stack
)
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)  # since torch 2.7
_transforms = torch._C._functorch.get_interpreter_stack
_FUNCTIONALIZE = torch._C._functorch.TransformType.Functionalize


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


def as_torch_itself(function: Callable[..., Result], *args: object) -> Result:
    """Call a function in which torch runs no code of the classes of tensors: as these call torch, by ``super().__torch_function__``."""
    result: Result = Tensor.__torch_function__(function, (), args)  # type: ignore[no-untyped-call]  # torch does not annotate it
    return result


def register_gradient_hook(tensor: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Register a hook on the gradient of a tensor, without code of its class."""
    handle: RemovableHandle = tensor.register_hook(hook) if type(tensor) is Tensor else as_torch_itself(Tensor.register_hook, tensor, hook)
    return handle


def requires_gradient(tensor: Tensor) -> bool:
    """Whether a tensor requires a gradient, without code of its class."""
    return tensor.requires_grad if type(tensor) is Tensor else as_torch_itself(Tensor.requires_grad.__get__, tensor)  # type: ignore[attr-defined]


class HookSet:
    """Owns hook handles; :meth:`close` removes them.

    If ``KeyboardInterrupt`` ends :meth:`close`, the next call removes the rest.
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def __len__(self) -> int:
        return len(self._handles)

    def add(self, handle: RemovableHandle) -> None:
        """Own a handle."""
        self._handles.append(handle)

    def add_forward(self, module: nn.Module, hook: Callable[..., object], *, with_kwargs: bool = False) -> None:
        """Register a forward hook, which gets the keyword arguments too if ``with_kwargs`` is true."""
        # A class of the user's may override the method without the keyword.
        self.add(module.register_forward_hook(hook, with_kwargs=True) if with_kwargs else module.register_forward_hook(hook))

    def close(self) -> None:
        """Remove every hook."""
        while self._handles:
            self._handles[-1].remove()
            self._handles.pop()


class UncopiedHook:
    """A hook on a module, before or after its forward. It does nothing while torch traces, and nothing on a copy of the module.

    Args:
        function: Gets the arguments of the hook. What it returns replaces the module's arguments or output; ``None``: they stay.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> object:
        """Call the function, unless torch traces the module."""
        return None if is_tracing() else self._function(*args)

    def __reduce__(self) -> tuple[type[_CopiedHook], tuple[()]]:
        return _CopiedHook, ()


class _CopiedHook:
    """Does nothing: the hook of a copied module."""

    def __call__(self, *_args: object) -> None:
        pass


class Uncompiled:
    """Runs everything that ``torch.compile`` has wrapped uncompiled, from :meth:`begin` to :meth:`end`: a graph skips later hooks.

    Nothing is compiled again, before or after: the graphs stay, and calls bypass them. Several may overlap in any order, e.g. of two
    monitors in one loop.
    """

    _begun: ClassVar[set[Uncompiled]] = set()
    _stance: ClassVar[AbstractContextManager[None] | None] = None

    def begin(self) -> None:
        """Run uncompiled from now on. Does nothing if the compiler was never loaded."""
        # A function that is compiled around the model cannot be found, but compiling it has loaded this module.
        # Before torch 2.6 there is no stance; the callback refuses compiled models there.
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            Uncompiled._begun.add(self)
            if Uncompiled._stance is None:
                Uncompiled._stance = torch.compiler.set_stance("force_eager")
                Uncompiled._stance.__enter__()

    def end(self) -> None:
        """Run compiled code again; a second call does nothing."""
        Uncompiled._begun.discard(self)
        if not Uncompiled._begun and Uncompiled._stance is not None:
            Uncompiled._stance.__exit__(None, None, None)
            Uncompiled._stance = None
