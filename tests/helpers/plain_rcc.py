"""The refined coordinate check of linear layers, in float64 and by the formula: the truth that ours is compared with."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from helpers.lightning_package import Callback, LightningModule, Trainer
from lightning_module_monitor import Record


class PlainCoordinateCheck(Callback):
    """Measures the Linear layers of a module after so many steps, as it is about to train on the next batch.

    Args:
        steps: Number of optimizer steps before the measurement.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.last_record: Record | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.reference = copy.deepcopy(pl_module).double()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.steps:
            module = copy.deepcopy(pl_module).double()
            now, then = inputs_of_linear_layers(module, batch[0].double()), inputs_of_linear_layers(self.reference, batch[0].double())
            values: dict[str, float] = {}
            for name, x in now.items():
                values |= terms(name, module.get_submodule(name), self.reference.get_submodule(name), x, then[name])
            self.last_record = Record.of(self.steps, values)


@torch.no_grad()
def inputs_of_linear_layers(module: LightningModule, batch: Tensor) -> dict[str, Tensor]:
    """Input of each Linear layer by name."""
    inputs: dict[str, Tensor] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(lambda _layer, args, name=name: inputs.__setitem__(name, args[0]))
    module(batch)
    return inputs


@torch.no_grad()
def terms(name: str, layer: Any, reference: Any, x: Tensor, x0: Tensor) -> dict[str, float]:
    """Root mean squares of the two terms, and their alignments."""
    change, old = layer.weight - reference.weight, reference.weight
    effective, propagating = x @ change.T, (x - x0) @ old.T
    bias = layer.bias - reference.bias if layer.bias is not None else torch.zeros(())

    def alignment(term: Tensor, weight: Tensor, input_: Tensor) -> float:
        return float(term.norm() / (torch.linalg.matrix_norm(weight.nan_to_num(), 2) * input_.norm()))

    return {
        f"rcc_effective_update/{name}/rms": float((effective + bias).pow(2).mean().sqrt()),
        f"rcc_propagating_update/{name}/rms": float(propagating.pow(2).mean().sqrt()),
        f"rcc_alignment/{name}/effective": alignment(effective, change, x),
        f"rcc_alignment/{name}/propagating": alignment(propagating, old, x - x0),
    }
