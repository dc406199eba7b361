"""Compiled code in a model: which modules run it, which modules are inside of it, and how to run it uncompiled."""

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
COMPILED = (KEEP, UNCOMPILED)
"""The values of the option ``compiled``: compiled code runs as without the monitor; or monitored steps run uncompiled."""

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes of every module."""
_CALLED = ("forward", "_compiled_call_impl")
"""Attributes that the call of a module calls. Hooks of the module itself run outside of them."""
_ALL_CHILDREN = ("children", "named_children", "modules", "named_modules", "_modules")
"""Names by which a method accesses every child of its module."""


def is_compiler_loaded() -> bool:
    """Whether code may have been compiled. Lightning loads the compiler, too."""
    return "torch._dynamo" in sys.modules


def num_compiled() -> int:
    """How many times torch has compiled code in this process; it has no public function for that."""
    return torch._dynamo.utils.counters["frames"]["total"] if is_compiler_loaded() else 0


@dataclass(frozen=True)
class CompiledParts:
    """The compiled parts of a model."""

    outermost: frozenset[nn.Module] = frozenset()
    """Modules whose call runs compiled code, and that no compiled code calls."""
    inside: frozenset[nn.Module] = frozenset()
    """Modules that compiled code calls."""
    callers: frozenset[nn.Module] = frozenset()
    """Modules outside of compiled code that call some: they hold a compiled function or name it in their code, or a child of theirs is
    also called by other compiled code, so that it is no outermost module."""
    unhooked: frozenset[nn.Module] = frozenset()
    """The modules of ``inside`` that themselves run the outermost compiled code, and that torch would compile differently with a hook."""
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
    called, in_place, inside, callers = [], set[nn.Module](), set[nn.Module](), set[nn.Module]()
    names, functions = list[str](), list[tuple[nn.Module, str]]()
    named = dict.fromkeys(() if wrapper is None else wrapper.modules(), "") | {module: name for name, module in root.named_modules()}
    globals_by_class = {kind: [*_compiled_globals(kind)] for kind in {type(module) for module in named}}
    for module, name in named.items():
        for attribute, function in (*_compiled_functions(module), *globals_by_class[type(module)]):
            if attribute in _CALLED:
                called.append(module)
                names.append(name)
                inside.update(part for part in module.modules() if part is not module)
                # In place, torch compiles none of its own classes, but the modules inside; a hook would change which.
                in_place.update([module] if attribute != "forward" and type(module).__module__.startswith("torch.nn.") else [])
            else:
                callers.add(module)
                inside.update(part for callee in _modules_of(function, module) for part in callee.modules())
                functions.append((module, f"{name}.{attribute}".strip(".")))
    unhooked, shared = frozenset(in_place - inside), inside.intersection(called)
    inside |= unhooked
    outermost = frozenset(called) - inside
    callers |= {module for module in named if not shared.isdisjoint(module.children())}
    # Of a module that is compiled as a whole, Lightning's or torch's copies of its methods are no further names.
    names += [function for module, function in functions if module not in called]
    return CompiledParts(outermost, frozenset(inside), frozenset(callers) - inside - outermost, unhooked, tuple(dict.fromkeys(names)))


def _compiled_functions(module: nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The originals of compiled functions, each with the attribute of the module or its class that holds it."""
    for attribute, value in (*_compiled_methods(type(module)), *vars(module).items()):
        if attribute in MODULE_ATTRIBUTES:
            continue
        members = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        for member in members:
            original = _original(vars(member).get("forward") if isinstance(member, nn.Module) else member)
            if original is not None:
                yield attribute, original


def _user_attributes(kind: type) -> Iterator[tuple[str, object]]:
    """The attributes of a class and of its bases that are not torch's."""
    return ((name, value) for base in kind.__mro__ if not base.__module__.startswith("torch.") for name, value in vars(base).items())


def _compiled_methods(kind: type[nn.Module]) -> tuple[tuple[str, object], ...]:
    """The compiled methods of a class of modules, without overridden ones."""
    compiled = ((name, value) for name, value in _user_attributes(kind) if _original(value) is not None)
    return tuple((name, value) for name, value in compiled if getattr(kind, name, None) is value)


def _compiled_globals(kind: type[nn.Module]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The originals of compiled functions that methods of a class of modules call, as ``f()`` or ``package.f()``."""
    for _name, method in _user_attributes(kind):
        if isinstance(method, types.FunctionType):
            names = names_used(method, object)
            packages = [vars(value) for value in map(method.__globals__.get, names) if isinstance(value, types.ModuleType)]
            originals = ((name, _original(namespace.get(name))) for namespace in (method.__globals__, *packages) for name in names)
            yield from ((f"{name}()", original) for name, original in originals if original is not None)


def _original(function: object) -> Callable[..., Any] | None:
    """The original of a compiled function; ``None`` for any other. ``torch.compiler.disable`` wraps functions in the same way."""
    if not isinstance(function, _Function) or hasattr(function, "_torchdynamo_disable"):
        return None
    return getattr(function, "_torchdynamo_orig_callable", None)


class CallHook:
    """Calls functions before and after the compiled call of a module that can have no hook, outside of the compiled code."""

    def __init__(self, module: nn.Module, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._module, self._before, self._after = module, before, after
        self._call: Any = vars(module)["_compiled_call_impl"]
        self._torchdynamo_orig_callable = self._call._torchdynamo_orig_callable  # marks it as compiled
        self._is_removed = False
        vars(module)["_compiled_call_impl"] = self

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
        while isinstance(call := attributes.get("_compiled_call_impl"), CallHook) and call._is_removed:
            attributes["_compiled_call_impl"] = call._call


_Function = types.FunctionType | types.MethodType | CallHook


def uncompile(modules: Iterable[nn.Module]) -> None:
    """Make modules, which are copies, run uncompiled, whatever stance of the compiler the user's code sets."""
    for module in modules:
        methods = {name: types.MethodType(uncompiled(method), module) for name, method in _compiled_methods(type(module))}
        vars(module).update(methods | {name: uncompiled(value) for name, value in vars(module).items()})
        vars(module).pop("_compiled_call_impl", None)


def uncompiled(value: Any) -> Any:  # noqa: ANN401  # whatever it is
    """The original of a compiled function; any other value unchanged."""
    original = _original(value)
    return value if original is None else original


def _modules_of(function: Callable[..., Any], holder: nn.Module) -> list[nn.Module]:
    """The modules that a compiled function calls, as far as its code shows.

    A method calls the children of its module that it names, directly or through other methods, and the module itself if its forward is
    compiled too. Any other function calls the modules in its closure, in its defaults, and those that it names.
    """
    is_method = any(_original(value) is function for _name, value in _compiled_methods(type(holder)))
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
    enclosed = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    owners = [getattr(value, "__self__", value) for value in (*enclosed, *named, *(function.__defaults__ or ()))]
    return [value for value in owners if isinstance(value, nn.Module)]


def names_used(function: Callable[..., Any], owner: type) -> set[str]:
    """The names in the code of a method and, recursively, in the methods of its class that it names; of its bases, if it uses ``super``."""
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


class Uncompiled:
    """Runs all compiled code uncompiled from :meth:`begin` to :meth:`end`, because a graph skips hooks that are registered later.

    Code is not compiled again: the graphs stay, and calls bypass them. Several may overlap in any order, e.g. of two monitors in a loop.
    """

    _begun: ClassVar[set[Uncompiled]] = set()
    _stance: ClassVar[AbstractContextManager[None] | None] = None

    def begin(self) -> None:
        """Run uncompiled from now on. Does nothing if the compiler was never loaded."""
        # A compiled function around the model cannot be found, but it has loaded the compiler.
        # Before torch 2.6 there is no stance; the callback refuses `compiled: uncompiled` there.
        if is_compiler_loaded() and hasattr(torch.compiler, "set_stance"):
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

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_error: object) -> None:
        self.end()
