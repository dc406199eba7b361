"""Hooks on modules while torch compiles: they are away, and back in their places afterwards."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from helpers.compiling import CountingBackend
from torch import Tensor, nn

from lightning_module_monitor.model.compiled import CallHook, compiled_parts
from lightning_module_monitor.model.hooks import HookSet, UncopiedHook

# Importing torch's compiler calls what torch 2.13 has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_hooks_are_away_while_torch_compiles_and_keep_their_order() -> None:
    """Those of others stay where they are, also between ours; one that is closed meanwhile does not come back."""
    layer, calls, during = nn.Linear(2, 2), list[str](), list[int]()
    ours, closed = HookSet(), HookSet()

    def note(name: str) -> UncopiedHook:
        return UncopiedHook(lambda *_call: calls.append(name))

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Any:
        during.append(len(layer._forward_hooks))
        closed.close()
        return graph.forward

    ours.add_forward(layer, note("first"), with_kwargs=True)
    layer.register_forward_hook(lambda *_call: calls.append("of others"))
    closed.add_forward(layer, note("closed"))
    ours.add_forward(layer, note("last"), always_call=True)
    torch.compile(lambda x: x * 2, backend=backend)(torch.ones(2))
    assert during == [1]
    layer(torch.ones(2))
    assert calls == ["first", "of others", "last"]
    ours.close()
    assert (len(layer._forward_hooks), len(layer._forward_hooks_with_kwargs), len(layer._forward_hooks_always_called)) == (1, 0, 0)


@pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="torch before 2.6 runs hooks inside of compiled functions")
@pytest.mark.parametrize("fullgraph", [False, True])
def test_hooks_inside_a_compiled_function_change_nothing_in_it(fullgraph: bool) -> None:
    """On every module, in every other call, with every option: one compilation."""
    model, backend, calls = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), CountingBackend(), list[Any]()
    run = torch.compile(lambda x: model(x) + 1, backend=backend, fullgraph=fullgraph)
    for number in range(6):
        hooks = HookSet()
        for module in model.modules() if number % 2 == 0 else ():
            hooks.add_forward(module, UncopiedHook(calls.append), with_kwargs=True, always_call=True)
            hooks.add_forward(module, UncopiedHook(calls.append), with_kwargs=True, is_before=True)
        run(torch.ones(3, 2))
        hooks.close()
    assert backend.counts == (1, 6)
    assert calls == []


def test_hooks_of_the_compiled_call_come_off_in_any_order() -> None:
    """Around a layer of torch's own, which torch compiles as often as without; they are found to be compiled, and no copy has them."""
    layer, backend, calls = nn.LayerNorm(2), CountingBackend(), list[str]()
    layer.compile(backend=backend)
    plain = CountingBackend()
    without = nn.LayerNorm(2)
    without.compile(backend=plain)
    without(torch.ones(2, 2))
    before = layer._compiled_call_impl
    first, second = (CallHook(layer, partial(calls.append, f"+{name}"), partial(calls.append, f"-{name}")) for name in "ab")
    layer(torch.ones(2, 2))
    assert calls == ["+b", "+a", "-a", "-b"]
    assert compiled_parts(layer).unhooked == {layer}
    assert copy.deepcopy(layer)._compiled_call_impl is None
    first.remove()
    second.remove()
    assert layer._compiled_call_impl is before
    assert backend.counts == plain.counts  # torch before 2.14 compiles no layer of its own
