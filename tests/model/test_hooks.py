"""Hooks that an owner puts on and takes off."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
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


def test_no_hook_takes_the_place_of_another() -> None:
    """Two sets, one set twice, and handles of torch's that are made in between."""
    module, called = nn.Identity(), []
    first, second = HookSet(), HookSet()
    for number, hooks in enumerate((first, second, first)):
        hooks.add_forward(module, UncopiedHook(lambda *_args, number=number: called.append(number)))
        module.register_forward_hook(lambda *_args, number=number: called.append(10 + number))
    module(torch.ones(1))
    assert called == [0, 10, 1, 11, 2, 12]
    first.close()
    called.clear()
    module(torch.ones(1))
    assert called == [10, 1, 11, 12]
    second.close()
    assert len(module._forward_hooks) == 3


@pytest.mark.parametrize("before", ["nothing", "a hook", "a class that registers hooks its own way"])
def test_hooks_of_many_modules_do_not_mix(before: str) -> None:
    """Each is called with its own module, among those of others, and all are taken off together."""

    class Counting(nn.Identity):
        num_registered = 0

        def register_forward_hook(self, *args: Any, **options: Any) -> Any:
            self.num_registered += 1
            return super().register_forward_hook(*args, **options)

    other_calls, called, hooks = [], [], HookSet()
    modules = [nn.Identity(), nn.ReLU(), Counting() if before.startswith("a class") else nn.Identity()]
    for module in modules:
        module.register_forward_hook(lambda module, _args, _output: other_calls.append(module))
    if before == "a hook":
        hooks.add_forward(modules[1], UncopiedHook(lambda *_args: called.append("alone")))
    functions = [UncopiedHook(lambda module, _args, _output, index=index: called.append((index, module))) for index in range(3)]
    for module, function in zip(modules, functions, strict=True):
        hooks.add_forward(module, function)
    x = nn.Sequential(*modules)(torch.ones(1))
    expected = [(index, module) for index, module in enumerate(modules)]
    assert called == (expected if before != "a hook" else [expected[0], "alone", *expected[1:]])
    assert other_calls == modules
    assert len(hooks) == (4 if before == "a hook" else 3)
    assert [module.num_registered for module in modules if isinstance(module, Counting)] == [2] * before.startswith("a class")
    hooks.close()
    nn.Sequential(*modules)(x)
    assert len(called) == (4 if before == "a hook" else 3)
    assert all(len(module._forward_hooks) == 1 for module in modules)


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
