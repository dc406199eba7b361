"""Copies of modules that were used before: what a forward pass has left in them has a graph, and torch copies no such tensor."""

from __future__ import annotations

import functools
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_module_monitor.model.copies import copies_without_graph, frozen_copy
from lightning_module_monitor.model.hooks import UncopiedHook


class Cache:
    """Keys and values in attributes of objects."""

    def __init__(self, tensor: Tensor) -> None:
        self.layers = [{"keys": tensor}]


class Slots:
    """An object without a dict."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Output(OrderedDict):  # type: ignore[type-arg]
    """A mapping that is copied by code of its own, as an output of Hugging Face's."""

    def __reduce__(self) -> Any:
        return type(self), (), None, None, iter(self.items())


HOLDERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "itself": (lambda one: one, lambda held: held),
    "containers": (lambda one: [({"a": one},)], lambda held: held[0][0]["a"]),
    "object": (Cache, lambda held: held.layers[0]["keys"]),
    "slots": (Slots, lambda held: held.tensor),
    "deque": (lambda one: deque([one]), lambda held: held[0]),
    "set": (lambda one: {one}, lambda held: next(iter(held))),
    "user dict": (lambda one: UserDict(a=one), lambda held: held["a"]),
    "output": (lambda one: Output(a=one), lambda held: held["a"]),
    "partial": (lambda one: functools.partial(torch.add, one), lambda held: held.args[0]),
    "module": (lambda one: [_with(nn.Identity(), one)], lambda held: held[0].held),
}


def _with(module: nn.Module, held: Any) -> nn.Module:
    module.held = held
    return module


@pytest.mark.parametrize("name", HOLDERS)
def test_a_tensor_with_a_graph_is_copied_wherever_it_is(name: str) -> None:
    """With its values, outside of the graph; that of the model stays what it was."""
    hold, take = HOLDERS[name]
    linear = nn.Linear(2, 2)
    tensor = linear(torch.ones(1, 2))
    twin = take(frozen_copy(nn.Sequential(_with(linear, hold(tensor))))[0].held)  # type: ignore[index, union-attr]
    assert torch.equal(twin, tensor)
    assert twin is not tensor
    assert twin.grad_fn is None
    assert tensor.grad_fn is not None


def test_what_copies_itself_is_not_searched() -> None:
    """A hook of the monitor's leads to the monitor, and from there to everything."""
    linear = nn.Linear(2, 2)
    held = Cache(linear(torch.ones(1, 2)))
    linear.register_forward_hook(UncopiedHook(lambda *_args: print(held)))
    linear.register_forward_hook(UncopiedHook(functools.partial(print, held)))
    assert copies_without_graph(linear) == {}
