"""Hooks, the set that owns them, and the states of torch in which they observe nothing or are removed."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.jit import _trace as jit
from torch.utils import _python_dispatch as dispatch
from torch.utils.hooks import RemovableHandle

from lightning_module_monitor.model.compiled import loaded_compiler

Result = TypeVar("Result")

backward_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward pass that runs, or ``NO_PASS``. torch has no public function for it."""
NO_PASS = -1


def is_in_backward() -> bool:
    """Whether a backward pass runs: a forward pass within it recomputes a checkpointed forward pass, which was already observed."""
    return backward_pass() != NO_PASS


def is_tracing() -> bool:
    """Whether torch traces or transforms the current operations, or runs them on tensors without data. Nothing is observed then.

    A trace would contain the operations of the observation, and a tensor within a transform stands for others. True in
    ``torch.compile``, ``torch.export``, ``torch.jit.trace``, in the transforms of ``torch.func`` (``vmap``, ``grad``, ``jvp``,
    ``functionalize``), and in every ``TorchDispatchMode``: ``FakeTensorMode``, ``make_fx``, ``aot_function``, selective activation
    checkpointing, counters of operations.
    """
    if torch.compiler.is_compiling():  # also while torch exports
        if _is_exporting():
            _note_unobserved()
        return True  # no operation of a monitor gets into compiled code, also where the user's code calls it
    # torch.jit.trace also runs a module outside of its tracing, to check the trace; no public function reports that.
    if _dispatch_mode() or _transforms() is not None or jit.is_tracing() or jit._trace_module_map is not None:
        _note_unobserved()
        return True
    return False


def is_capturing() -> bool:
    """Whether the current CUDA stream is captured into a graph. Nothing is observed then: each replay would run the observation."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        _note_unobserved()
        return True
    return False


# torch 2.4 leaves its flag set after a mode that was entered twice, as FakeTensorMode is by each operation on a DTensor.
_dispatch_mode: Callable[[], object] = (
    dispatch.is_in_torch_dispatch_mode
    if hasattr(dispatch.TorchDispatchMode(), "old_dispatch_mode_flags")
    else dispatch._get_current_dispatch_mode_stack
)
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)  # since torch 2.7
_transforms = torch._C._functorch.get_interpreter_stack
"""The active transforms of ``torch.func``, or ``None``."""


class Unobserved:
    """Number of times that :func:`is_tracing` or :func:`is_capturing` was true in this process, and the message for the user."""

    number = 0
    message = (
        "Modules ran while torch recorded operations, under a transform of torch.func, or in a dispatch mode (torch.export, "
        "torch.jit.trace, a CUDA graph, vmap, FakeTensorMode, selective checkpointing, a counter of operations): nothing is observed "
        "meanwhile, and no value contains such calls. Do that in other steps, unless the model needs it."
    )


def _note_unobserved() -> None:
    Unobserved.number += 1


# As ``torch.compiler.assume_constant_result`` sets it, which would load the compiler: a compiler that traces a hook calls the function
# at once instead of compiling it.
_note_unobserved._dynamo_marked_constant = True  # type: ignore[attr-defined]


def as_torch_itself(function: Callable[..., Result], *args: object) -> Result:
    """Call a function without ``__torch_function__`` of tensor subclasses: as these call torch, by ``super().__torch_function__``."""
    result: Result = Tensor.__torch_function__(function, (), args)  # type: ignore[no-untyped-call]  # torch does not annotate it
    return result


def register_gradient_hook(tensor: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Register a hook on the gradient of a tensor, without ``__torch_function__`` of its class."""
    handle: RemovableHandle = tensor.register_hook(hook) if type(tensor) is Tensor else as_torch_itself(Tensor.register_hook, tensor, hook)
    return handle


def requires_gradient(tensor: Tensor) -> bool:
    """Whether a tensor requires a gradient, without ``__torch_function__`` of its class."""
    return tensor.requires_grad if type(tensor) is Tensor else as_torch_itself(Tensor.requires_grad.__get__, tensor)  # type: ignore[attr-defined]


class HookSet:
    """Owns hook handles; :meth:`close` removes them. If ``KeyboardInterrupt`` ends :meth:`close`, the next call removes the rest.

    Compiled code is the same with and without these hooks: while torch compiles, they are not on their modules (:class:`_Compiling`), and
    the compiler is disabled for a hook that compiled code would call.
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._may_be_captured = torch.cuda.is_initialized()
        """Whether CUDA is in use, so that a stream may be captured. Read once: without CUDA no call of a module checks for captures."""

    def __len__(self) -> int:
        return len(self._handles)

    def add(self, handle: RemovableHandle) -> None:
        """Add the handle of a hook that is not on a module."""
        self._handles.append(handle)

    def add_forward(self, module: nn.Module, hook: UncopiedHook, *, is_before: bool = False, **options: bool) -> None:
        """Register a hook after a module's forward, or before it.

        Args:
            module: The module.
            hook: The hook.
            is_before: Whether the hook runs before forward.
            options: Options of torch's method. Others are not passed on, because the user's class may override the method without them.
        """
        if not self._handles:
            _Compiling.add(self)
        hook.may_be_captured = self._may_be_captured
        register: Callable[..., RemovableHandle] = module.register_forward_pre_hook if is_before else module.register_forward_hook
        # The call of a module that was compiled in place would compile its hooks.
        called = hook if module._compiled_call_impl is None else not_compiled(hook)
        self._handles.append(register(called, **options))

    def entries(self) -> Iterator[tuple[OrderedDict[int, Any], int]]:
        """Each dictionary of torch that contains one of the hooks, with the key of the hook.

        A module has a dictionary of all its hooks, and one for each option with the hooks that have it.
        """
        for handle in self._handles:
            for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
                hooks = reference()
                if hooks is not None:
                    yield hooks, handle.id

    def close(self) -> None:
        """Remove every hook."""
        while self._handles:
            self._handles[-1].remove()
            self._handles.pop()
        _Compiling.hook_sets.discard(self)


class UncopiedHook:
    """A hook on a module, before or after its forward. It does nothing while torch traces or captures, or on a copy of the module.

    Args:
        function: Receives the arguments of the hook. Its result replaces the module's arguments or output, unless it is ``None``.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function
        self.may_be_captured = False
        """Whether CUDA is in use."""

    def __call__(self, *args: Any) -> object:
        """Call the function, unless torch traces or captures the module."""
        return None if is_tracing() or (self.may_be_captured and is_capturing()) else self._function(*args)

    def __reduce__(self) -> tuple[type[_CopiedHook], tuple[()]]:
        return _CopiedHook, ()


class _NotCompiled(functools.partial[object]):
    """A hook by ``torch.compiler.disable``. Its call has no Python frame that torch could compile. A copy does nothing."""

    __reduce__ = UncopiedHook.__reduce__


def not_compiled(hook: Callable[..., Result]) -> Callable[..., Result]:
    """A hook that torch never compiles, also if compiled code calls it."""
    return _NotCompiled(torch.compiler.disable(hook)) if loaded_compiler() is not None else hook  # type: ignore[return-value]  # as the hook


class _Compiling:
    """Removes hooks from their modules while torch compiles, because it would trace them, and compile again when they are gone.

    torch has no public function that reports when it compiles.
    """

    hook_sets: ClassVar[weakref.WeakSet[HookSet]] = weakref.WeakSet()
    """Sets that may have hooks on modules."""
    _hidden: ClassVar[list[tuple[OrderedDict[int, Any], dict[int, Any]]]] = []
    """Dictionaries from which hooks were removed, each with its previous contents."""

    @classmethod
    def add(cls, hook_set: HookSet) -> None:
        """Remove the hooks of a set whenever torch compiles, until the set is closed."""
        cls.hook_sets.add(hook_set)
        compiler = loaded_compiler()
        if compiler is not None:
            handler = compiler.callback.callback_handler
            if cls._hide not in handler.start_callbacks:  # torch._dynamo.reset() clears them
                handler.register_start_callback(cls._hide)
                handler.register_end_callback(cls._show)

    @classmethod
    def _hide(cls, *_arguments: object) -> None:
        for hooks, key in (entry for hook_set in cls.hook_sets for entry in hook_set.entries()):
            if key in hooks:
                if all(hooks is not other for other, _before in cls._hidden):  # not yet saved
                    cls._hidden.append((hooks, dict(hooks)))
                del hooks[key]

    @classmethod
    def _show(cls, *_arguments: object) -> None:
        entries = {(id(hooks), key) for hook_set in cls.hook_sets for hooks, key in hook_set.entries()}
        while cls._hidden:
            hooks, before = cls._hidden[-1]
            added = [key for key in hooks if key not in before]
            for key, hook in before.items():
                if (id(hooks), key) in entries:  # not if its set was closed meanwhile
                    hooks[key] = hook
            for key in [key for key in (*before, *added) if key in hooks]:  # in the previous order, new hooks last
                hooks.move_to_end(key)
            cls._hidden.pop()


class _CopiedHook:
    """The hook of a copied module, which does nothing."""

    def __call__(self, *_args: object) -> None:
        pass
