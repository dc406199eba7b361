"""Hooks that an owner puts on and takes off."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from lightning_module_monitor.model.hooks import HookSet, UncopiedHook


def test_a_forward_hook_is_called_among_the_users_and_taken_off_alone() -> None:
    """In the order in which they were put on; with the module, its arguments, and what it and hooks before have returned."""
    module, called = nn.Linear(2, 2), []
    first = module.register_forward_hook(lambda _module, _args, output: (called.append("first"), output + 1)[1])
    hooks = HookSet()

    def ours(of: nn.Module, args: Any, output: Tensor) -> None:
        called.append("ours")
        assert of is module
        assert torch.equal(output, nn.functional.linear(args[0], module.weight, module.bias) + 1)

    hooks.add_forward(module, UncopiedHook(ours))
    module.register_forward_hook(lambda *_args: called.append("last"))
    module(torch.ones(1, 2))
    assert called == ["first", "ours", "last"]
    assert len(hooks) == 1
    hooks.close()
    hooks.close()
    called.clear()
    module(torch.ones(1, 2))
    assert called == ["first", "last"]
    first.remove()
    assert len(module._forward_hooks) == 1


def test_a_hook_may_see_keyword_arguments_too() -> None:
    """As it may by torch's way, and nothing of it is left."""

    class Scaled(nn.Module):
        def forward(self, x: Tensor, *, by: float) -> Tensor:
            return x * by

    module, called, hooks = Scaled(), [], HookSet()
    hooks.add_forward(module, UncopiedHook(lambda *args: called.append(args[1:])), with_kwargs=True)
    hooks.add_forward(module, UncopiedHook(lambda *args: called.append(args[1:])))
    x = torch.ones(1)
    output = module(x, by=2.0)
    assert called == [((x,), {"by": 2.0}, output), ((x,), output)]
    assert len(hooks) == 2
    hooks.close()
    module(x, by=2.0)
    assert len(called) == 2
    assert not module._forward_hooks
    assert not module._forward_hooks_with_kwargs


def test_a_set_is_used_again_after_it_was_closed() -> None:
    """What the user has done to the hooks of a module in between does no harm."""
    module, called, hooks = nn.Identity(), [], HookSet()
    for _time in range(3):
        hooks.add_forward(module, UncopiedHook(lambda *_args: called.append(1)))
        module(torch.ones(1))
        copy.deepcopy(module)(torch.ones(1))
        module._forward_hooks.clear()
        hooks.close()
    module(torch.ones(1))
    assert called == [1, 1, 1]


def test_hooks_that_the_user_restores_are_without_ours() -> None:
    """User code runs a module without its hooks while the step ends, and restores all of them."""
    module, hooks = nn.Identity(), HookSet()
    module.register_forward_hook(lambda *_args: None)
    hooks.add_forward(module, UncopiedHook(lambda *_args: None))
    aside, module._forward_hooks = module._forward_hooks, OrderedDict()
    hooks.close()
    module._forward_hooks = aside
    assert len(module._forward_hooks) == 1


def test_a_module_that_registers_hooks_its_own_way_is_left_to_it() -> None:
    """One that forwards them to the module that it wraps, say."""

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()

        def register_forward_hook(self, *args: Any, **options: Any) -> Any:
            return self.inner.register_forward_hook(*args, **options)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + 1  # type: ignore[no-any-return]  # a module's result

    module, outputs, hooks = Wrapper(), [], HookSet()
    hooks.add_forward(module, UncopiedHook(lambda _module, _args, output: outputs.append(float(output))))
    assert float(module(torch.zeros(1))) == 1
    hooks.close()
    module(torch.zeros(1))
    assert outputs == [0.0]
