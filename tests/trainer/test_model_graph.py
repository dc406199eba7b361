"""What the graph of a loss shows of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_module_monitor.trainer import model_graph as module
from lightning_module_monitor.trainer.loss_facts import LossReader
from lightning_module_monitor.trainer.model_graph import read_model

X = torch.randn(8, 10)


def mlp(sizes: Sequence[int], activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with activations between."""
    layers = [part for one, other in pairwise(sizes) for part in (nn.Linear(one, other), activation())]
    return nn.Sequential(*layers[:-1])


class Product(nn.Module):
    """The product of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(10, 4), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) * self.other(x)


def _convolutions(activation: nn.Module) -> nn.Module:
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 10)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), activation, nn.AvgPool1d(2)),
        *(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 4)),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "one layer": (lambda: nn.Linear(10, 4), False),
    "two layers": (lambda: mlp((10, 8, 4), nn.Identity), True),
    "of tokens": (lambda: nn.Sequential(nn.Unflatten(1, (2, 5)), nn.Linear(5, 5), nn.Linear(5, 2), nn.Flatten()), True),
    "without biases": (lambda: nn.Sequential(nn.Linear(10, 8, bias=False), nn.Linear(8, 4, bias=False)), True),
    "a slope of 1": (lambda: mlp((10, 8, 4), lambda: nn.LeakyReLU(1.0)), True),
    "a slope of 0.01": (lambda: mlp((10, 8, 4), nn.LeakyReLU), False),
    "ReLU": (lambda: mlp((10, 8, 4)), False),
    "one activation among layers": (lambda: nn.Sequential(mlp((10, 8, 8, 8), nn.Identity), nn.GELU(), nn.Linear(8, 4)), False),
    "a product of outputs": (lambda: nn.Sequential(nn.Linear(10, 10), Product()), False),
    "an activation behind": (lambda: nn.Sequential(mlp((10, 8, 4), nn.Identity), nn.Softmax(-1)), True),
    "convolutions": (lambda: _convolutions(nn.Identity()), True),
    "convolutions and an activation": (lambda: _convolutions(nn.ReLU()), False),
    "a residual": (lambda: nn.Sequential(nn.Linear(10, 10), Residual(), nn.Linear(10, 4)), True),
}


class Residual(nn.Module):
    """A linear branch, weighted by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * self.branch(x)


@pytest.mark.parametrize("name", MODELS)
def test_models_that_are_linear(name: str) -> None:
    """Layers behind each other, and nothing but linear functions between; what the loss does to the outputs does not count."""
    make, expected = MODELS[name]
    model = make()
    loss = F.cross_entropy(model(X), torch.zeros(8, dtype=torch.long))
    assert read_model(loss).is_linear is expected
    parts = [*model.modules()]
    if expected and all(isinstance(part, nn.Linear | nn.Sequential | nn.Identity) for part in parts):  # it is one, by superposition
        zero = model(torch.zeros_like(X))
        assert torch.allclose(model(2 * X) - zero, 2 * (model(X) - zero), atol=1e-5)


def test_weights() -> None:
    """The leaves that multiply an input; an input that is a leaf is none, nor a bias."""
    model = _convolutions(nn.ReLU())
    x = torch.randn(8, 10, requires_grad=True)
    found = read_model(model(x).sum()).weights
    expected = [parameter for name, parameter in model.named_parameters() if name in ("1.weight", "7.weight")]
    assert {*map(id, found)} == {*map(id, expected)}


def test_of_large_models_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor of one that is computed again in the backward pass."""
    model = mlp((10, 8, 4), nn.Identity)
    hidden = checkpoint(model, X.clone().requires_grad_(), use_reentrant=True)
    assert read_model(hidden.sum()) == (False, [])
    monkeypatch.setattr(module, "MAX_NODES_OF_MODEL", 5)
    assert read_model(model(X).sum()) == (False, ())


@pytest.mark.parametrize(("known", "expected"), [("all", 0), ("the first", 2), ("none", 0)])
def test_weights_that_are_not_registered(known: str, expected: int) -> None:
    """Counted if some are: a strategy that shards puts its own tensors in the places of all."""
    model = mlp((10, 8, 8, 4))
    registered = {"all": [*model.parameters()], "the first": [model[0].weight], "none": []}[known]
    reader = LossReader(lambda weights: sum(any(weight is one for one in registered) for weight in weights))
    facts, _num_targets = reader.read(F.cross_entropy(model(X), torch.zeros(8, dtype=torch.long)), is_scaled=False)
    assert facts.num_unregistered == expected
