"""Hooks, their owner, and the states of torch in which they observe nothing or are kept away."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.jit import _trace as jit
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, is_in_torch_dispatch_mode
from torch.utils.hooks import RemovableHandle

from lightning_module_monitor.model.compiled import is_compiler_loaded

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
    activation checkpointing, counters of operations; and in ``torch.compile``.
    """
    if torch.compiler.is_compiling():  # while it exports, too
        if _is_exporting():
            _note_unobserved()
        return True  # nothing of a monitor gets into compiled code, also where the user's code calls it
    if _dispatch_mode() or jit.is_tracing():
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

    No hook on a module gets into compiled code, which is the same with them and without: while torch compiles anything, none of them is
    on its module (:class:`_Compiling`), and where torch would compile the hook itself, it is disabled.

    If ``KeyboardInterrupt`` ends :meth:`close`, the next call removes the rest.
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def __len__(self) -> int:
        return len(self._handles)

    def add(self, handle: RemovableHandle) -> None:
        """Own the handle of a hook that is not on a module."""
        self._handles.append(handle)

    def add_forward(self, module: nn.Module, hook: UncopiedHook, **options: bool) -> None:
        """Register a forward hook, with options of ``register_forward_hook``: without any that a class of the user's may not have."""
        self._add_to_module(module, module.register_forward_hook, hook, options)

    def add_forward_pre(self, module: nn.Module, hook: UncopiedHook, **options: bool) -> None:
        """Register a hook before forward, with the options of ``register_forward_pre_hook``."""
        self._add_to_module(module, module.register_forward_pre_hook, hook, options)

    def _add_to_module(
        self, module: nn.Module, register: Callable[..., RemovableHandle], hook: UncopiedHook, options: dict[str, bool]
    ) -> None:
        if not self._handles:
            _Compiling.watch(self)
        # The call of a module that is compiled in place compiles what it calls.
        called = hook if module._compiled_call_impl is None else not_compiled(hook)
        self._handles.append(register(called, **options))

    def places(self) -> Iterator[tuple[OrderedDict[int, Any], int]]:
        """The dictionaries of torch's that each of them is in, and its key there: of hooks, and of those with an option."""
        for handle in self._handles:
            for of_torch in (handle.hooks_dict_ref, *handle.extra_dict_ref):
                hooks = of_torch()
                if hooks is not None:
                    yield hooks, handle.id

    def close(self) -> None:
        """Remove every hook."""
        while self._handles:
            self._handles[-1].remove()
            self._handles.pop()
        _Compiling.watched.discard(self)


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


class _NotCompiled(functools.partial[object]):
    """A hook by ``torch.compiler.disable``. A call of it has no frame of its own, which torch could compile. A copy does nothing."""

    def __reduce__(self) -> tuple[type[_CopiedHook], tuple[()]]:
        return _CopiedHook, ()


def not_compiled(hook: Callable[..., Result]) -> Callable[..., Result]:
    """The hook, which torch never compiles, also where compiled code calls it."""
    return _NotCompiled(torch.compiler.disable(hook)) if is_compiler_loaded() else hook  # type: ignore[return-value]  # as the hook


class _Compiling:
    """Keeps hooks off their modules while torch compiles: it would trace them, and compile again when they are gone.

    torch has no public function that reports when it compiles.
    """

    watched: ClassVar[weakref.WeakSet[HookSet]] = weakref.WeakSet()
    """Those that may have hooks on modules."""
    _hidden: ClassVar[list[tuple[OrderedDict[int, Any], dict[int, Any]]]] = []
    """Dictionaries of hooks without ours, each with its contents before."""

    @classmethod
    def watch(cls, hooks: HookSet) -> None:
        """Look after the hooks of a set, from now until it is closed."""
        cls.watched.add(hooks)
        if is_compiler_loaded():
            handler = torch._dynamo.callback.callback_handler
            if cls._hide not in handler.start_callbacks:  # torch._dynamo.reset() forgets them
                handler.register_start_callback(cls._hide)
                handler.register_end_callback(cls._show)

    @classmethod
    def _hide(cls, *_arguments: object) -> None:
        for hooks, key in (place for one in cls.watched for place in one.places()):
            if key in hooks:
                if all(hooks is not other for other, _before in cls._hidden):
                    cls._hidden.append((hooks, dict(hooks)))
                del hooks[key]

    @classmethod
    def _show(cls, *_arguments: object) -> None:
        places = {(id(hooks), key) for one in cls.watched for hooks, key in one.places()}
        while cls._hidden:
            hooks, before = cls._hidden[-1]
            added = [key for key in hooks if key not in before]
            for key, hook in before.items():
                if (id(hooks), key) in places:  # closed meanwhile, it is gone
                    hooks[key] = hook
            for key in [key for key in (*before, *added) if key in hooks]:
                hooks.move_to_end(key)
            cls._hidden.pop()


class _CopiedHook:
    """Does nothing: the hook of a copied module."""

    def __call__(self, *_args: object) -> None:
        pass
