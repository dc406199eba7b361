"""The flag that stays on a device: which step was the first with a loss or gradient that is not finite, in every dtype."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from lightning_module_monitor.model.names import Namer
from lightning_module_monitor.nonfinite.flag import MarkedSteps

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128]
BAD = [math.nan, math.inf, -math.inf]


def layers(*dtypes: torch.dtype) -> nn.Sequential:
    """A layer for each dtype."""
    return nn.Sequential(*(nn.Linear(3, 3, dtype=dtype) for dtype in dtypes))


def observe(flag: MarkedSteps, net: nn.Module, step: int, loss: Tensor | None = None) -> None:
    """A step whose gradients are those of the net."""
    flag.observe_loss(torch.tensor(1.0) if loss is None else loss)
    flag.observe_gradients(lightly=True)
    flag.mark(step)


def set_gradients(net: nn.Module, value: float = 1.0, of: str = "") -> None:
    """Large gradients, whose sums and products would overflow, of which one has another element."""
    for name, parameter in net.named_parameters():
        largest = torch.finfo(parameter.dtype).max
        parameter.grad = torch.full_like(parameter, largest)
        if name == of:
            parameter.grad.view(-1)[1] = value


def since(flag: MarkedSteps, step: int) -> float:
    """The number of steps since the first that was not finite."""
    steps = flag.steps_since(step)
    assert steps is not None
    return steps.item()


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_first_step_with_a_bad_gradient(dtype: torch.dtype, bad: float) -> None:
    """Of six steps the third and later ones; before them the largest finite numbers of the dtype are finite."""
    net = layers(dtype)
    flag = MarkedSteps(Namer().module_sites(net))
    for step in range(10, 16):
        set_gradients(net, bad if step >= 12 else 1.0, of="0.bias")
        observe(flag, net, step)
    assert since(flag, 16) == 16 - 12
    set_gradients(net)
    observe(flag, net, 16)
    assert since(flag, 17) == 0  # it began anew


@pytest.mark.parametrize("sick", range(3))
def test_the_first_of_several_dtypes(sick: int) -> None:
    """Each dtype is observed for itself; the first step of any counts."""
    net = layers(torch.float32, torch.bfloat16, torch.float64)
    flag = MarkedSteps(Namer().module_sites(net))
    for step in range(6):
        set_gradients(net, math.nan if step >= 2 + sick else 1.0, of=f"{sick}.bias")
        observe(flag, net, step)
    assert since(flag, 6) == 6 - (2 + sick)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_bad_loss(dtype: torch.dtype, bad: float) -> None:
    """Of any dtype, in the first step or the last; a step without gradients has a loss all the same."""
    net = nn.Identity()
    for sick in range(4):
        flag = MarkedSteps(Namer().module_sites(net))
        for step in range(4):
            observe(flag, net, step, torch.tensor(bad if step == sick else 1.0, dtype=dtype))
        assert since(flag, 4) == 4 - sick


def test_a_parameter_that_is_unfrozen_later() -> None:
    """Its gradients count from then on, whatever had a gradient in the first step."""
    net = layers(torch.float32, torch.float32)
    net[1].requires_grad_(requires_grad=False)
    flag = MarkedSteps(Namer().module_sites(net))
    for step in range(6):
        net[1].requires_grad_(requires_grad=step >= 2)
        for name, parameter in net.named_parameters():
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
            if step >= 4 and name == "1.bias":
                parameter.grad = torch.full_like(parameter, math.nan)
        observe(flag, net, step)
    assert since(flag, 6) == 6 - 4


def test_a_dtype_that_comes_later() -> None:
    """The steps before it count as finite."""
    net = layers(torch.float32, torch.bfloat16)
    flag = MarkedSteps(Namer().module_sites(net))
    for step in range(5):
        set_gradients(net, math.inf if step == 3 else 1.0, of="1.bias")
        if step < 2:
            net[1].bias.grad = None
        observe(flag, net, step)
    assert since(flag, 5) == 5 - 3


def test_without_any_step() -> None:
    """There is no number."""
    assert MarkedSteps(Namer().module_sites(nn.Linear(2, 2))).steps_since(3) is None
