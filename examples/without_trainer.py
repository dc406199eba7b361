"""Tools without a Trainer: raw tensors say which units of a network are dead; how the gradient grows on its way back.

Run it::

    python examples/without_trainer.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_module_monitor import GradientGainMonitor, Tracker, track


def build_model() -> nn.Sequential:
    """Three layers, with ReLUs that overwrite what the layer before them returned."""
    return nn.Sequential(
        *(nn.Linear(64, 128), nn.ReLU(inplace=True)),
        *(nn.Linear(128, 128), nn.ReLU(inplace=True)),
        nn.Linear(128, 10),
    )


def load_data() -> tuple[Tensor, Tensor]:
    """1,797 images as 64 features each, and their labels."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def num_dead(activation: Tensor) -> int:
    """How many units are zero for every image: of shape (images, units). No mean and no norm tells."""
    return int((activation == 0).all(dim=0).sum())


def describe(tracker: Tracker) -> str:
    """A line for each layer: spread of its output and of the gradient that arrived there, and its dead units."""
    outputs = {stash.name: stash for stash in tracker if not stash.grad}
    gradients = {stash.name: stash.first_value for stash in tracker if stash.grad}
    return "\n".join(
        f"{name:2} {stash.type.__name__:7} std {stash.value.std():.3f}  gradient {gradients[name].std():.2e}"
        + (f"  dead {num_dead(stash.value)} of {stash.value.shape[1]}" if stash.type is nn.ReLU else "")
        for name, stash in outputs.items()
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: Arguments instead of those of the process.
    """
    parser = argparse.ArgumentParser(description="Look at raw tensors before and after training.")
    parser.add_argument("--max_steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.01)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    images, labels = load_data()
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)

    for when in ("before", "after"):
        # In the block the model is watched; after it there is no hook left. A limit, because raw tensors take memory.
        linear = [layer for layer in model if isinstance(layer, nn.Linear)]
        with track(model, exclude="^$", max_bytes=100 * 2**20) as tracker, GradientGainMonitor(linear) as flow:
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
        print(f"{when} training: loss {loss.item():.3f}, {tracker}\n{describe(tracker)}")
        print("gains of the gradient between the linear layers:", *(f"{gain:.3f}" for gain in flow.gains() if gain is not None))
        for _ in range(options.max_steps if when == "before" else 0):
            chosen = torch.randint(len(images), (128,))
            optimizer.zero_grad()
            F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
