"""The output of a module (tensor, tuple, dict, dataclass, nested) as tensors with the paths to them."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

from torch import Tensor

from lightning_module_monitor.kernels.elements import plain

Path = tuple[Hashable, ...]
"""The path to a tensor in an output: indices, names, and ``("key", k)`` for keys of a mapping that are no strings. Unique."""

NamedTensors = Sequence[tuple[Path, Tensor]]
"""Tensors of an output with their paths."""


def named_tensors(output: object, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor in an output, with its path, which begins with ``path``.

    The output is a tensor, or nested tuples, lists, mappings, named tuples and dataclasses of tensors, or an object with such contents that
    has the methods ``to`` and ``to_dict``. Other objects are skipped.
    """
    if isinstance(output, Tensor):
        yield path, output
        return
    for name, part in parts(output):
        yield from named_tensors(part, (*path, name))


def num_samples(batch: object) -> int | None:
    """The number of samples in a batch: its ``num_graphs`` (PyTorch Geometric), or the length of its first tensor; ``None`` if unknown."""
    if _is_graph(batch) and isinstance(num_graphs := getattr(batch, "num_graphs", None), int):
        return num_graphs
    if isinstance(batch, Tensor):
        tensor = plain(batch)
        return len(tensor) if tensor.dim() else None
    return next((num for _name, part in parts(batch) if (num := num_samples(part)) is not None), None)


def is_known(value: object) -> bool:
    """Whether all of a value is seen: tensors, numbers, texts and ``None``, possibly in containers, and no object of another class."""
    contents = [part for _name, part in parts(value)]
    return all(map(is_known, contents)) if contents else isinstance(value, Tensor | Number | str | bytes | Mapping | tuple | list | None)


def map_leaves(output: object, function: Callable[[Any], object], *, keeps_mappings: bool = False) -> Any:  # noqa: ANN401  # of its structure
    """An output of the same structure, with each leaf replaced by the result of a function.

    Args:
        output: As for :func:`named_tensors`.
        function: Receives every leaf: tensors, and all objects that are no containers.
        keeps_mappings: Whether a dict keeps its class, and any other mapping is a leaf. Otherwise each becomes a plain dict.

    Returns:
        Containers of the same types, but a plain tuple or list if its class cannot be made from elements. Dataclasses and named tuples
        are not initialized again.
    """

    def mapped(part: object) -> Any:  # noqa: ANN401  # as above
        return function(part) if isinstance(part, Tensor) else map_leaves(part, function, keeps_mappings=keeps_mappings)

    if not keeps_mappings and isinstance(output, Mapping):
        return {name: mapped(part) for name, part in output.items()}
    if isinstance(output, dict | UserDict):
        clone = copy.copy(output)
        for name, part in output.items():
            clone[name] = mapped(part)  # Hugging Face's outputs refuse `update`
        return clone
    if isinstance(output, tuple) and hasattr(output, "_make"):
        return output._make(map(mapped, output))
    if isinstance(output, tuple | list):
        return _sequence(type(output), [mapped(part) for part in output])
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        instance = copy.copy(output)
        for name, part in parts(output):
            object.__setattr__(instance, str(name), mapped(part))  # also of a frozen dataclass
        return instance
    return function(output)


def with_tensors(value: object, replace: Callable[[Tensor], Tensor]) -> Any:  # noqa: ANN401  # of the same structure as the value
    """A value with its tensors replaced by the results of ``replace``, in containers of the same types; other objects are kept."""
    return map_leaves(value, lambda leaf: replace(leaf) if isinstance(leaf, Tensor) else leaf, keeps_mappings=True)


def is_first(path: Path) -> bool:
    """Whether a tensor is the output itself or its first element: then it has the name of the module."""
    return all(part == 0 for part in path)


def suffix(path: Path, of: str = "output") -> str:
    """The suffix of the module's name: ``output_1`` for the second element, ``output_hidden_states`` for an entry of that name.

    >>> suffix((1, 0)), suffix((("key", 3),)), suffix(("mask",), "input")
    ('output_1_0', 'output_3', 'input_mask')
    """
    return "_".join((of, *(str(part[1] if isinstance(part, tuple) else part) for part in path)))


def parts(output: object) -> Iterator[tuple[Hashable, object]]:
    """The parts of a container, each with its element of a path; none for a leaf."""
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        yield from zip(output._fields, output, strict=True)
    elif isinstance(output, tuple | list):
        yield from enumerate(output)
    elif isinstance(output, Mapping):
        yield from ((name if isinstance(name, str) else ("key", name), part) for name, part in output.items())
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        names = [field.name for field in dataclasses.fields(output)]
        yield from ((name, getattr(output, name)) for name in names if hasattr(output, name))  # a field may be unset
    elif _is_graph(output):
        yield from parts(output.to_dict())  # type: ignore[attr-defined]  # it has the method


def _is_graph(output: object) -> bool:
    """Whether an object is like PyTorch Geometric's graphs, no container. Its class is asked, as an instance may raise errors."""
    return not isinstance(output, Tensor | Mapping) and hasattr(type(output), "to") and hasattr(type(output), "to_dict")


def _sequence(kind: type[tuple[Any, ...]] | type[list[Any]], elements: list[Any]) -> tuple[Any, ...] | list[Any]:
    """A tuple or list of a class; a plain one if the class cannot be made from elements."""
    try:
        return kind(elements)
    except TypeError:
        return tuple(elements) if issubclass(kind, tuple) else elements
