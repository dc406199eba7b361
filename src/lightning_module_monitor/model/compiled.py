"""Compiled code in a model: which modules run it, which modules it calls, and how to run the original code in its place."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

KEEP, UNCOMPILED = "keep", "uncompiled"
COMPILED_CHOICES = (KEEP, UNCOMPILED)
"""The values of the option ``compiled``: compiled code runs as without the monitor; or monitored steps run the original code."""

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes of every module."""
_IN_PLACE = "_compiled_call_impl"
"""The attribute in which ``module.compile()`` puts the compiled call."""
_CALLED = ("forward", _IN_PLACE)
"""Attributes that the call of a module calls. Hooks of the module itself run outside of them."""
_EMPTY_CELL = types.CellType()
"""Equal to the cell of a closure whose name has no value yet."""
_ALL_CHILDREN = ("children", "named_children", "modules", "named_modules", "_modules")
"""Names by which a method accesses every child of its module."""


def loaded_compiler() -> Any:  # noqa: ANN401  # a module
    """The compiler, if this process has imported it; nothing is compiled without. Lightning and optimizers import it, too."""
    return sys.modules.get("torch._dynamo")


def num_compile_attempts() -> int:
    """How many frames torch has tried to compile in this process; it has no public function for that."""
    compiler = loaded_compiler()
    return compiler.utils.counters["frames"]["total"] if compiler is not None else 0


@dataclass(frozen=True)
class CompiledParts:
    """The compiled parts of a model."""

    outermost: frozenset[nn.Module] = frozenset()
    """Modules that run compiled code when they are called, and that no compiled code calls."""
    inside: frozenset[nn.Module] = frozenset()
    """Modules that are not observed: compiled code calls them, or they are :attr:`unhooked`."""
    callers: frozenset[nn.Module] = frozenset()
    """Uncompiled modules that call compiled code. They hold a compiled function, name one in their code, or have a compiled child that
    other compiled code calls as well, so that the child is not outermost."""
    unhooked: frozenset[nn.Module] = frozenset()
    """Modules with a forward of torch's own that were compiled in place, and that no compiled code calls. torch before 2.14 compiles only
    the modules in them, and with a hook it would compile others; later versions would compile them once more with a hook."""
    names: tuple[str, ...] = ()
    """Names of the compiled modules and methods, as in ``named_modules``."""


NOT_COMPILED = CompiledParts()


def compiled_parts(root: nn.Module, wrapper: nn.Module | None = None) -> CompiledParts:
    """Find compiled modules, by ``torch.compile`` or in place, and compiled functions that a module or its class holds.

    A compiled function that no part of the model holds is only found if a method calls it by its name.

    Args:
        root: The model.
        wrapper: The model as wrapped by a strategy; it may be compiled, too.
    """
    names = dict.fromkeys(() if wrapper is None else wrapper.modules(), "") | {module: name for name, module in root.named_modules()}
    globals_by_class = {kind: [*_compiled_globals(kind)] for kind in {type(module) for module in names}}
    functions = [
        (module, attribute, function)
        for module in names
        for attribute, function in (*_compiled_functions(module), *globals_by_class[type(module)])
    ]
    called = dict.fromkeys(module for module, attribute, _function in functions if attribute in _CALLED)
    held = [(module, attribute, function) for module, attribute, function in functions if attribute not in _CALLED]
    inside = {part for module in called for part in module.modules() if part is not module}
    inside |= {part for module, _attribute, function in held for callee in _modules_of(function, module) for part in callee.modules()}
    in_place = {module for module, attribute, _function in functions if attribute == _IN_PLACE}
    unhooked = {module for module in in_place - inside if _has_forward_of_torch(module)}
    shared = inside & called.keys()
    callers = {module for module, _attribute, _function in held}.union(module for module in names if shared & {*module.children()})
    outermost = called.keys() - inside - unhooked
    # A module that is compiled as a whole holds copies of its methods, made by Lightning or torch, which are no further names.
    shown = [f"{names[module]}.{attribute}".strip(".") for module, attribute, _function in held if module not in called]
    return CompiledParts(
        outermost=frozenset(outermost),
        inside=frozenset(inside | unhooked),
        callers=frozenset(callers - inside - unhooked - outermost),
        unhooked=frozenset(unhooked),
        names=tuple(dict.fromkeys([*(names[module] for module in called), *shown])),
    )


def _has_forward_of_torch(module: nn.Module) -> bool:
    """Whether its forward is that of a module of torch's own, as of a subclass of ``nn.Sequential``."""
    return (getattr(type(module).forward, "__module__", None) or "").startswith("torch.nn.")


def _compiled_functions(module: nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The originals of compiled functions, each with the attribute of the module or its class that holds it."""
    for attribute, value in (*_compiled_methods(type(module)), *vars(module).items()):
        if attribute in MODULE_ATTRIBUTES:
            continue
        members = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        for member in members:
            function = vars(member).get("forward") if isinstance(member, nn.Module) else member
            if is_compiled(function):
                yield attribute, original_of(function)


def _user_attributes(kind: type) -> Iterator[tuple[str, object]]:
    """The attributes of a class and of its bases that are not torch's."""
    return ((name, value) for base in kind.__mro__ if not base.__module__.startswith("torch.") for name, value in vars(base).items())


def _compiled_methods(kind: type[nn.Module]) -> tuple[tuple[str, object], ...]:
    """The compiled methods of a class of modules, without overridden ones."""
    attributes = _user_attributes(kind)
    return tuple((name, value) for name, value in attributes if is_compiled(value) and getattr(kind, name, None) is value)


def _compiled_globals(kind: type[nn.Module]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The originals of compiled functions that methods of a class of modules call, as ``f()`` or ``package.f()``."""
    for _name, method in _user_attributes(kind):
        if isinstance(method, types.FunctionType):
            names = names_used(method)
            packages = [vars(value) for value in map(method.__globals__.get, names) if isinstance(value, types.ModuleType)]
            values = ((name, namespace.get(name)) for namespace in (method.__globals__, *packages) for name in names)
            yield from ((f"{name}()", original_of(value)) for name, value in values if is_compiled(value))


def is_compiled(value: object) -> bool:
    """Whether a value is a compiled function."""
    is_wrapper = isinstance(value, _Function) and hasattr(value, "_torchdynamo_orig_callable")
    return is_wrapper and not hasattr(value, "_torchdynamo_disable")  # torch.compiler.disable wraps functions in the same way


def original_of(value: Any) -> Any:  # noqa: ANN401  # whatever it is
    """The original of a compiled function; any other value unchanged."""
    return value._torchdynamo_orig_callable if is_compiled(value) else value


class CallHook:
    """Calls functions before and after the compiled call of a module that can have no hook, outside of the compiled code."""

    def __init__(self, module: nn.Module, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._module, self._before, self._after = module, before, after
        self._call: Any = vars(module)[_IN_PLACE]
        self._torchdynamo_orig_callable = self._call._torchdynamo_orig_callable  # marks it as compiled
        self._is_removed = False
        vars(module)[_IN_PLACE] = self

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        """Call the module."""
        self._before()
        try:
            return self._call(*args, **kwargs)
        finally:
            self._after()

    def remove(self) -> None:
        """Remove it at once if it was added last, else together with the last of the hooks that were added later."""
        self._is_removed = True
        attributes = vars(self._module)
        while isinstance(call := attributes.get(_IN_PLACE), CallHook) and call._is_removed:
            attributes[_IN_PLACE] = call._call


_Function = types.FunctionType | types.MethodType | CallHook


def take_out_compiled_code(modules: Iterable[nn.Module]) -> None:
    """Make modules, which are copies, run their original code, whatever stance of the compiler the user's code sets."""
    for module in modules:
        methods = {name: types.MethodType(original_of(method), module) for name, method in _compiled_methods(type(module))}
        vars(module).update(methods | {name: original_of(value) for name, value in vars(module).items()})
        vars(module).pop(_IN_PLACE, None)


def _modules_of(function: Callable[..., Any], holder: nn.Module) -> list[nn.Module]:
    """The modules that a compiled function calls, as far as its code shows.

    A method calls the children of its module that it names, directly or through other methods, and the module itself if its forward is
    compiled too. Any other function calls the modules in its closure, in its defaults, and those that it names.
    """
    is_method = any(original_of(value) is function for _name, value in _compiled_methods(type(holder)))
    owner = getattr(function, "__self__", holder if is_method else None)
    if isinstance(owner, nn.Module):
        names = names_used(getattr(function, "__func__", function), type(owner))
        is_call = function.__name__ in ("forward", "_call_impl", "_wrapped_call_impl")
        is_whole = is_call or any(attribute == "forward" for attribute, _function in _compiled_functions(owner))
        if is_whole or not names.isdisjoint(_ALL_CHILDREN):
            return [owner]
        return [child for name, child in owner._modules.items() if name in names and child]
    if not isinstance(function, types.FunctionType):
        return [function] if isinstance(function, nn.Module) else []
    enclosed = [cell.cell_contents for cell in function.__closure__ or () if cell != _EMPTY_CELL]
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    owners = [getattr(value, "__self__", value) for value in (*enclosed, *named, *(function.__defaults__ or ()))]
    return [value for value in owners if isinstance(value, nn.Module)]


def names_used(function: Callable[..., Any], owner: type = object) -> set[str]:
    """The names in the code of a function; of a method of ``owner`` also, recursively, those in the methods that it names.

    These are methods of the class and, if the code uses ``super``, of its bases.
    """
    names, waiting = set[str](), [function]
    while waiting:
        function_code = getattr(waiting.pop(), "__code__", None)
        codes = [function_code] if function_code is not None else []
        while codes:
            code = codes.pop()
            codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
            new = set(code.co_names) - names
            names |= new
            bases = owner.__mro__ if "super" in code.co_names else ()
            methods = (value for name in new for value in (getattr(owner, name, None), *(vars(base).get(name) for base in bases)))
            waiting += [method for method in methods if isinstance(method, types.FunctionType)]
    return names


class OriginalCode:
    """From :meth:`begin` to :meth:`end` original code runs in place of compiled code, which skips hooks that are registered later.

    Code is not compiled again: the graphs stay, and calls bypass them. Several may overlap in any order, e.g. of two monitors in a loop.
    """

    _begun: ClassVar[set[OriginalCode]] = set()
    _stance: ClassVar[AbstractContextManager[None] | None] = None

    def begin(self) -> None:
        """Run original code from now on, if the compiler was imported: a compiled function may be anywhere around the model."""
        # Before torch 2.6 there is no stance; the callback refuses `compiled: uncompiled` there.
        if loaded_compiler() is not None and hasattr(torch.compiler, "set_stance"):
            OriginalCode._begun.add(self)
            if OriginalCode._stance is None:
                OriginalCode._stance = torch.compiler.set_stance("force_eager")
                OriginalCode._stance.__enter__()

    def end(self) -> None:
        """Run compiled code again; a second call does nothing."""
        OriginalCode._begun.discard(self)
        if not OriginalCode._begun and OriginalCode._stance is not None:
            OriginalCode._stance.__exit__(None, None, None)
            OriginalCode._stance = None

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_error: object) -> None:
        self.end()
