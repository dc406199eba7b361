"""Roles from shapes, and how layers are trained from their optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_module_monitor.width_check.layers import Layer, Upstream, describe, find_units, over_widths

WIDTHS = (8, 16, 32)


def layer(make: Callable[[int], nn.Module], optimizer: Callable[[int, nn.Module], Optimizer] | None = None) -> Layer:
    """What a module is over the widths; trained with SGD if nothing else is said."""
    described = []
    for width in WIDTHS:
        module = make(width)
        optimizers = [optimizer(width, module) if optimizer is not None else SGD(module.parameters(), lr=0.1)]
        described.append(describe({"it": module}, optimizers, {"it": Upstream()})["it"])
    return over_widths(WIDTHS, described)


@pytest.mark.parametrize(
    ("make", "role"),
    [
        (lambda n: nn.Linear(3, n), "input"),
        (lambda n: nn.Linear(n, n), "hidden"),
        (lambda n: nn.Linear(n, 4 * n), "hidden"),
        (lambda n: nn.Linear(n + 2, n), "hidden"),  # something constant is concatenated
        (lambda n: nn.Linear(n, 3), "output"),
        (lambda n: nn.Linear(3, 4), "fixed"),
        (lambda n: nn.Linear(n * n, n), "unknown"),
        (lambda n: nn.Linear(3, 64 // n), "unknown"),
        (lambda n: nn.Conv2d(3, n, 5), "input"),
        (lambda n: nn.Conv2d(n, n, 5), "hidden"),
        (lambda n: nn.Conv2d(n, n, 5, groups=n), "input"),  # each output has the inputs of one channel
        (lambda n: nn.ConvTranspose2d(n, 3, 2), "output"),
        (lambda n: nn.Embedding(100, n), "input"),
        (nn.LayerNorm, "input"),
        (nn.BatchNorm2d, "input"),
        (lambda n: nn.MultiheadAttention(n, 2), "hidden"),
        (lambda n: nn.LSTM(3, n), "unknown"),  # has weights of two roles
        (lambda n: parametrizations.weight_norm(nn.Linear(n, n)), "unknown"),  # has a learned norm, whatever the fans are
        (lambda n: parametrizations.spectral_norm(nn.Linear(n, n)), "unknown"),
    ],
)
def test_role_by_the_growth_of_the_fans(make: Callable[[int], nn.Module], role: str) -> None:
    """Fan-in and fan-out grow with the width, or not; what is neither is not guessed."""
    assert layer(make).role == role


@pytest.mark.parametrize("exponent", [-1.0, 0.0, 0.5, 1.0])
def test_exponent_of_the_learning_rate(exponent: float) -> None:
    """It is read from the optimizer's groups, for matrices and vectors each."""

    def optimizer(width: int, module: nn.Module) -> Optimizer:
        return Adam([{"params": [module.weight], "lr": 0.3 * width**exponent}, {"params": [module.bias], "lr": 0.1}])

    found = layer(lambda n: nn.Linear(n, n), optimizer)
    assert found.matrix_rate == pytest.approx(exponent)
    assert found.vector_rate == 0.0


def test_exponent_of_the_learning_rate_before_its_schedule() -> None:
    """A warm-up from zero hides no learning rate."""

    def optimizer(width: int, module: nn.Module) -> Optimizer:
        one = SGD(module.parameters(), lr=1 / width)
        torch.optim.lr_scheduler.LambdaLR(one, lambda _step: 0.0)
        assert one.param_groups[0]["lr"] == 0
        return one

    assert layer(lambda n: nn.Linear(n, n), optimizer).matrix_rate == pytest.approx(-1)


def test_a_learning_rate_that_is_no_power_of_the_width() -> None:
    """It has no exponent, nor have two learning rates in one layer."""
    rates = {8: 0.1, 16: 0.1, 32: 0.05}
    assert layer(lambda n: nn.Linear(n, n), lambda n, module: SGD(module.parameters(), lr=rates[n])).matrix_rate is None
    assert layer(lambda n: nn.Linear(n, n), lambda n, module: SGD(module.parameters(), lr=0.0)).matrix_rate is None

    def two(_width: int, module: nn.Module) -> Optimizer:
        return SGD([{"params": [module.in_proj_weight], "lr": 0.1}, {"params": [module.out_proj.weight], "lr": 0.2}])

    assert layer(lambda n: nn.MultiheadAttention(n, 2), two).matrix_rate is None


def test_frozen_layers_are_not_trained() -> None:
    """Neither one without gradients, nor one that no optimizer has."""
    frozen = layer(lambda n: nn.Linear(n, n).requires_grad_(False))
    absent = layer(lambda n: nn.Linear(n, n), lambda _width, _module: SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    for one in (frozen, absent):
        assert one.matrix_rate == one.vector_rate == -math.inf
        assert not one.is_trained
    only_bias = layer(lambda n: nn.Linear(n, n), lambda _width, module: SGD([module.bias], lr=0.1))
    assert (only_bias.matrix_rate, only_bias.vector_rate, only_bias.is_trained) == (-math.inf, 0.0, True)


class Own(SGD):
    """An optimizer of the user's own, which may do anything."""


@pytest.mark.parametrize(
    ("make", "family", "decays"),
    [
        (lambda p: SGD(p, lr=0.1, momentum=0.9), "sgd", False),
        (lambda p: SGD(p, lr=0.1, weight_decay=0.1), "sgd", True),
        (lambda p: AdamW(p, lr=0.1), "entrywise", True),
        (lambda p: Adam(p, lr=0.1), "entrywise", False),
        (lambda p: Own(p, lr=0.1), None, False),
        (lambda p: torch.optim.LBFGS(p, lr=0.1), None, False),
    ],
)
def test_family_of_the_optimizer(make: Callable[[Any], Optimizer], family: str | None, decays: bool) -> None:
    """Those whose update is known are told apart; of a subclass nothing is known."""
    found = layer(lambda n: nn.Linear(n, n), lambda _width, module: make(module.parameters()))
    assert (found.optimizer, found.has_weight_decay) == (family, decays)


def test_layers_are_modules_that_own_weights() -> None:
    """MultiheadAttention is one layer with its projection; containers are none; a shared one counts once, a tied weight is said."""
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2), "block": nn.Sequential(nn.Linear(4, 4), nn.ReLU())})
    model["again"] = model["block"][0]
    model["tied"] = nn.Linear(4, 4, bias=False)
    model["tied"].weight = model["block"][0].weight
    units = find_units(model)
    assert list(units) == ["attention", "block.0", "tied"]
    described = describe(units, [SGD(model.parameters(), lr=0.1)], {})
    assert {name: one.is_shared for name, one in described.items()} == {"attention": False, "block.0": True, "tied": True}
