"""What the graph of a loss shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_module_monitor.trainer.facts_reader import LossReader

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
    if expected and not hasattr(torch.ones(2, requires_grad=True).exp().grad_fn, "_input_metadata"):
        pytest.skip(f"nodes of the graph have no shapes in torch {torch.__version__}")
    x = torch.randn(4, 10, 5, requires_grad=True)
    loss = make(x) / 1
    loss = loss * torch.tensor(8.0) if is_scaled else loss
    facts = LossReader().read(loss, is_scaled=is_scaled)
    assert facts.num_classes == expected
    assert facts.softmax_twice is False
    loss.backward()
