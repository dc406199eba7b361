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

from lightning_module_monitor.errors import ConfigError, shortened
from lightning_module_monitor.model.compiled import is_compiled, original_of, take_out_compiled_code

Tensors = Mapping[str, Tensor]
"""Parameters and buffers by name."""


def frozen_copy(module: nn.Module, name: str = "") -> nn.Module:
    """A deep copy of a module that requires no gradients; see :func:`independent_copy`.

    Args:
        module: The module.
        name: Its name in errors.

    Raises:
        ConfigError: If an attribute cannot be copied, or if a tensor is created only by the first batch; with its name.
    """
    lazy = lazy_tensors(module)
    if lazy:
        where = ".".join(filter(None, (name, lazy[0])))
        cure = "Run a batch through the model before the fit, or in its setup or configure_model"
        raise ConfigError(f"reference is a copy of the model, and {where} has no values before the first batch. {cure}.")
    try:
        clone = independent_copy(module)
    except Exception as error:
        where = ".".join(filter(None, (name, _uncopyable_attribute(module)))) or type(module).__name__
        cure = "Take it off before the fit, or define __deepcopy__; or give a module as the reference"
        cause = f"{type(error).__name__}: {str(error).partition('. ')[0][:100]}"
        message = f"reference is a copy of the model, and {where} cannot be copied ({cause}). {cure}."
        raise ConfigError(message) from error
    return clone.requires_grad_(False)


def independent_copy(module: nn.Module, known: Mapping[int, Any] | None = None) -> nn.Module:
    """A deep copy of a module that calls no code that refers to the original.

    Unlike with ``deepcopy``, functions among the attributes refer to the copy, nothing is compiled, and parameters keep copies of the
    Python attributes that a program has set, if they can be copied. Hooks that are methods of the module or torch's own (spectral norm)
    are part of the computation and are copied; others would report the copy's values as those of the module, and are left out.

    Args:
        module: The module.
        known: Existing copies by the ``id`` of the original.

    Raises:
        RuntimeError: If the copy contains a module of the original.
        Exception: Whatever the copy of an attribute raises.
    """
    tensors = tensors_within(module)
    memo = {**_copies_of_non_leaves(tensors), **(known or {})}
    # With a graph, copied tensors of TorchScript are no leaves and cannot be frozen.
    with torch.no_grad():
        clone = copy.deepcopy(module, memo)
        for tensor in tensors:
            if id(tensor) in memo:
                _copy_attributes(tensor, memo[id(tensor)], functools.partial(copy.deepcopy, memo=memo))
    modules, copies = set(module.modules()), set(clone.modules())
    if modules & copies:
        raise RuntimeError(f"a copy of {type(module).__name__} shares its {type((modules & copies).pop()).__name__} with it")
    _rebind((*module.modules(), *tensors), modules, memo)
    take_out_compiled_code([value for value in memo.values() if issubclass(type(value), nn.Module)])
    _remove_observing_hooks(copies)
    return clone


def _remove_observing_hooks(copies: set[nn.Module]) -> None:
    """Remove the hooks of copies that are no part of the computation: all but methods of the copies and hooks of torch itself."""
    for part in copies:
        for hooks in (part._forward_hooks, part._forward_pre_hooks):
            for key, hook in list(hooks.items()):
                is_method = isinstance(hook, types.MethodType) and hook.__self__ in copies
                if not is_method and not (type(hook).__module__ or "").startswith("torch.nn."):
                    del hooks[key]
        part._backward_hooks.clear()
        part._backward_pre_hooks.clear()


def _rebind(originals: Iterable[nn.Module | Tensor], modules: set[nn.Module], memo: dict[int, Any]) -> None:
    """Make functions in the attributes of copies refer to copies, and replace compiled code in lists and dicts.

    ``deepcopy`` keeps functions as they are: a patched ``forward`` in the attributes of a copy would run the original module.
    """
    for original in (original for original in originals if id(original) in memo):
        for attribute, value in vars(original).items():
            if isinstance(value, types.FunctionType) and value.__closure__:
                vars(memo[id(original)])[attribute] = _as_in_copy(value, modules, memo)
    for container in [value for value in memo.values() if type(value) in (list, dict)]:
        for key, value in [*(container.items() if isinstance(container, dict) else enumerate(container))]:
            if is_compiled(value):
                container[key] = _as_in_copy(value, modules, memo)


def _as_in_copy(value: Any, modules: set[nn.Module], memo: dict[int, Any]) -> Any:  # noqa: ANN401  # of the type of the value
    """The value for a copied function: a copy if it is a module, a method of a module, a tensor or a function with a closure."""
    value = original_of(value)
    if isinstance(value, types.FunctionType):
        return _function_as_in_copy(value, modules, memo) if value.__closure__ else value
    if isinstance(value, Tensor):
        return memo.get(id(value), value)
    owner = getattr(value, "__self__", value)  # the module of a bound method
    return copy.deepcopy(value, memo) if isinstance(owner, nn.Module) and owner in modules else value


def _function_as_in_copy(function: types.FunctionType, modules: set[nn.Module], memo: dict[int, Any]) -> types.FunctionType:
    """The same function with a closure that refers to copies."""
    known: types.FunctionType = memo.get(id(function), function)
    if known is not function:
        return known
    originals = function.__closure__ or ()
    cells = tuple(types.CellType() for _original in originals)
    clone = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    clone.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(clone, function)  # copies its attributes, name and docstring
    memo[id(function)] = clone  # before its cells are filled, which may refer to it
    for cell, original in zip(cells, originals, strict=True):
        with suppress(ValueError):  # a name that has no value yet
            cell.cell_contents = _as_in_copy(original.cell_contents, modules, memo)
    return clone


def _copy_attributes(tensor: Tensor, clone: Tensor, copy_of: Callable[[Any], Any]) -> None:
    """Copy the Python attributes of a tensor that its copy lacks: torch copies those of few tensors, and of no parameter."""
    for name, value in vars(tensor).items():
        if name not in vars(clone):
            with suppress(Exception):
                vars(clone)[name] = copy_of(value)


def tensors_within(module: nn.Module) -> list[Tensor]:
    """Every tensor that a module refers to, also through attributes of other objects and of tensors."""
    tensors: list[Tensor] = []
    visited: dict[int, object] = {}
    waiting: list[object] = [module]
    while waiting:
        value = waiting.pop()
        if id(value) in visited or issubclass(type(value), _NEVER_COPIED):
            continue
        visited[id(value)] = value  # kept, because its id could be reused
        if issubclass(type(value), nn.Module):
            waiting.append(_state(value))  # type: ignore[arg-type]
        elif isinstance(value, Tensor):
            tensors.append(value)
            waiting += vars(value).values()
        else:
            # ``deepcopy`` copies the attributes of an object, but an object with custom copying code may refer to the whole program.
            copying = (getattr(type(value), name, None) for name in ("__deepcopy__", "__reduce__", "__reduce_ex__"))
            if issubclass(type(value), Mapping) or not any(isinstance(method, types.FunctionType) for method in copying):
                waiting += gc.get_referents(value)
    return tensors


def _copies_of_non_leaves(tensors: Iterable[Tensor]) -> dict[int, Any]:
    """Copies of tensors that are not leaves, by the ``id`` of the original: torch refuses to ``deepcopy`` these.

    A forward pass leaves such tensors in attributes, and ``weight_norm`` computes a weight from its factors.
    """
    return {id(tensor): tensor.detach().clone() for tensor in tensors if not tensor.is_leaf}


_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.FrameType, types.CodeType)
_NEVER_COPIED = (*_CODE, weakref.ref, weakref.ProxyType, weakref.CallableProxyType)
"""Types that ``deepcopy`` does not copy, or refuses to copy."""


def _state(module: nn.Module) -> object:
    """The state to copy: a LightningModule leaves its trainer out."""
    try:
        return module.__getstate__()
    except Exception:
        return vars(module)  # a parametrized module and TorchScript refuse; Python 3.10 has no such method


def parameter_copy(module: nn.Module) -> nn.Module:
    """A module that only has the parameters: copies with the same names. It cannot run; for sharded modules, which cannot be copied."""
    copies = {part: nn.Module() for part in module.modules()}
    for part, clone in copies.items():
        for name, parameter in part._parameters.items():
            kept = None if parameter is None else nn.Parameter(parameter.detach().clone(), requires_grad=False)
            clone.register_parameter(name, kept)
        for name, child in part._modules.items():
            clone.add_module(name, None if child is None else copies[child])
    return copies[module]


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer of a module, also non-persistent ones, detached."""
    return {name: tensor.detach() for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def lazy_tensors(module: nn.Module) -> list[str]:
    """Names of parameters and buffers that lazy modules initialize with the first batch."""
    return [name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if nn.parameter.is_lazy(tensor)]


def differing_tensors(module: nn.Module, tensors: Tensors) -> list[str]:
    """Names that only one of the two has, and parameters of different shapes; a forward pass may resize buffers."""
    parameters = dict(module.named_parameters())
    shapes = [
        f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items() if name in parameters and parameters[name].shape != tensor.shape
    ]
    return sorted(tensors_of(module).keys() ^ tensors.keys()) + shapes


@torch.no_grad()
def set_tensors(module: nn.Module, tensors: Tensors) -> None:
    """Load tensors into a module by name.

    Raises:
        ValueError: If names or shapes differ; lists them.
    """
    targets, differing = tensors_of(module), differing_tensors(module, tensors)
    if differing:
        raise ValueError(f"these tensors are not those of the model: {shortened(differing, 10)}")
    for name, tensor in tensors.items():
        if targets[name].shape == tensor.shape:
            overwrite(targets[name], tensor)
        else:
            owner, _dot, attribute = name.rpartition(".")
            module.get_submodule(owner)._buffers[attribute] = tensor.to(targets[name].device, copy=True)


def load_weights(module: nn.Module, path: str, within: str | None) -> None:
    """Load the weights of a checkpoint into a reference.

    Args:
        module: The module.
        path: A Lightning checkpoint, or a ``state_dict`` saved by ``torch.save``.
        within: Name of the module in the checkpoint's model; ``None`` for the model itself.

    Raises:
        ConfigError: If there is no such file, or its names or shapes are not those of the module.
    """
    if not Path(path).is_file():
        raise ConfigError(f"reference is {path!r}, and there is no such file; expected 'init', or the path of a checkpoint.")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch's message is many lines on how to load other objects than tensors.
        cure = "expected a Lightning checkpoint, or a state_dict saved with torch.save"
        raise ConfigError(f"reference {path!r} cannot be read ({type(error).__name__}); {cure}.") from error
    weights = saved.get("state_dict", saved) if isinstance(saved, Mapping) else None
    if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
        raise ConfigError(f"reference {path!r} holds a {type(saved).__name__}; expected a Lightning checkpoint or a state_dict.")
    prefix = f"{within}." if within and any(name.startswith(f"{within}.") for name in weights) else ""
    weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        first, *rest = [line.strip() for line in str(error).splitlines()]
        raise ConfigError(f"reference {path!r} is not of this model: {' '.join(rest)[:150] or first}") from error


def _uncopyable_attribute(module: nn.Module) -> str | None:
    """The name of the first attribute that cannot be copied, or of a module whose class cannot make another one; ``None`` without one."""
    known = _copies_of_non_leaves(tensors_within(module)) | {id(part): part for part in module.modules()}
    for name, part in module.named_modules():
        state = _state(part)
        rest = dict(state) if isinstance(state, dict) else {}
        values = {**rest.pop("_parameters", {}), **rest.pop("_buffers", {}), **rest, "_modules": None}
        for attribute, value in values.items():
            try:
                copy.deepcopy(value, dict(known))
            except Exception:
                return ".".join(filter(None, (name, attribute)))
        try:
            copy.copy(part)
        except Exception:
            return str(name)
    return None


def same_layout(tensor: Tensor) -> Tensor:
    """A copy with the same strides, because torch selects kernels by them: ``clone`` keeps them only for a tensor without gaps."""
    clone = tensor.clone()
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or clone.stride() == tensor.stride():
        return clone
    unique = tensor[_distinct_elements(tensor)]
    try:
        copied = torch.empty_strided(unique.shape, unique.stride(), dtype=unique.dtype, device=unique.device).copy_(unique)
        return copied.expand(tensor.shape)
    except RuntimeError:
        return clone  # elements overlap: windows of one tensor


def overwrite(tensor: Tensor, values: Tensor) -> None:
    """Write values into a tensor of the same shape, which may be expanded: torch refuses to write one element several times."""
    if tensor.layout is not torch.strided:
        tensor.copy_(values)
        return
    index = _distinct_elements(tensor)
    tensor[index].copy_(values[index])


def _distinct_elements(tensor: Tensor) -> tuple[slice, ...]:
    """The index of the elements that do not share memory: the first slice of each dimension that ``expand`` repeats."""
    return tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())


_PYTHON_CONSTANTS = (type(None), numbers.Number, str, bytes, slice, range, type(...), enum.Enum)
_CONSTANTS = (*_PYTHON_CONSTANTS, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Immutable types."""
_DICTS = (dict, OrderedDict, defaultdict)


class NotPlainError(TypeError):
    """Raised for an argument that cannot be copied without code of its class."""

    def __init__(self, value: object) -> None:
        super().__init__(f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins."))


def plain_copy(value: Any, memo: dict[int, Any] | None = None) -> Any:  # noqa: ANN401  # of the same structure as the value
    """A copy of plain data, which shares no memory with the original.

    Args:
        value: Tensors, numbers, strings and other constants, numpy arrays, and tuples, named tuples, lists, dicts and dataclasses of
            such. Copied tensors have the ``requires_grad`` flag and the strides of the original, by which torch selects kernels.
        memo: Copies by the ``id`` of the original: a tensor that occurs twice is copied once, as attention checks whether its query is
            its key.

    Raises:
        NotPlainError: If it contains any other type, which the error names.
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
        _copy_attributes(value, memo[id(value)], functools.partial(plain_copy, memo=memo))
        return memo[id(value)]
    if kind is np.ndarray and not value.dtype.hasobject:
        return value.copy()
    if kind in _DICTS:
        clone = value.copy()
        clone.update((name, plain_copy(member, memo)) for name, member in value.items())
        return clone
    if isinstance(value, tuple) or kind is list:
        return _sequence_copy(value, memo)
    has_slots = any(vars(base).get("__slots__") for base in kind.__mro__)
    if not dataclasses.is_dataclass(kind) or kind.__new__ is not object.__new__ or has_slots or issubclass(kind, nn.Module):
        raise NotPlainError(value)  # it is more than its attributes, or its class has code for copies
    clone = object.__new__(kind)
    vars(clone).update({name: plain_copy(member, memo) for name, member in vars(value).items()})
    return clone


def _sequence_copy(value: tuple[Any, ...] | list[Any], memo: dict[int, Any]) -> tuple[Any, ...] | list[Any]:
    members = [plain_copy(member, memo) for member in value]
    if isinstance(value, list):
        return members
    if all(member is original for member, original in zip(members, value, strict=True)):
        return value  # only constants, e.g. a shape
    if type(value) is tuple or hasattr(type(value), "_fields"):
        return tuple.__new__(type(value), members)
    raise NotPlainError(value)


def _tensor_copy(tensor: Tensor) -> Tensor:
    source = tensor.detach()
    if not tensor.requires_grad:
        return same_layout(source)
    if tensor.is_leaf:
        return same_layout(source).requires_grad_()
    with torch.enable_grad():  # not a leaf, because a layer may write into it
        return same_layout(source.requires_grad_())
