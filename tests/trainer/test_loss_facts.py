"""What the graph of a loss shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.graphs import needs_node_shapes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_module_monitor.trainer.loss_facts import LossFacts, LossReader

LABELS = torch.zeros(4, dtype=torch.long)
OF_PIXELS = torch.zeros(4, 5, dtype=torch.long)
LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "a cross-entropy": (lambda x: F.cross_entropy(x[..., 0], LABELS), 10),
    "of pixels": (lambda x: F.cross_entropy(x, OF_PIXELS), 10),
    "of tokens": (lambda x: F.nll_loss(F.log_softmax(x.transpose(1, 2), -1).flatten(0, 1), OF_PIXELS.flatten()), 10),
    "in bfloat16": (lambda x: F.cross_entropy(x.bfloat16().float(), OF_PIXELS), 10),
    "in a checkpoint": (lambda x: checkpoint(F.cross_entropy, x, OF_PIXELS, use_reentrant=False), 10),
    "a sum": (lambda x: F.cross_entropy(x, OF_PIXELS, reduction="sum"), 0),
    "with a factor": (lambda x: 2 * F.cross_entropy(x, OF_PIXELS), 0),
    "with another loss": (lambda x: F.cross_entropy(x, OF_PIXELS) + x.square().mean(), 0),
    "a regression": (lambda x: x.square().mean(), 0),
    "a leaf": (lambda _x: torch.zeros((), requires_grad=True), 0),
}


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_the_number_of_classes(name: str, is_scaled: bool) -> None:
    """Of a loss that is the mean of a cross-entropy and nothing else, as the trainer differentiates it; the backward pass is as before."""
    make, expected = LOSSES[name]
    if expected:
        needs_node_shapes()
    x = torch.randn(4, 10, 5, requires_grad=True)
    loss = make(x) / 1
    loss = loss * torch.tensor(8.0) if is_scaled else loss
    facts, _num_targets = LossReader(len).read(loss, is_scaled=is_scaled)
    assert facts.num_classes == expected
    assert facts.softmax_twice is False
    loss.backward()


def read(loss: Tensor) -> tuple[LossFacts, int]:
    """The facts of a loss that the Trainer has divided by its number of micro-batches, and the number of its targets."""
    return LossReader(len).read(loss / 1, is_scaled=False)


TARGETS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "a cross-entropy": (lambda x: F.cross_entropy(x[..., 0], LABELS), 4),
    "of pixels": (lambda x: F.cross_entropy(x, OF_PIXELS), 20),
    "a sum": (lambda x: F.cross_entropy(x, OF_PIXELS, reduction="sum"), 20),
    "with another loss": (lambda x: F.cross_entropy(x[..., 0], LABELS) + x.square().mean(), 4),
    "of two classes": (lambda x: F.binary_cross_entropy_with_logits(x[:, 0, 0], LABELS.float()), 4),
    "a regression": (lambda x: F.mse_loss(x[:, 0, 0], LABELS.float()), 0),
}


@pytest.mark.parametrize("name", TARGETS)
def test_the_number_of_targets(name: str) -> None:
    """Of a cross-entropy, also beside another loss."""
    needs_node_shapes()
    make, expected = TARGETS[name]
    assert read(make(torch.randn(4, 10, 5, requires_grad=True)))[1] == expected


SUMS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "a sum": (lambda x: F.cross_entropy(x[..., 0], LABELS, reduction="sum"), True),
    "the sum of losses": (lambda x: F.cross_entropy(x[..., 0], LABELS, reduction="none").sum(), True),
    "a sum of squares": (lambda x: F.mse_loss(x, torch.zeros_like(x), reduction="sum"), True),
    "a sum, divided by the number of samples": (lambda x: F.cross_entropy(x[..., 0], LABELS, reduction="sum") / 4, False),
    "a mean": (lambda x: F.cross_entropy(x[..., 0], LABELS), False),
    "the sum of two means": (lambda x: F.cross_entropy(x[..., 0], LABELS) + x.square().mean(), False),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_over_samples(name: str) -> None:
    """And not a sum of losses, nor one that is divided."""
    make, expected = SUMS[name]
    assert read(make(torch.randn(4, 10, 5, requires_grad=True)))[0].is_summed is expected


COLUMN, ROW = torch.ones(4, 1), torch.ones(4)
BROADCASTS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "squares": (lambda x: F.mse_loss(x, ROW), True),
    "magnitudes": (lambda x: F.l1_loss(x, ROW), True),
    "smooth": (lambda x: F.smooth_l1_loss(x, ROW), True),
    "by hand": (lambda x: (x - ROW).square().mean(), True),
    "by hand, the target first": (lambda x: ((ROW - x) ** 2).mean(), True),
    "a norm": (lambda x: (x - ROW).norm(), True),
    "a quantile": (lambda x: torch.max(0.9 * (ROW - x), -0.1 * (ROW - x)).mean(), True),
    "by parts": (lambda x: torch.where((x - ROW).abs() < 1, (x - ROW) ** 2, (x - ROW).abs()).mean(), True),
    "of a mask": (lambda x: ((x - ROW) ** 2)[torch.eye(4) > 0].mean(), True),
    "the logarithm of cosh": (lambda x: (F.softplus(2 * (x - ROW)) - (x - ROW)).mean(), True),
    "a column": (lambda x: F.mse_loss(x, COLUMN), False),
    "rows": (lambda x: F.mse_loss(x[:, 0], ROW), False),
    "of all pairs, on purpose": (lambda x: (x - x[:, 0]).square().mean(), False),
    "several outputs, one target": (lambda x: F.mse_loss(x.expand(4, 3), COLUMN), False),
    "inside of the model": (lambda x: F.mse_loss(torch.exp(-((x - ROW) ** 2)) @ COLUMN, COLUMN), False),
    "the nearest targets, on purpose": (lambda x: (x - ROW).abs().amin(1).mean(), False),
    "kernels of all pairs, on purpose": (lambda x: -torch.exp(-((x - ROW) ** 2)).mean(), False),
    "before a normalization": (lambda x: F.layer_norm((x - ROW) ** 2, (4,)).mean(), False),
}


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
@pytest.mark.parametrize("name", BROADCASTS)
def test_outputs_that_are_compared_with_all_targets(name: str) -> None:
    """Shapes (N, 1) and (N,) give (N, N)."""
    needs_node_shapes()
    make, expected = BROADCASTS[name]
    assert read(make(torch.randn(4, 1, requires_grad=True)))[0].is_broadcast is expected


class Encoder(nn.Module):
    """Two heads on one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mean, self.spread = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.layer(x))
        return self.mean(h), self.spread(h)


X, Y = torch.randn(4, 3), torch.randn(4, 3)
COMPARISONS: dict[str, tuple[Callable[[Encoder], Tensor], bool]] = {
    "the cosine of two views": (lambda model: -F.cosine_similarity(model(X)[0], model(Y)[0]).mean(), True),
    "the distance of two views": (lambda model: F.mse_loss(model(X)[0], model(Y)[0]), True),
    "their product": (lambda model: 2 - 2 * (model(X)[0] * model(Y)[0]).sum(1).mean(), True),
    "a view that is stopped": (lambda model: F.mse_loss(model(X)[0], model(Y)[0].detach()), False),
    "two heads of one call": (lambda model: _likelihood(*model(X)), False),
    "a view against others": (lambda model: F.cross_entropy(model(X)[0] @ model(Y)[0].T, torch.arange(4)), False),
    "a regression": (lambda model: F.mse_loss(model(X)[0], Y[:, :2]), False),
    "a penalty": (lambda model: F.mse_loss(model(X)[0], Y[:, :2]) + (model.mean.weight * model.mean.weight).sum(), False),
}


def _likelihood(mean: Tensor, spread: Tensor) -> Tensor:
    return ((Y[:, :2] - mean).square() * torch.exp(-spread) + spread).mean()


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_loss_that_compares_two_outputs(name: str) -> None:
    """Of two calls of one network, and not of two heads of one call."""
    make, expected = COMPARISONS[name]
    assert read(make(Encoder()))[0].compares_outputs is expected
