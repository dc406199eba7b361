"""Outputs of modules, and the gradients that arrive at them."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.plain_steps import record_of
from torch import Tensor, nn

from lightning_module_monitor import ModuleMonitor, Rule


class GivesMemoryBack(nn.Module):
    """Replaces the gradient of its output by one without memory, until another hook restores it."""

    def forward(self, x: Tensor) -> Tensor:
        output = 2 * x
        output.register_hook(self.released)
        return output

    def released(self, gradient: Tensor) -> Tensor:
        self.gradient, other = gradient, gradient.clone()
        other.untyped_storage().resize_(0)
        return other


@pytest.mark.parametrize("kind", ["rule", "gradient flow"])
def test_a_gradient_that_cannot_be_read_is_an_error_of_its_own(kind: str) -> None:
    """It is NaN and counted, other values are right, and the backward pass goes on: its result is what it is without the monitor."""
    odd = GivesMemoryBack()
    model = nn.Sequential(odd, nn.Tanh())
    if kind == "rule":
        monitor = ModuleMonitor(rules=[Rule(kinds="activation_gradient", statistics="norm")])
    else:
        monitor = ModuleMonitor(gradient_flow={"blocks": ["0", "1"]})
    monitor.set_module(model)
    x = torch.tensor([0.5, -1.0], requires_grad=True)
    monitor.begin_step(0)
    monitor.begin_backward(scale=4.0)
    middle = odd(x)
    middle.register_hook(lambda _gradient: odd.gradient)
    (4.0 * model[1](middle).sum()).backward()
    monitor.end_backward()
    record = record_of(monitor)
    expected = 4.0 * 2.0 * (1 - torch.tanh(torch.tensor([1.0, -2.0])) ** 2)
    assert x.grad is not None
    assert torch.allclose(x.grad, expected)
    assert record.values["monitor/errors"] == 1
    if kind == "rule":
        assert math.isnan(record.values["activation_gradient/0/norm"])
        assert record.values["activation_gradient/1/norm"] == pytest.approx(math.sqrt(2))
    else:
        assert math.isnan(record.values["gradient_flow/0-1/gain"])


class LateHead(nn.Module):
    """Its lazy layer runs from the second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.num_calls = nn.Linear(2, 3), nn.LazyLinear(4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return self.body(x) if self.num_calls == 1 else self.head(self.body(x))


def test_a_lazy_module_that_first_runs_late_has_its_size_and_shape_then() -> None:
    """Before it has run, it has no parameters with a size."""
    model = LateHead()
    descriptions = []
    with ModuleMonitor(rules=[Rule(kinds="activation", statistics="norm")]) as monitor:
        monitor.set_module(model)
        for step in range(3):
            monitor.begin_step(step)
            model(torch.randn(5, 2))
            descriptions.append(record_of(monitor).modules)
    sizes = [{info.name: (info.num_parameters, info.output_shape) for info in modules} for modules in descriptions]
    assert sizes[0] == {"_root_": (9, (5, 3)), "body": (9, (5, 3)), "head": (0, None)}
    assert sizes[1] == {"_root_": (25, (5, 3)), "body": (9, (5, 3)), "head": (16, (5, 4))}
    assert descriptions[2] is descriptions[1], "the same object until more is known"
