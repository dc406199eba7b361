"""Copies of a call's arguments: plain data only, and without running code of the arguments' classes."""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lightning_module_monitor.model.copies import NotPlainError, plain_copy
from lightning_module_monitor.model.outputs import named_tensors


def forbidden(*_args: object, **_kwargs: object) -> Any:
    """A method that a copy must not call."""
    raise AssertionError("code of the argument's class was run")


class Pair(NamedTuple):
    first: Tensor
    second: list[Tensor]


Content = TypeVar("Content")


@dataclasses.dataclass
class Batch(Generic[Content]):
    """A dataclass whose own code a copy must not run."""

    x: Tensor
    labels: Content
    note: str = "a"

    __copy__ = __deepcopy__ = __reduce_ex__ = __setattr__ = __post_init__ = forbidden


def batch(x: Tensor) -> Batch[list[int]]:
    """A ``Batch``, made without running its code."""
    batch: Batch[list[int]] = object.__new__(Batch)
    vars(batch).update(x=x, labels=[1, 2], note="a")
    return batch


class Color(enum.Enum):
    RED = 1


def test_tensors_are_copied_and_all_else_is_equal() -> None:
    """Containers keep their types, an object that occurs twice is copied once, and no mutable object is shared."""
    x = torch.randn(3, 4)
    value: dict[str, Any] = {
        "tuple": (x, None, True, 3, 2.5, 1j, "text", b"bytes", slice(1, 2), range(3), ..., Color.RED),
        "constants": (torch.float32, torch.device("cpu"), torch.strided, torch.channels_last, x.shape, np.float32(3), np.int64(4)),
        "named": Pair(x, [x]),
        "ordered": OrderedDict(a=x),
        "default": defaultdict(list, a=[x]),
        "array": np.arange(3),
        "packed": pack_sequence([x[0], x[1]]),
        "dataclass": batch(x),
        "parameter": nn.Parameter(x),
    }
    copy = plain_copy(value)
    assert copy["tuple"][1:] == value["tuple"][1:]
    assert copy["constants"] == value["constants"]
    assert [type(copy[name]) for name in value if name != "parameter"] == [type(value[name]) for name in value if name != "parameter"]
    copies, originals = list(named_tensors(copy)), list(named_tensors(value))
    assert [path for path, _tensor in copies] == [path for path, _tensor in originals]
    for (_path, tensor), (_original_path, original) in zip(copies, originals, strict=True):
        assert torch.equal(tensor, original)
        assert tensor.data_ptr() != original.data_ptr()
    assert copy["tuple"][0] is copy["named"].first is copy["named"].second[0] is copy["dataclass"].x
    assert copy["dataclass"].labels == [1, 2]
    assert copy["dataclass"].labels is not value["dataclass"].labels
    assert copy["default"]["new"] == []
    assert "new" not in value["default"]
    copy["array"][0] = 7
    assert value["array"][0] == 0
    assert isinstance(copy["packed"], PackedSequence)


class Graph:
    """Has state and code of its own, as graphs of PyG and DGL have."""

    __copy__ = __deepcopy__ = __reduce_ex__ = forbidden


@dataclasses.dataclass
class Holder:
    inner: object


@dataclasses.dataclass
class Slotted:
    __slots__ = ("x",)
    x: Tensor


@dataclasses.dataclass
class DictOf(dict):  # type: ignore[type-arg]
    x: int = 0


class ListOf(list):  # type: ignore[type-arg]
    pass


class TupleOf(tuple):  # type: ignore[type-arg]
    pass


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "object": (Graph, "Graph"),
    "module": (lambda: nn.Linear(2, 2), "Linear"),
    "function": (lambda: torch.relu, "builtin"),
    "generator": (torch.Generator, "Generator"),
    "mapping": (lambda: UserDict(a=torch.ones(2)), "UserDict"),
    "within": (lambda: [{"a": (Holder(nn.Linear(2, 2)),)}], "Linear"),
    "slots": (lambda: Slotted(torch.ones(2)), "Slotted"),
    "dict": (DictOf, "DictOf"),
    "list": (lambda: ListOf([torch.ones(2)]), "ListOf"),
    "tuple": (lambda: TupleOf([torch.ones(2)]), "TupleOf"),
    "objects": (lambda: np.array([object()]), "ndarray"),
}
"""Makers of values that are not plain data, and the type that the error names."""


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_are_not_plain_data_are_refused(name: str) -> None:
    """Also within containers; the error names the type."""
    make, type_name = REFUSED[name]
    with pytest.raises(NotPlainError, match=type_name):
        plain_copy((torch.ones(2), make()))
