"""A run that Lightning itself starts on two processes: by spawning them, or by running this script once more.

Run as a script: ``launched.py FOLDER WAY``, where the way is ``script``, ``spawn``, or ``raises``: on the second process only, in the
middle of a monitored step, when the first one is about to bring values together.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from helpers.lightning_package import Callback, LightningModule, Trainer
from helpers.training import Classifier, seed, trainer
from helpers.zoo import batches
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_module_monitor import ModuleMonitorCallback, Rule


class Shares(Classifier):
    """Each process has batches of its own."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(share(self.global_rank), batch_size=None)


def share(rank: int) -> list[tuple[Tensor, Tensor]]:
    """The batches of a process."""
    return batches(3 + rank, 4, 5 - rank, seed=rank)


class Raises(Callback):
    """Raises at the end of the second step, on the second process, before the monitor's turn."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and pl_module.global_rank == 1:
            raise ValueError("on purpose")


def main(folder: Path, way: str) -> None:
    """Train for three steps."""
    rules = [Rule(kinds=["activation", "parameter", "gradient", "update"], statistics=["norm", "hist"])]
    callback = ModuleMonitorCallback(
        1,
        rules=rules,
    )
    more: list[Callback] = [Raises()] if way == "raises" else []
    strategy = "ddp_spawn" if way == "spawn" else "ddp"
    run = trainer(folder, [*more, callback], devices=2, strategy=strategy, use_distributed_sampler=False, limit_val_batches=0)
    seed()
    run.fit(Shares("shared", torch.optim.SGD, lr=0.1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
