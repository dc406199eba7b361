"""Networks of every width, for the width check."""

from __future__ import annotations

from typing import Any, Literal

import mup
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from helpers.lightning_package import LightningDataModule, LightningModule

IN_FEATURES, CLASSES = 128, 10
BASE_WIDTH = 128


def gaussian_batches(num_batches: int = 2, batch_size: int = 64, generator: torch.Generator | None = None) -> DataLoader[Any]:
    """Gaussian inputs of shape (128,) with labels of 10 classes, shuffled."""
    fixed = torch.Generator().manual_seed(1)
    x = torch.randn(num_batches * batch_size, IN_FEATURES, generator=fixed)
    y = torch.randint(CLASSES, (len(x),), generator=fixed)
    return DataLoader(TensorDataset(x, y), batch_size, shuffle=True, generator=generator)


class WideMlp(LightningModule):
    """Two hidden layers with ReLU, under one of the published parametrizations.

    Args:
        width: Features of both hidden layers.
        parametrization: ``sp``: one learning rate, constant for SGD, times 1 / width for Adam. ``mup``: table 3 of arXiv 2203.03466.
        optimizer: ``sgd`` or ``adam``.
        learning_rate: At a width of 128; the default is a small one of each optimizer.
    """

    def __init__(
        self,
        width: int,
        parametrization: Literal["sp", "mup"] = "sp",
        optimizer: Literal["sgd", "adam"] = "sgd",
        learning_rate: float | None = None,
    ) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(IN_FEATURES, width, bias=False),
            nn.ReLU(),
            nn.Linear(width, width, bias=False),
            nn.ReLU(),
            nn.Linear(width, CLASSES, bias=False),
        )
        self.is_mup, self.is_sgd = parametrization == "mup", optimizer == "sgd"
        self.ratio = width / BASE_WIDTH
        self.learning_rate = learning_rate or {"sgd": 0.1, "adam": 1e-3}[optimizer]
        for layer in self.linear_layers():
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
        if self.is_mup:
            self.linear_layers()[-1].weight.data /= self.ratio**0.5

    def linear_layers(self) -> list[nn.Linear]:
        """Input, hidden and output layer."""
        return [layer for layer in self.net if isinstance(layer, nn.Linear)]

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.is_mup:
            factors = [self.ratio, 1.0, 1 / self.ratio] if self.is_sgd else [1.0, 1 / self.ratio, 1 / self.ratio]
        else:
            factors = [1.0 if self.is_sgd else 1 / self.ratio] * 3
        rates = [self.learning_rate * factor for factor in factors]
        groups = [{"params": [layer.weight], "lr": rate} for layer, rate in zip(self.linear_layers(), rates, strict=True)]
        return torch.optim.SGD(groups) if self.is_sgd else torch.optim.Adam(groups)

    def train_dataloader(self) -> DataLoader[Any]:
        return gaussian_batches()


class MicrosoftMlp(WideMlp):
    """The network under muP by the package mup: its base shapes, readout and optimizers.

    Args:
        width: Features of both hidden layers.
        optimizer: ``sgd`` or ``adam``.
    """

    def __init__(self, width: int, optimizer: Literal["sgd", "adam"] = "sgd") -> None:
        super().__init__(width, "mup", optimizer)

        def net(width: int) -> nn.Sequential:
            hidden = [nn.Linear(IN_FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
            return nn.Sequential(*hidden, mup.MuReadout(width, CLASSES))

        self.net = net(width)
        mup.set_base_shapes(self.net, net(BASE_WIDTH), delta=net(2 * BASE_WIDTH))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        make: Any = mup.MuSGD if self.is_sgd else mup.MuAdam
        optimizer: torch.optim.Optimizer = make(self.parameters(), lr=self.learning_rate)
        return optimizer


class Gaussian(LightningDataModule):
    """The same batches from a datamodule.

    Args:
        num_batches: Batches in an epoch.
    """

    def __init__(self, num_batches: int = 2) -> None:
        super().__init__()
        self.num_batches = num_batches

    def train_dataloader(self) -> DataLoader[Any]:
        return gaussian_batches(self.num_batches)
