"""Copies of modules, of tensors, and of the arguments of calls; and loading of saved weights."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import gc
import numbers
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.model.compiled import uncompile, uncompiled

Tensors = Mapping[str, Tensor]
"""Parameters and buffers by name."""


def frozen_copy(module: nn.Module, name: str = "") -> nn.Module:
    """A deep copy of a module without gradients.

    Hooks that are methods of the module, or torch's own (spectral norm), are part of its computation and are copied. All others are
    left out: they would report the copy's values as those of the module. Errors call the module ``name``.

    Raises:
        ConfigError: If it cannot be copied, names the attribute; or if it has tensors that are created with the first batch.
    """
    lazy = lazy_tensors(module)
    if lazy:
        where = ".".join(filter(None, (name, lazy[0])))
        cure = "Run a batch through the model before the fit, or in its setup or configure_model"
        raise ConfigError(f"reference is a copy of the model, and {where} has no values before the first batch. {cure}.")
    try:
        clone = independent_copy(module)
    except Exception as error:
        where = ".".join(filter(None, (name, _what_cannot_be_copied(module)))) or type(module).__name__
        cure = "Take it off before the fit, or define __deepcopy__; or give a module as the reference"
        cause = f"{type(error).__name__}: {str(error).partition('. ')[0][:100]}"
        message = f"reference is a copy of the model, and {where} cannot be copied ({cause}). {cure}."
        raise ConfigError(message) from error
    return clone.requires_grad_(False)


def independent_copy(module: nn.Module, known: Mapping[int, Any] | None = None) -> nn.Module:
    """A deep copy of a module that calls no code that refers to the original.

    Functions among the attributes refer to the copy, unlike those of ``deepcopy``, and nothing in it is compiled. Parameters keep the
    Python attributes that a program has given them, which ``deepcopy`` leaves out: as copies, but for those that cannot be copied. Hooks
    that are neither methods of the module nor torch's own are removed.

    Args:
        module: The module.
        known: Copies by the identity of the original, which take the place of further ones.

    Raises:
        RuntimeError: If a module within it is copied as itself.
        Exception: Whatever the copy of an attribute raises.
    """
    tensors = tensors_within(module)
    memo = {**_without_graph(tensors), **(known or {})}
    # With a graph, copies of tensors in TorchScript are computed tensors, which cannot be frozen.
    with torch.no_grad():
        clone = copy.deepcopy(module, memo)
        for tensor in tensors:
            if id(tensor) in memo:
                _keep_attributes(tensor, memo[id(tensor)], functools.partial(copy.deepcopy, memo=memo))
    modules, own = set(module.modules()), set(clone.modules())
    if modules & own:
        raise RuntimeError(f"a copy of {type(module).__name__} shares its {type((modules & own).pop()).__name__} with it")
    _rebind((*module.modules(), *tensors), modules, memo)
    uncompile([one for one in memo.values() if issubclass(type(one), nn.Module)])
    for part in own:
        for hooks in (part._forward_hooks, part._forward_pre_hooks):
            for key, hook in list(hooks.items()):
                is_method = isinstance(hook, types.MethodType) and hook.__self__ in own
                if not is_method and not (type(hook).__module__ or "").startswith("torch.nn."):
                    del hooks[key]
        part._backward_hooks.clear()
        part._backward_pre_hooks.clear()
    return clone


def _rebind(originals: Iterable[nn.Module | Tensor], modules: set[nn.Module], memo: dict[int, Any]) -> None:
    """Have functions in the attributes of copies call copies, and no compiled code, also those in lists and dicts."""
    for one in originals:
        for attribute, value in vars(one).items() if id(one) in memo else ():
            if isinstance(value, types.FunctionType) and value.__closure__:
                vars(memo[id(one)])[attribute] = _rebound(value, modules, memo)
    for one in [one for one in memo.values() if type(one) in (list, dict)]:
        for place, value in [*(one.items() if isinstance(one, dict) else enumerate(one))]:
            if uncompiled(value) is not value:
                one[place] = _rebound(value, modules, memo)


def _keep_attributes(tensor: Tensor, clone: Tensor, copy_of: Callable[[Any], Any]) -> None:
    """Give a copy of a tensor copies of the Python attributes that it lacks: torch copies those of few tensors, and of no parameter."""
    for name, value in vars(tensor).items():
        if name not in vars(clone):
            with suppress(Exception):
                vars(clone)[name] = copy_of(value)


def tensors_within(module: nn.Module) -> list[Tensor]:
    """Every tensor that a module refers to, also by attributes of other objects, and of tensors."""
    tensors: list[Tensor] = []
    visited: dict[int, object] = {}
    waiting: list[object] = [module]
    while waiting:
        one = waiting.pop()
        if id(one) in visited or issubclass(type(one), _NEVER_COPIED):
            continue
        visited[id(one)] = one  # kept, because its id could be reused
        if issubclass(type(one), nn.Module):
            waiting.append(_state(one))  # type: ignore[arg-type]
        elif isinstance(one, Tensor):
            tensors.append(one)
            waiting += vars(one).values()
        else:
            # ``deepcopy`` copies the attributes of a class, but one with copying code of its own may refer to the whole program.
            own = (getattr(type(one), name, None) for name in ("__deepcopy__", "__reduce__", "__reduce_ex__"))
            if issubclass(type(one), Mapping) or not any(isinstance(method, types.FunctionType) for method in own):
                waiting += gc.get_referents(one)
    return tensors


def _without_graph(tensors: Iterable[Tensor]) -> dict[int, Any]:
    """Copies of computed tensors by their identity, which torch does not copy.

    A forward pass has left them in an attribute, also of another object, or ``weight_norm`` computes a weight from its factors.
    """
    return {id(one): one.detach().clone() for one in tensors if not one.is_leaf}


_OF_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.FrameType, types.CodeType)
_NEVER_COPIED = (*_OF_CODE, weakref.ref, weakref.ProxyType, weakref.CallableProxyType)
"""Types that ``deepcopy`` does not copy, or refuses."""


def _state(module: nn.Module) -> object:
    """The state that is copied: a LightningModule leaves its trainer out."""
    try:
        return module.__getstate__()
    except Exception:
        return vars(module)  # a parametrized module and TorchScript refuse; Python 3.10 has no such method


def parameter_copy(module: nn.Module) -> nn.Module:
    """A module of the same names with copies of the parameters alone: it cannot run.

    For parameters that are laid out over ranks, whose module cannot be copied: each rank copies its part.
    """
    copies = {part: nn.Module() for part in module.modules()}
    for part, clone in copies.items():
        for name, parameter in part._parameters.items():
            kept = None if parameter is None else nn.Parameter(parameter.detach().clone(), requires_grad=False)
            clone.register_parameter(name, kept)
        for name, child in part._modules.items():
            clone.add_module(name, None if child is None else copies[child])
    return copies[module]


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer of a module, also those that its ``state_dict`` leaves out, detached."""
    return {name: tensor.detach() for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def lazy_tensors(module: nn.Module) -> list[str]:
    """Names of parameters and buffers that lazy modules create with the first batch."""
    return [name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if nn.parameter.is_lazy(tensor)]


def differing_tensors(module: nn.Module, tensors: Tensors) -> list[str]:
    """Tensors that are not in both, and parameters of different shapes. A forward pass may resize a buffer."""
    own = tensors_of(module)
    fixed = dict(module.named_parameters())
    shapes = [f"{name} {tuple(one.shape)}" for name, one in tensors.items() if name in fixed and fixed[name].shape != one.shape]
    return sorted(own.keys() ^ tensors.keys()) + shapes


@torch.no_grad()
def set_tensors(module: nn.Module, tensors: Tensors) -> None:
    """Load tensors into a module by name.

    Raises:
        ValueError: If names or shapes differ; lists them.
    """
    own, differing = tensors_of(module), differing_tensors(module, tensors)
    if differing:
        raise ValueError(f"these tensors are not those of the model: {', '.join(differing[:10])}{' ...' if len(differing) > 10 else ''}")
    for name, tensor in tensors.items():
        if own[name].shape == tensor.shape:
            overwrite(own[name], tensor)
        else:
            owner, _dot, attribute = name.rpartition(".")
            module.get_submodule(owner)._buffers[attribute] = tensor.to(own[name].device, copy=True)


def load_weights(module: nn.Module, path: str, within: str | None) -> None:
    """Load the weights of a checkpoint into a module.

    Args:
        module: The module.
        path: A Lightning checkpoint, or a ``state_dict`` saved by ``torch.save``.
        within: Name of the module in the checkpoint's model; ``None`` for the model itself.

    Raises:
        ConfigError: If there is no such file, or its weights are not those of the module.
    """
    if not Path(path).is_file():
        raise ConfigError(f"reference is {path!r}, and there is no such file; expected 'init', or the path of a checkpoint.")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch's own message is many lines on how to load other objects than tensors.
        cure = "expected a Lightning checkpoint, or a state_dict saved with torch.save"
        raise ConfigError(f"reference {path!r} cannot be read ({type(error).__name__}); {cure}.") from error
    weights = saved.get("state_dict", saved) if isinstance(saved, Mapping) else None
    if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
        raise ConfigError(f"reference {path!r} holds a {type(saved).__name__}; expected a Lightning checkpoint or a state_dict.")
    start = f"{within}." if within and any(name.startswith(f"{within}.") for name in weights) else ""
    weights = {name[len(start) :]: tensor for name, tensor in weights.items() if name.startswith(start)}
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        first, *rest = [line.strip() for line in str(error).splitlines()]
        raise ConfigError(f"reference {path!r} is not of this model: {' '.join(rest)[:150] or first}") from error


def _rebound(given: types.FunctionType, modules: set[nn.Module], memo: dict[int, Any]) -> Callable[..., Any]:
    """A copy of a function whose closure refers to copies of modules, and of their methods, in place of the modules; not compiled.

    A copied module keeps functions of the original in its attributes, e.g. a patched ``forward``, which would run the original.
    """
    function = uncompiled(given)
    if isinstance(function, types.MethodType):
        return copy.deepcopy(function, memo) if function.__self__ in modules else function
    if not isinstance(function, types.FunctionType) or not function.__closure__:
        return function  # type: ignore[no-any-return]  # as it was given
    if id(function) in memo and memo[id(function)] is not function:
        return memo[id(function)]  # type: ignore[no-any-return]
    cells = [types.CellType() for _cell in function.__closure__ or ()]
    new = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells))
    new.__kwdefaults__ = function.__kwdefaults__
    memo[id(function)] = functools.update_wrapper(new, function)
    for cell, original in zip(cells, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # an unassigned name
            held = original.cell_contents
            owner = getattr(held, "__self__", held)
            if isinstance(held, types.FunctionType):
                held = _rebound(held, modules, memo)
            elif isinstance(owner, nn.Module) and owner in modules:
                held = copy.deepcopy(held, memo)
            cell.cell_contents = held
    return new


def _what_cannot_be_copied(module: nn.Module) -> str | None:
    """The name of an attribute that cannot be copied."""
    known = {**_without_graph(tensors_within(module)), **{id(part): part for part in module.modules()}}
    for name, part in module.named_modules():
        state = _state(part)
        for attribute, value in state.items() if isinstance(state, dict) else ():
            members = value.items() if attribute in ("_parameters", "_buffers") else () if attribute == "_modules" else [(attribute, value)]
            for member, one in members:
                try:
                    copy.deepcopy(one, dict(known))
                except Exception:
                    return ".".join(filter(None, (name, member)))
    return None


def same_layout(tensor: Tensor) -> Tensor:
    """A copy with the strides of the tensor, by which torch selects kernels too: ``clone`` keeps them only where there are no gaps."""
    clone = tensor.clone()
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or clone.stride() == tensor.stride() or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return clone
    own = tensor[_written_once(tensor)]
    try:
        return torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device=own.device).copy_(own).expand(tensor.shape)
    except RuntimeError:
        return clone  # elements overlap: windows of one tensor


def overwrite(tensor: Tensor, values: Tensor) -> None:
    """Write values into a tensor of the same shape, which may be an expanded one."""
    if tensor.layout is not torch.strided:
        tensor.copy_(values)
        return
    own = _written_once(tensor)
    tensor[own].copy_(values[own])


def _written_once(tensor: Tensor) -> tuple[slice, ...]:
    """The index of the part of a tensor with memory of its own: the first of each slice that ``expand`` repeats."""
    return tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())


_OF_PYTHON = (type(None), numbers.Number, str, bytes, slice, range, type(...), enum.Enum)
_CONSTANTS = (*_OF_PYTHON, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Immutable types."""
_DICTS = (dict, OrderedDict, defaultdict)


class NotPlainError(TypeError):
    """Raised for an argument that cannot be copied without code of its own class."""

    def __init__(self, value: object) -> None:
        super().__init__(f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins."))


def plain_copy(value: Any, memo: dict[int, Any] | None = None) -> Any:  # noqa: ANN401  # of the same structure as the value
    """A copy of plain data, which shares no memory with the original.

    Args:
        value: Tensors, numbers, strings and other constants, numpy arrays, and tuples, named tuples, lists, dicts and dataclasses of
            such. Tensors have the ``requires_grad`` flag and the strides of the original, by which torch selects kernels.
        memo: Copies by the identity of the original, so that a tensor that occurs twice occurs twice in the copy: attention checks
            whether its query is its key.

    Raises:
        NotPlainError: If it contains anything else; names its type.
    """
    memo = {} if memo is None else memo
    if isinstance(value, _CONSTANTS):
        return value
    if id(value) not in memo:
        memo[id(value)] = _copy(value, memo)
    return memo[id(value)]


def _copy(value: Any, memo: dict[int, Any]) -> Any:  # noqa: ANN401  # as above
    kind = type(value)
    if isinstance(value, Tensor):
        memo[id(value)] = _tensor_copy(value)  # before its attributes, which may refer to it
        _keep_attributes(value, memo[id(value)], functools.partial(plain_copy, memo=memo))
        return memo[id(value)]
    if kind is np.ndarray and not value.dtype.hasobject:
        return value.copy()
    if kind in _DICTS:
        clone = value.copy()
        clone.update((name, plain_copy(one, memo)) for name, one in value.items())
        return clone
    if isinstance(value, tuple) or kind is list:
        return _sequence_copy(value, memo)
    has_slots = any(vars(one).get("__slots__") for one in kind.__mro__)
    if not dataclasses.is_dataclass(kind) or kind.__new__ is not object.__new__ or has_slots or issubclass(kind, nn.Module):
        raise NotPlainError(value)  # its values are not their attributes alone, or are not made without code of the class
    clone = object.__new__(kind)
    vars(clone).update({name: plain_copy(one, memo) for name, one in vars(value).items()})
    return clone


def _sequence_copy(value: tuple[Any, ...] | list[Any], memo: dict[int, Any]) -> tuple[Any, ...] | list[Any]:
    members = [plain_copy(one, memo) for one in value]
    if isinstance(value, list):
        return members
    if all(one is other for one, other in zip(members, value, strict=True)):
        return value  # constants alone, e.g. a shape
    if type(value) is tuple or hasattr(type(value), "_fields"):
        return tuple.__new__(type(value), members)
    raise NotPlainError(value)


def _tensor_copy(tensor: Tensor) -> Tensor:
    source = tensor.detach()
    if not tensor.requires_grad:
        return same_layout(source)
    if tensor.is_leaf:
        return same_layout(source).requires_grad_()
    with torch.enable_grad():  # not a leaf, which a layer could not write into
        return same_layout(source.requires_grad_())
