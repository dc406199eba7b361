"""Manual optimization with two optimizers: a small GAN on scikit-learn's digits, watched from inside.

Run it::

    python examples/gan.py

Every parameter is recorded at the step of its own optimizer. What to look at in a GAN is the balance: which of the two
networks moves faster, and whether the gradient that the discriminator hands to the generator dries up.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_module_monitor import ModuleMonitorCallback, Rule, load_store

NOISE = 16


class Gan(LightningModule):
    """Two perceptrons that play against each other.

    Args:
        width: Features of the hidden layers.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(NOISE, width), nn.LeakyReLU(0.2), nn.Linear(width, 64), nn.Sigmoid())
        self.discriminator = nn.Sequential(nn.Linear(64, width), nn.LeakyReLU(0.2), nn.Linear(width, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        real = batch[0]
        of_generator, of_discriminator = self.optimizers()  # type: ignore[attr-defined]  # there are two
        fake = self.generator(torch.randn(len(real), NOISE, device=self.device))

        self.toggle_optimizer(of_discriminator)
        loss = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake.detach())).mean()
        self.manual_backward(loss)
        of_discriminator.step()
        of_discriminator.zero_grad()
        self.untoggle_optimizer(of_discriminator)

        self.toggle_optimizer(of_generator)
        self.manual_backward(F.softplus(-self.discriminator(fake)).mean())
        of_generator.step()
        of_generator.zero_grad()
        self.untoggle_optimizer(of_generator)

    def configure_optimizers(self) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        networks = (self.generator, self.discriminator)
        generator, discriminator = (torch.optim.Adam(network.parameters(), lr=2e-3, betas=(0.5, 0.99)) for network in networks)
        return generator, discriminator


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: Arguments instead of those of the process.
    """
    parser = argparse.ArgumentParser(description="Monitor a GAN, optimized by hand.")
    parser.add_argument("--max_epochs", type=int, default=20)
    parser.add_argument("--every_n_steps", type=int, default=10)
    parser.add_argument("--output", default="demo_output/gan")
    options = parser.parse_args(arguments)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    # Loading 64 images of 8 x 8 pixels is no work for other processes; and what torch 2.13 has deprecated.
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)

    seed_everything(0, verbose=False)
    images, _labels = load_digits(return_X_y=True)
    loader = DataLoader(TensorDataset(torch.tensor(images, dtype=torch.float32) / 16), batch_size=64, shuffle=True)
    callback = ModuleMonitorCallback(
        options.every_n_steps,
        rules=[
            Rule(kinds=["activation", "activation_gradient"], leaf_modules=True, statistics=["rms", "zero_fraction"]),
            Rule(kinds=["parameter", "gradient"], statistics="norm"),
            Rule(kinds="update", sites=".*weight", statistics="ratio"),
        ],
    )
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = Trainer(max_epochs=options.max_epochs, default_root_dir=options.output, logger=False, callbacks=[callback], **quiet)
    trainer.fit(Gan(), loader)

    assert callback.store_path is not None
    store = load_store(callback.store_path)
    for network in ("generator", "discriminator"):
        # Of the layer that the other network's verdict, or the image, comes to first.
        layer = f"{network}.2" if network == "generator" else f"{network}.0"
        steps, ratios = store.series(f"update/{layer}.weight/ratio")
        _steps, norms = store.series(f"gradient/{layer}.weight/norm")
        figures = f"update ratio {np.median(ratios):.2g}, gradient {norms[0]:.2g} at first, {norms[-1]:.2g} at last"
        print(f"{layer}.weight: {figures}; {len(steps)} steps to {steps[-1]}")
    print(f"store: {callback.store_path}")


if __name__ == "__main__":
    main()
