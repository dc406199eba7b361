"""Hooks on modules while torch compiles: they are away, and back in their places afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.compiling import CountingBackend
from torch import Tensor, nn

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
            hooks.add_forward_pre(module, UncopiedHook(calls.append), with_kwargs=True)
        run(torch.ones(3, 2))
        hooks.close()
    assert backend.counts == (1, 6)
    assert calls == []
