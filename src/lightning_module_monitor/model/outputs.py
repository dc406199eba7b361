"""Any module's output (tensor, tuple, dict, dataclass, nested) as tensors with the paths to them."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Path = tuple[Hashable, ...]
"""The way to a tensor: an index, a name, or ``("key", k)`` for a key of a mapping that is no text. No two are alike."""

NamedTensors = Sequence[tuple[Path, Tensor]]
"""Tensors of an output, each with the path to it."""


def named_tensors(output: object, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor in an output, with the path to it, which begins with ``path``.

    The output is a tensor, or nested tuples, lists, mappings, named tuples and dataclasses of tensors. Anything else in it is skipped.
    """
    if isinstance(output, Tensor):
        yield path, output
        return
    for name, part in parts(output):
        yield from named_tensors(part, (*path, name))


def map_leaves(output: object, function: Callable[[Any], object], *, keeps_mappings: bool = False) -> Any:  # noqa: ANN401  # of its structure
    """An output of the same structure, with a function's results in the places of its leaves.

    Args:
        output: As for :func:`named_tensors`.
        function: Gets every leaf: a tensor, and whatever else is no container.
        keeps_mappings: Whether a dict stays one of its class, and any other mapping is a leaf. Otherwise each becomes a plain dict.

    Returns:
        Containers of the same types, but a plain tuple or list where its class is not made from elements. A dataclass and a named
        tuple are not initialized again: they hold what the function returned.
    """

    def mapped(part: object) -> Any:  # noqa: ANN401  # as above
        return map_leaves(part, function, keeps_mappings=keeps_mappings)

    if isinstance(output, Mapping) and not keeps_mappings:
        return {name: mapped(part) for name, part in output.items()}
    if isinstance(output, dict | UserDict):
        clone = copy.copy(output)
        for name, part in output.items():
            clone[name] = mapped(part)  # Hugging Face's outputs refuse `update`
        return clone
    if isinstance(output, tuple) and hasattr(output, "_make"):
        return output._make(map(mapped, output))
    if isinstance(output, tuple | list):
        return _of_class(type(output), [mapped(part) for part in output])
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        instance = copy.copy(output)
        for name, part in parts(output):
            object.__setattr__(instance, str(name), mapped(part))  # also of a frozen one
        return instance
    return function(output)


def with_tensors(value: object, replace: Callable[[Tensor], Tensor]) -> Any:  # noqa: ANN401  # of the same structure as the value
    """A value with what ``replace`` returns for its tensors, in containers of the same types; anything else stays the same object."""
    return map_leaves(value, lambda leaf: replace(leaf) if isinstance(leaf, Tensor) else leaf, keeps_mappings=True)


def in_graph(tensor: Tensor) -> Tensor:
    """The tensor that a gradient arrives at: inside of one that ``vmap`` maps over; any other as it is."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor) and functorch.is_batchedtensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def is_first(path: Path) -> bool:
    """Whether a tensor is the output itself, or the first element of it: it has the module's own name."""
    return all(part == 0 for part in path)


def suffix(path: Path, of: str = "output") -> str:
    """The suffix of the module's name: ``output_1`` for the second element, ``output_hidden_states`` for that entry.

    >>> suffix((1, 0)), suffix((("key", 3),)), suffix(("mask",), "input")
    ('output_1_0', 'output_3', 'input_mask')
    """
    return "_".join((of, *(str(part[1] if isinstance(part, tuple) else part) for part in path)))


def parts(output: object) -> Iterator[tuple[Hashable, object]]:
    """The parts of a container, each with its step of a path; a leaf has none."""
    if isinstance(output, Mapping):
        yield from ((name if isinstance(name, str) else ("key", name), part) for name, part in output.items())
    elif isinstance(output, tuple) and hasattr(output, "_fields"):
        yield from zip(output._fields, output, strict=True)
    elif isinstance(output, tuple | list):
        yield from enumerate(output)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        names = [field.name for field in dataclasses.fields(output)]
        yield from ((name, getattr(output, name)) for name in names if hasattr(output, name))  # a field may be unset


def _of_class(wanted: type[tuple[Any, ...]] | type[list[Any]], elements: list[Any]) -> tuple[Any, ...] | list[Any]:
    """A tuple or list of a class; a plain one if the class is not made from its elements."""
    try:
        return wanted(elements)
    except TypeError:
        return tuple(elements) if issubclass(wanted, tuple) else elements
