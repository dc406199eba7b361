"""Compiled code: where in a model it begins, what lies inside of it, and how it is run uncompiled."""

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

_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module."""
_CALLED = ("forward", "_compiled_call_impl")
"""What the call of a module calls. Hooks of the module itself run outside of it."""
_ALL = ("children", "named_children", "modules", "named_modules", "_modules")
"""Names by which a method gets at every child of its module."""


def is_compiler_loaded() -> bool:
    """Whether anything may have been compiled. Lightning loads the compiler, too."""
    return "torch._dynamo" in sys.modules


def num_compiled() -> int:
    """How many times torch has compiled anything in this process; it has no public function for that."""
    return torch._dynamo.utils.counters["frames"]["total"] if is_compiler_loaded() else 0


@dataclass(frozen=True)
class CompiledParts:
    """What of a model is compiled."""

    outermost: frozenset[nn.Module] = frozenset()
    """The modules whose call runs compiled code, and which no compiled code calls."""
    inside: frozenset[nn.Module] = frozenset()
    """The modules that compiled code calls."""
    callers: frozenset[nn.Module] = frozenset()
    """The modules that hold any other compiled function, or name it in their code, and call it."""
    unhooked: frozenset[nn.Module] = frozenset()
    """Those inside, which no other compiled code calls, that run compiled code, and that a hook would have torch compile otherwise."""
    names: tuple[str, ...] = ()
    """Names of the compiled modules and methods, as ``named_modules`` gives them."""


NOT_COMPILED = CompiledParts()


def compiled_parts(root: nn.Module, wrapper: nn.Module | None = None) -> CompiledParts:
    """Find compiled code in a model: of modules, by ``torch.compile`` or in place, and functions that a module or its class holds.

    A compiled function that nothing in the model holds is found by the methods that call it by its name, and else not.

    Args:
        root: The model.
        wrapper: What a strategy has wrapped it in; it may be compiled, too.
    """
    called, in_place, inside, callers = [], set[nn.Module](), set[nn.Module](), set[nn.Module]()
    names, functions = list[str](), list[str]()
    named = {**dict.fromkeys(() if wrapper is None else wrapper.modules(), ""), **{one: name for name, one in root.named_modules()}}
    by_class = {of: [*_compiled_globals(of)] for of in {type(module) for module in named}}
    for module, name in named.items():
        for attribute, function in (*_compiled_functions(module), *by_class[type(module)]):
            if attribute in _CALLED:
                called.append(module)
                names.append(name)
                inside.update(one for one in module.modules() if one is not module)
                # In place, torch compiles none of its own classes, but the modules within; a hook would change which.
                in_place.update([module] if attribute != "forward" and type(module).__module__.startswith("torch.nn.") else [])
            else:
                callers.add(module)
                inside.update(part for one in _modules_of(function, module) for part in one.modules())
                functions.append(f"{name}.{attribute}".strip("."))
    unhooked = frozenset(in_place - inside)
    inside |= unhooked
    names += functions
    return CompiledParts(frozenset(called) - inside, frozenset(inside), frozenset(callers), unhooked, tuple(dict.fromkeys(names)))


def _compiled_functions(module: nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions that ``torch.compile`` was given, by the attribute of a module, or of its class, that holds the compiled one."""
    for attribute, value in (*_compiled_methods(type(module)), *vars(module).items()):
        if attribute in _OF_TORCH:
            continue
        members = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        for one in members:
            own = vars(one).get("forward") if isinstance(one, nn.Module) else one
            original = _original(own)
            if original is not None:
                yield attribute, original


def _compiled_methods(of: type[nn.Module]) -> tuple[tuple[str, object], ...]:
    """The compiled methods of a class of modules."""
    classes = [one for one in of.__mro__ if not one.__module__.startswith("torch.")]
    methods = ((name, value) for one in classes for name, value in vars(one).items() if _original(value) is not None)
    return tuple((name, value) for name, value in methods if getattr(of, name, None) is value)  # no subclass has another


def _compiled_globals(of: type[nn.Module]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions that ``torch.compile`` was given of those that methods of a class of modules call, as ``f()`` or ``package.f()``."""
    methods = (one for base in of.__mro__ if not base.__module__.startswith("torch.") for one in vars(base).values())
    for method in methods:
        if isinstance(method, types.FunctionType):
            names = names_used(method, object)
            packages = [vars(one) for one in map(method.__globals__.get, names) if isinstance(one, types.ModuleType)]
            held = ((name, _original(one.get(name))) for one in (method.__globals__, *packages) for name in names)
            yield from ((f"{name}()", original) for name, original in held if original is not None)


def _original(function: object) -> Callable[..., Any] | None:
    """The function that ``torch.compile`` has wrapped; ``None`` if it has not. ``torch.compiler.disable`` wraps functions likewise."""
    if not isinstance(function, _Function) or hasattr(function, "_torchdynamo_disable"):
        return None
    return getattr(function, "_torchdynamo_orig_callable", None)


class CallHook:
    """Calls functions before and after the compiled call of a module that can have no hook, outside of what torch compiles."""

    def __init__(self, module: nn.Module, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._module, self._before, self._after = module, before, after
        self._call: Any = vars(module)["_compiled_call_impl"]
        self._torchdynamo_orig_callable = self._call._torchdynamo_orig_callable  # by which it is found to be compiled
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
        """Take it off, or as soon as those are off that were put on later."""
        self._is_removed = True
        own = vars(self._module)
        while isinstance(call := own.get("_compiled_call_impl"), CallHook) and call._is_removed:
            own["_compiled_call_impl"] = call._call


_Function = types.FunctionType | types.MethodType | CallHook


def uncompile(modules: Iterable[nn.Module]) -> None:
    """Have modules, which are copies, run uncompiled, whatever stance of the compiler the user's code sets."""
    for module in modules:
        own = {name: types.MethodType(uncompiled(method), module) for name, method in _compiled_methods(type(module))}
        vars(module).update({**own, **{name: uncompiled(value) for name, value in vars(module).items()}})
        vars(module).pop("_compiled_call_impl", None)


def uncompiled(value: Any) -> Any:  # noqa: ANN401  # whatever it is
    """The function that ``torch.compile`` was given, for one that it gave; anything else as it is."""
    original = _original(value)
    return value if original is None else original


def _modules_of(function: Callable[..., Any], holder: nn.Module) -> list[nn.Module]:
    """The modules that a compiled function calls, as far as its code shows.

    A method calls the children of its module that it names, itself or by other methods, and the module itself if its forward is compiled
    too. Any other function calls those in its closure, its defaults, and those that it names.
    """
    owner = getattr(function, "__self__", holder if _is_method_of(function, holder) else None)
    if isinstance(owner, nn.Module):
        names = names_used(getattr(function, "__func__", function), type(owner))
        is_call = function.__name__ in ("forward", "_call_impl", "_wrapped_call_impl")
        is_whole = is_call or any(attribute == "forward" for attribute, _function in _compiled_functions(owner))
        return [owner] if is_whole or not names.isdisjoint(_ALL) else [one for name, one in owner._modules.items() if name in names and one]
    if not isinstance(function, types.FunctionType):
        return [function] if isinstance(function, nn.Module) else []
    held = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    owners = [getattr(one, "__self__", one) for one in (*held, *named, *(function.__defaults__ or ()))]
    return [one for one in owners if isinstance(one, nn.Module)]


def _is_method_of(function: Callable[..., Any], module: nn.Module) -> bool:
    return any(_original(value) is function for _name, value in _compiled_methods(type(module)))


def names_used(function: Callable[..., Any], owner: type) -> set[str]:
    """The names that a method's code uses, with those that the methods of its class use that it names."""
    names, waiting = set[str](), [function]
    while waiting:
        code = getattr(waiting.pop(), "__code__", None)
        inner = [code] if code is not None else []
        while inner:
            one = inner.pop()
            inner += [constant for constant in one.co_consts if isinstance(constant, types.CodeType)]
            new = set(one.co_names) - names
            names |= new
            waiting += [method for name in new if isinstance(method := getattr(owner, name, None), types.FunctionType)]
    return names


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
