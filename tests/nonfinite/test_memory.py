"""What a monitored step keeps in memory while its backward pass runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from helpers.accelerator import as_accelerator
from helpers.lightning_package import Callback
from helpers.training import Classifier, loader, trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_module_monitor import GradientFlow, Health, ModuleMonitorCallback


class Watched(Classifier):
    """Has a weak reference to its logits: the loss keeps their logarithms of probabilities, and not them."""

    logits: weakref.ref[Tensor]

    def loss(self, batch: list[Tensor]) -> Tensor:
        logits = self.model(batch[0])
        self.logits = weakref.ref(logits)
        return F.cross_entropy(logits, batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        return self.loss(batch)


class WatchedByHand(Watched):
    """Manual optimization, where no step can be run again: a probe observes it."""

    def __init__(self, model: str | nn.Module) -> None:
        super().__init__(model, torch.optim.SGD, lr=0.1)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class AreAlive(Callback):
    """Whether the logits of each backward pass are in memory when it begins."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def on_before_backward(self, _trainer: object, module: Watched, _loss: Tensor) -> None:  # type: ignore[override]  # of this module
        self.found.append(module.logits() is not None)


@pytest.mark.parametrize("is_on_accelerator", [False, True], ids=["host", "accelerator"])
@pytest.mark.parametrize("nonfinite", ["ignore", "warn", "always", "stop"])
@pytest.mark.parametrize("kind", [Watched, WatchedByHand])
def test_the_last_output_is_released_before_the_backward_pass(
    kind: Callable[[str], Watched], nonfinite: str, is_on_accelerator: bool, tmp_path: Path
) -> None:
    """The logits of a language model are its largest tensor; in monitored steps, others, and those with gradient flow."""
    flow = GradientFlow(blocks="model.layers.[02]")
    callback = ModuleMonitorCallback(2, health=Health(nonfinite=nonfinite), gradient_flow=flow, on_error="raise")
    are_alive = AreAlive()
    with as_accelerator() if is_on_accelerator else nullcontext():
        trainer(tmp_path, [callback, are_alive], limit_val_batches=0, max_steps=4, accumulate_grad_batches=1).fit(
            kind("mlp"), loader(), loader(8)
        )
    assert are_alive.found == [False] * 4
