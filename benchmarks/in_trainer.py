"""What observes a step of Lightning's Trainer: our callback, the floor, and torch-module-monitor as its README uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn

from lanes import Parts
from lightning_module_monitor import GradientFlow, ModuleMonitorCallback, Rule
from lightning_module_monitor.kernels.moments import Need
from lightning_module_monitor.statistics.registry import STATISTICS, Statistic
from observers import Floor, Observer, TorchModuleMonitor, seven_statistics

NEVER = 1_000_000_000
"""A cadence of which a run only reaches step 0, which is before the timed steps."""


def nothing(_folder: Path) -> Parts:
    """The Trainer alone."""
    return Parts([])


def callback(_folder: Path) -> Parts:
    """The callback and its store."""
    return Parts([ModuleMonitorCallback(every_n_steps=1, rules=[seven_statistics()])])


def callback_logged(folder: Path) -> Parts:
    """The callback, its store, and a TensorBoard logger."""
    return Parts(callback(folder).callbacks, TensorBoardLogger(folder))


def defaults(_folder: Path, every_n_steps: int) -> Parts:
    """The callback with default arguments other than the cadence, and its store."""
    return Parts([ModuleMonitorCallback(every_n_steps)])


def defaults_logged(folder: Path, every_n_steps: int) -> Parts:
    """The same, and a TensorBoard logger."""
    return Parts(defaults(folder, every_n_steps).callbacks, TensorBoardLogger(folder))


MOMENTS = [
    name
    for name, statistic in STATISTICS.items()
    if isinstance(statistic, Statistic) and not (statistic.needs & Need.FINE_COUNTS or statistic.relative or statistic.compared_with)
]
"""Statistics of a single tensor that are made of its moments."""


def everything(_folder: Path) -> Parts:
    """The callback with all kinds that need no micro-batches, at every step."""
    kinds = ["activation", "activation_gradient", "parameter", "gradient", "gradient_before_clip", "update", "optimizer_state"]
    differences = ["activation_difference", "parameter_difference"]
    rules = [
        Rule(kinds=[*kinds, *differences], statistics=MOMENTS),
        Rule(kinds=["update", *differences], statistics="ratio"),
        Rule(kinds=differences, statistics="cosine"),
        Rule(kinds=["update", "optimizer_state"], statistics="cosine_to_gradient"),
        Rule(kinds="update", statistics="cosine_to_previous"),
    ]
    flow = GradientFlow(blocks=r"model\.(blocks\.)?[0-9]+")
    return Parts([ModuleMonitorCallback(1, rules=rules, reference="init", rcc=True, attention=True, gradient_flow=flow)])


class ObserverCallback(Callback):
    """An observer of the plain loop, called at the places that torch-module-monitor's README names."""

    def __init__(self, attach: Callable[[nn.Module], Observer]) -> None:
        self.attach = attach

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.observer = self.attach(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        self.observer.begin(trainer.global_step)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer) -> None:
        self.observer.before_update()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: torch.Tensor | Mapping[str, Any] | None, batch: object, batch_idx: int
    ) -> None:
        self.observer.end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.observer.close()


def floor(_folder: Path) -> Parts:
    """One norm of each tensor."""
    return Parts([ObserverCallback(Floor)])


def peer(_folder: Path) -> Parts:
    """torch-module-monitor, without a logger."""
    return Parts([ObserverCallback(TorchModuleMonitor)])
