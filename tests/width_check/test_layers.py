"""Roles from shapes, and which layers are trained."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import SGD, Optimizer

from lightning_module_monitor.width_check.layers import Layer, describe, over_widths

WIDTHS = (8, 16, 32)


def layer(make: Callable[[int], nn.Module], optimizer: Callable[[nn.Module], Optimizer] | None = None) -> Layer:
    """A module over the widths, trained with SGD by default."""
    described = []
    for width in WIDTHS:
        root = nn.Sequential(make(width))
        optimizers = [optimizer(root[0]) if optimizer is not None else SGD(root.parameters(), lr=0.1)]
        described.append(describe(root, optimizers)["0"])
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


def test_frozen_layers_are_not_trained() -> None:
    """Neither a layer without gradients, nor one that no optimizer has."""
    assert layer(lambda n: nn.Linear(n, n)).is_trained
    assert not layer(lambda n: nn.Linear(n, n).requires_grad_(False)).is_trained
    assert not layer(lambda n: nn.Linear(n, n), lambda _module: SGD([nn.Parameter(torch.ones(1))], lr=0.1)).is_trained
    assert layer(lambda n: nn.Linear(n, n), lambda module: SGD([module.bias], lr=0.1)).is_trained


def test_layers_are_modules_that_own_weights() -> None:
    """MultiheadAttention is one layer with its projection; containers are none; a shared one counts once; a tied weight is in two."""
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2), "block": nn.Sequential(nn.Linear(4, 4), nn.ReLU())})
    model["again"] = model["block"][0]
    model["tied"] = nn.Linear(4, 4, bias=False)
    model["tied"].weight = model["block"][0].weight
    described = describe(model, [SGD([model["tied"].weight], lr=0.1)])
    assert {name: at_width.is_trained for name, at_width in described.items()} == {"attention": False, "block.0": True, "tied": True}


def test_a_layer_around_layers_counts_its_own_weights_only() -> None:
    """A module with a weight beside its layers is trained where this weight is."""
    block = nn.Module()
    block.scale = nn.Parameter(torch.ones(1))
    block.fc = nn.Linear(2, 2)
    model = nn.ModuleDict({"block": block})
    described = describe(model, [SGD(block.fc.parameters(), lr=0.1)])
    assert {name: at_width.is_trained for name, at_width in described.items()} == {"block": False, "block.fc": True}
