"""Low-rank adapters (LoRA, arXiv 2106.09685), written out by hand: a network of digits learns to read them turned.

Run it::

    python examples/lora.py

The weights of before are frozen: they have no gradient, their update is 0, and the monitor says so. What it tells besides is how much
the adapters add to what the frozen layers give, and which of the two factors moves.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_module_monitor import ModuleMonitorCallback, Rule, load_store


class LoraLinear(nn.Module):
    """A frozen linear layer, and a product of two thin matrices beside it: ``W x + b + (alpha / rank) B A x``.

    Args:
        base: The layer. It is frozen.
        rank: Features between the two matrices.
        alpha: Weight of their product.
    """

    def __init__(self, base: nn.Linear, rank: int = 4, alpha: float = 8.0) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.scale = alpha / rank
        nn.init.zeros_(self.up.weight)  # at first nothing is added

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.base(x) + self.scale * self.up(self.down(x))
        return output


class Classifier(LightningModule):
    """A perceptron for images of 64 pixels. What of it is frozen is not trained.

    Args:
        learning_rate: Adam's.
    """

    def __init__(self, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([one for one in self.parameters() if one.requires_grad], lr=self.learning_rate)

    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        """Share of images that are read right."""
        with torch.no_grad():
            return float((self.model(images).argmax(dim=1) == labels).float().mean())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: Arguments instead of those of the process.
    """
    parser = argparse.ArgumentParser(description="Monitor low-rank adapters.")
    parser.add_argument("--max_epochs", type=int, default=5)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--output", default="demo_output/lora")
    options = parser.parse_args(arguments)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    # Loading 64 images of 8 x 8 pixels is no work for other processes; and what torch 2.13 has deprecated.
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)

    seed_everything(0, verbose=False)
    pixels, digits = load_digits(return_X_y=True)
    upright, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
    turned = upright.view(-1, 8, 8).rot90(1, (1, 2)).flatten(1)
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }

    module = Classifier()
    trainer = Trainer(max_epochs=3, logger=False, default_root_dir=options.output, **quiet)
    trainer.fit(module, DataLoader(TensorDataset(upright, labels), batch_size=64, shuffle=True))
    before = module.accuracy(turned, labels)

    for place in (0, 2):
        layer = module.model[place]
        assert isinstance(layer, nn.Linear)
        module.model[place] = LoraLinear(layer, options.rank)
    callback = ModuleMonitorCallback(
        every_n_steps=10,
        rules=[
            Rule(kinds="activation", sites=r".*\.(base|up)", statistics="rms"),
            Rule(kinds=["parameter", "gradient"], statistics="norm"),
            Rule(kinds="update", statistics=["norm", "ratio"]),
        ],
    )
    trainer = Trainer(max_epochs=options.max_epochs, logger=False, default_root_dir=options.output, callbacks=[callback], **quiet)
    trainer.fit(module, DataLoader(TensorDataset(turned, labels), batch_size=64, shuffle=True))

    assert callback.store_path is not None
    store = load_store(callback.store_path)
    print(f"accuracy on turned digits: {before:.3f} before, {module.accuracy(turned, labels):.3f} with adapters")
    for place in (0, 2):
        site = f"model.{place}"
        added, given = (store.series(f"activation/{site}.{part}/rms")[1] for part in ("up", "base"))
        base, down, up = (store.series(f"update/{site}.{part}.weight/norm")[1].max() for part in ("base", "down", "up"))
        layer = module.model[place]
        assert isinstance(layer, LoraLinear)
        share = layer.scale * added / given
        print(
            f"{site}: adapter adds {share[0]:.3f} of the layer's own output at first, {share[-1]:.3f} at last;"
            f" largest update: base {base:.2g}, down {down:.2g}, up {up:.2g}"
        )
    print(f"store: {callback.store_path}")


if __name__ == "__main__":
    main()
