"""What of a model is compiled, however it was; nothing is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.compiling import Block, Net
from torch import Tensor, nn

from lightning_module_monitor.model.compiled import compiled_parts

# Importing torch's compiler calls what torch 2.13 has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
GLOBAL = nn.Linear(2, 2)


class Decorated(Block):
    """Its forward is compiled for every instance."""

    @torch.compile(backend="eager")
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Overridden(Decorated):
    """Its own forward is not."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def held(model: Net, value: Any) -> Net:
    """A model with an attribute."""
    model.held = value
    return model


def in_place(model: Net) -> Net:
    """Torch compiles none of its own classes in place, but the modules within."""
    model.head = nn.Sequential(Block(), nn.Linear(8, 3))  # type: ignore[assignment]
    model.head.compile(backend="eager")
    return model


def compiled(function: Callable[..., Any]) -> Any:
    """Of a function, compiled."""
    return torch.compile(function, backend="eager")


def with_block(model: Net, block: nn.Module) -> Net:
    """In place of the second block."""
    model.blocks[1] = block
    return model


OF_BLOCK = {"blocks.1.norm", "blocks.1.fc", "blocks.1.dropout"}


@pytest.mark.parametrize(
    ("change", "outermost", "inside", "names"),
    [
        (lambda model: model, set(), set(), ()),
        (lambda model: with_block(model, Decorated()), {"blocks.1"}, OF_BLOCK, ("blocks.1",)),
        (lambda model: with_block(model, Overridden()), set(), set(), ()),
        (lambda model: held(model, torch.compiler.disable(model.head.forward)), set(), set(), ()),
        (lambda model: held(model, compiled(torch.relu)), set(), set(), ("held",)),
        (lambda model: held(model, compiled(lambda x: GLOBAL(x) + 1)), set(), set(), ("held",)),
        (lambda model: held(model, compiled(model.head.forward)), set(), {"head"}, ("held",)),
        (lambda model: held(model, [compiled(model.blocks[1])]), set(), {"blocks.1", *OF_BLOCK}, ("held",)),
        (
            lambda model: held(model, {"one": compiled(lambda x, block=model.blocks[1]: block(x))}),
            set(),
            {"blocks.1", *OF_BLOCK},
            ("held",),
        ),
        (in_place, set(), {"head", "head.0", "head.0.norm", "head.0.fc", "head.0.dropout", "head.1"}, ("head",)),
    ],
)
def test_parts(change: Callable[[Net], Net], outermost: set[str], inside: set[str], names: tuple[str, ...]) -> None:
    """The outermost compiled modules, those inside, and the names for the log."""
    model = change(Net())
    parts, by_module = compiled_parts(model), {module: name for name, module in model.named_modules()}
    assert {by_module[module] for module in parts.outermost} == outermost
    assert {by_module[module] for module in parts.inside if module in by_module} == inside
    assert parts.names == names


def test_a_compiled_wrapper_around_the_model_has_everything_inside() -> None:
    """As a strategy's, which the model does not know."""
    model = Net()
    wrapper = nn.Sequential(model)
    wrapper.forward = torch.compile(wrapper.forward, backend="eager")  # type: ignore[method-assign]
    assert not compiled_parts(model).inside
    assert set(model.modules()) <= compiled_parts(model, wrapper).inside
