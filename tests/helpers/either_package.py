"""A small training with the Trainer of either package of Lightning; it imports nothing of ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_steps": 2,
}


def model_of(package: Any, width: int = 4) -> Any:
    """A small regression, as a LightningModule of one of the packages."""

    class Model(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, width)
            self.head = nn.Linear(width, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.head(self.fc(batch)).pow(2).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Model()


def batches() -> DataLoader[Any]:
    """Two batches."""
    return DataLoader(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), batch_size=4)  # type: ignore[arg-type]
