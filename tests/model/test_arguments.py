"""Copies of a call's arguments: only plain data is copied, without a call of code of the arguments' classes."""

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


def never_called(*_args: object, **_kwargs: object) -> Any:
    """Stands for code of an argument's class."""
    raise AssertionError("code of the argument's class was called")


class Pair(NamedTuple):
    first: Tensor
    second: list[Tensor]


Content = TypeVar("Content")


@dataclasses.dataclass
class Batch(Generic[Content]):
    """A class with code of its own, which only the model may call."""

    x: Tensor
    labels: Content
    note: str = "a"

    __copy__ = __deepcopy__ = __reduce_ex__ = __setattr__ = __post_init__ = never_called


def batch(x: Tensor) -> Batch[list[int]]:
    """A batch, made without a call of its class's code."""
    batch: Batch[list[int]] = object.__new__(Batch)
    vars(batch).update(x=x, labels=[1, 2], note="a")
    return batch


class Color(enum.Enum):
    RED = 1


def test_tensors_are_copied_and_all_else_is_equal() -> None:
    """Containers keep their types, a tensor that occurs twice is copied once, and copy and original share nothing mutable."""
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
    twin = plain_copy(value)
    assert twin["tuple"][1:] == value["tuple"][1:]
    assert twin["constants"] == value["constants"]
    assert [type(twin[name]) for name in value if name != "parameter"] == [type(value[name]) for name in value if name != "parameter"]
    copies, originals = (list(named_tensors(container)) for container in (twin, value))
    assert [path for path, _tensor in copies] == [path for path, _tensor in originals]
    for (_path, tensor), (_same, original) in zip(copies, originals, strict=True):
        assert torch.equal(tensor, original)
        assert tensor.data_ptr() != original.data_ptr()
    assert twin["tuple"][0] is twin["named"].first is twin["named"].second[0] is twin["dataclass"].x
    assert twin["dataclass"].labels == [1, 2]
    assert twin["dataclass"].labels is not value["dataclass"].labels
    assert twin["default"]["new"] == []
    assert "new" not in value["default"]
    twin["array"][0] = 7
    assert value["array"][0] == 0
    assert isinstance(twin["packed"], PackedSequence)


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


OTHERS: dict[str, Callable[[], object]] = {
    "object": lambda: object.__new__(
        type("Graph", (), {"__copy__": never_called, "__deepcopy__": never_called, "__reduce_ex__": never_called})
    ),
    "module": lambda: nn.Linear(2, 2),
    "function": lambda: torch.relu,
    "generator": torch.Generator,
    "mapping": lambda: UserDict(a=torch.ones(2)),
    "within": lambda: [{"a": (Holder(nn.Linear(2, 2)),)}],
    "slots": lambda: Slotted(torch.ones(2)),
    "dict": DictOf,
    "list": lambda: ListOf([torch.ones(2)]),
    "tuple": lambda: TupleOf([torch.ones(2)]),
    "objects": lambda: np.array([object()]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_argument_is_refused(name: str) -> None:
    """The error names the type that cannot be copied."""
    types = {"object": "Graph", "within": "Linear", "module": "Linear", "function": "builtin", "mapping": "UserDict", "objects": "ndarray"}
    types |= {"generator": "Generator", "slots": "Slotted", "dict": "DictOf", "list": "ListOf", "tuple": "TupleOf"}
    with pytest.raises(NotPlainError, match=types[name]):
        plain_copy((torch.ones(2), OTHERS[name]()))
