"""Copies of the arguments of a call, made without code of their classes."""

from __future__ import annotations

import dataclasses
import enum
import numbers
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_module_monitor.model.outputs import same_layout

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
        return _tensor_copy(value)
    if kind is np.ndarray and not value.dtype.hasobject:
        return value.copy()
    if kind in _DICTS:
        clone = value.copy()
        clone.update((name, plain_copy(one, memo)) for name, one in value.items())
        return clone
    if isinstance(value, tuple) or kind is list:
        return _sequence_copy(value, memo)
    if not _is_plain_dataclass(kind):
        raise NotPlainError(value)
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


def _is_plain_dataclass(kind: type) -> bool:
    """Whether values of a class are their attributes, and can be made without code of the class."""
    has_slots = any(vars(one).get("__slots__") for one in kind.__mro__)
    return dataclasses.is_dataclass(kind) and kind.__new__ is object.__new__ and not has_slots and not issubclass(kind, nn.Module)


def _tensor_copy(tensor: Tensor) -> Tensor:
    source = tensor.detach()
    if not tensor.requires_grad:
        return same_layout(source)
    if tensor.is_leaf:
        return same_layout(source).requires_grad_()
    with torch.enable_grad():  # not a leaf, which a layer could not write into
        return same_layout(source.requires_grad_())
