"""What observes a step of Lightning's Trainer: our callback, and the peers as their documentation uses them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from lanes import Parts
from lightning_module_monitor import ModuleMonitorCallback
from observers import TorchModuleMonitor, seven_statistics, wandb_settings

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


def defaults(folder: Path, every_n_steps: int) -> Parts:
    """The callback with default arguments other than the cadence, its store, and a TensorBoard logger."""
    return Parts([ModuleMonitorCallback(every_n_steps)], TensorBoardLogger(folder))


class PeerCallback(Callback):
    """torch-module-monitor, called at the places that its README names."""

    monitor: TorchModuleMonitor

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.monitor = TorchModuleMonitor(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        self.monitor.begin(trainer.global_step)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer) -> None:
        self.monitor.before_update()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: torch.Tensor | Mapping[str, Any] | None, batch: object, batch_idx: int
    ) -> None:
        self.monitor.end()
        if trainer.logger is not None:
            trainer.logger.log_metrics(self.monitor.monitor.get_step_metrics(), step=batch_idx)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.monitor.close()


def peer(_folder: Path) -> Parts:
    """torch-module-monitor, without a logger."""
    return Parts([PeerCallback()])


def peer_logged(folder: Path) -> Parts:
    """torch-module-monitor, and a TensorBoard logger for its values."""
    return Parts([PeerCallback()], TensorBoardLogger(folder))


class WandbWatchCallback(Callback):
    """``WandbLogger.watch``, and the call of the logger that writes its histograms."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        trainer.logger.watch(pl_module, log="all", log_freq=1)  # type: ignore[union-attr]  # the WandbLogger of wandb_watch

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: torch.Tensor | Mapping[str, Any] | None, batch: object, batch_idx: int
    ) -> None:
        assert trainer.logger is not None
        trainer.logger.log_metrics({"batch": batch_idx}, step=batch_idx)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        run = trainer.logger.experiment  # type: ignore[union-attr]  # as above
        run.unwatch(pl_module)
        run.finish()


def wandb_watch(folder: Path) -> Parts:
    """wandb.watch in a run that is offline."""
    from lightning.pytorch.loggers import WandbLogger

    return Parts([WandbWatchCallback()], WandbLogger(project="overhead", offline=True, save_dir=folder, settings=wandb_settings()))
