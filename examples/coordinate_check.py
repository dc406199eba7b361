"""Does what the layers learn depend on the width? The standard parametrization against muP, on real digits.

Run it from the repository's root::

    python examples/coordinate_check.py

It trains the same network at four widths and four seeds under both parametrizations, and compares the exponents of width with
those of a sound parametrization, which are 0. muP is written out by hand: what differs from the standard is the head's
initialization, one learning rate and one factor.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_module_monitor import WidthCheck, coordinate_check

BASE_WIDTH = 64
"""The width at which both parametrizations are the same network."""


class DigitsMlp(LightningModule):
    """Three linear layers, trained with Adam to tell digits of 8 x 8 pixels.

    Args:
        width: Features of the hidden layers.
        parametrization: ``sp`` or ``mup``.
        learning_rate: Adam's, at ``BASE_WIDTH``.
    """

    def __init__(self, width: int, parametrization: Literal["sp", "mup"] = "sp", learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.is_mup = parametrization == "mup"
        self.learning_rate = learning_rate
        self.width_ratio = width / BASE_WIDTH
        self.first = nn.Linear(64, width)
        self.second = nn.Linear(width, width)
        self.head = nn.Linear(width, 10)
        for layer in (self.first, self.second, self.head):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            nn.init.zeros_(layer.bias)
        if self.is_mup:
            # The head's weights are of one size at every width, and a factor of 1 / width makes up for it ...
            nn.init.normal_(self.head.weight, std=BASE_WIDTH**-0.5)

    def forward(self, images: Tensor) -> Tensor:
        features = F.relu(self.second(F.relu(self.first(images))))
        # ... applied to what goes in, so that what is measured of the layer has it.
        logits: Tensor = self.head(features / self.width_ratio if self.is_mup else features)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Adam moves every weight of the second layer by its learning rate, and each of its outputs sums over the width.
        second_rate = self.learning_rate / self.width_ratio if self.is_mup else self.learning_rate
        others = [parameter for name, parameter in self.named_parameters() if name != "second.weight"]
        groups: list[dict[str, Any]] = [{"params": [self.second.weight], "lr": second_rate}, {"params": others}]
        return torch.optim.Adam(groups, lr=self.learning_rate)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        images, labels = load_digits(return_X_y=True)
        return DataLoader(TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)), 64, shuffle=True)


def check(parametrization: Literal["sp", "mup"], widths: Sequence[int], seeds: int, steps: int) -> WidthCheck:
    """Check one parametrization, and print the table."""
    print(
        f"\n{parametrization}: Adam, one learning rate"
        if parametrization == "sp"
        else f"\n{parametrization}: Adam, learning rates by layer"
    )
    result = coordinate_check(lambda width: DigitsMlp(width, parametrization), widths, seeds=seeds, steps=steps)
    print(result)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: Arguments instead of those of the process.
    """
    parser = argparse.ArgumentParser(description="Check how what a network learns depends on its width, for SP and muP.")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--seeds", type=int, default=4, help="number of seeds")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps before the measurement")
    parser.add_argument("--output", type=Path, default=Path("demo_output/coordinate_check.png"), help="path of the picture")
    options = parser.parse_args(arguments)
    # Loading images of 8 x 8 pixels is no work for other processes. Lightning 2.6 calls what torch 2.13 has deprecated.
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)

    figure = Figure(figsize=(10, 8), layout="constrained")
    parametrizations: tuple[Literal["sp", "mup"], ...] = ("sp", "mup")
    for row, name in enumerate(parametrizations):
        part = figure.add_subfigure(figure.add_gridspec(2, 1)[row])
        check(name, options.widths, options.seeds, options.steps).draw(part)
        part.suptitle(f"{name}: exponents of width")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output, dpi=100)
    print(f"\ncurves: {os.path.relpath(options.output)}")


if __name__ == "__main__":
    main()
