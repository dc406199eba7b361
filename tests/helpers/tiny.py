"""A toy model, its training run, and what its monitor recorded: shared by tests of the callback in a real Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from helpers.lightning_package import Callback, LightningModule, Trainer
from lightning_module_monitor import ModuleMonitorCallback, Record


class Tiny(LightningModule):
    """Two layers and a ReLU. What it logs itself is what Lightning puts on its own x axis."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.model(batch[0]).pow(2).mean()
        self.log("loss", loss)
        self.log("own_weight_norm", self.model[0].weight.detach().double().norm())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("validation_loss", self.model(batch[0]).pow(2).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class KeepRecords(Callback):
    """Keeps every record of a monitor. It stands after the monitor in the Trainer's list."""

    def __init__(self, monitor: ModuleMonitorCallback) -> None:
        self.monitor = monitor
        self.records: list[Record] = []

    def _keep(self) -> None:
        record = self.monitor.last_record
        if record is not None and all(record is not kept for kept in self.records):
            self.records.append(record)

    def on_train_batch_end(self, *_args: Any) -> None:
        self._keep()

    def on_validation_epoch_end(self, *_args: Any) -> None:
        self._keep()

    def series(self) -> dict[str, dict[int, float]]:
        """Value by step, by key."""
        found: dict[str, dict[int, float]] = {}
        for record in self.records:
            for key, value in record.values.items():
                found.setdefault(key, {})[record.step] = value
        return found

    def logged(self) -> dict[str, dict[int, float]]:
        """The same of what loggers get: of the context of training the loss and the learning rate; no count of errors that is always 0."""
        logged = {key: values for key, values in self.series().items() if is_logged(key)}
        return {key: values for key, values in logged.items() if not key.endswith("monitor/errors") or any(values.values())}


def is_logged(key: str) -> bool:
    """Whether loggers get a key, if it is not a count that is always 0."""
    return not key.startswith("context/") or key in ("context/loss", "context/lr")


def measured(record: Record) -> dict[str, float]:
    """The values of a record without the context of training."""
    return {key: value for key, value in record.values.items() if not key.startswith("context/")}


def loader(num_batches: int = 6) -> DataLoader[tuple[Tensor, ...]]:
    """Batches of five, always the same ones."""
    x = torch.randn(5 * num_batches, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x), batch_size=5)


def trainer(root: Path, callbacks: list[Callback], **options: Any) -> Trainer:
    """A quiet Trainer on the CPU; without a logger, a bar or checkpoints unless they are asked for."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "log_every_n_steps": 1,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": root,
        "num_sanity_val_steps": 0,
    }
    return Trainer(callbacks=callbacks, **{**quiet, **options})


def fit(root: Path, callbacks: list[Callback], model: Callable[[], LightningModule] = Tiny, **options: Any) -> Trainer:
    """Train a new model, by default a :class:`Tiny`, from the same weights each time."""
    torch.manual_seed(0)
    used = trainer(root, callbacks, **options)
    used.fit(model(), loader(), loader(2))
    return used
